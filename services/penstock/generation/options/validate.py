"""Checks of one request against the served model and the limits: the only place that refuses impossible requests."""

from __future__ import annotations

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.generation.options.checks import Bounds, check_options, check_seed
from penstock.generation.options.generate_options import (
    GenerateCommand,
    RequestedOutput,
    RequestedStop,
    RequestLimits,
    ServedModel,
)
from penstock.generation.options.modes import check_assistant
from penstock.generation.options.request_options import RequestedOptions
from penstock.generation.options.token_ids import check_ids, check_vocabulary

TIMEOUT = Bounds(0.0, above=True)


def validate(command: GenerateCommand, model: ServedModel, limits: RequestLimits) -> None:
    """Refuse what can never run, cheapest checks first.

    Raises NotFound (model, adapter), FailedPrecondition (tokenizer) and InvalidArgument naming the proto field.
    """
    _check_target(command, model)
    _check_identifiers(command, limits)
    check_options(command.options)
    if command.seed is not None:
        check_seed(command.seed, "seed")
    if command.timeout_seconds is not None and not TIMEOUT.allow(command.timeout_seconds):
        raise InvalidArgument("timeout_seconds", str(TIMEOUT))
    _check_sizes(command.options, limits)
    check_assistant(command.options.assistance.assistant_model, model.assistant_model)
    check_stop(command.stop, model, limits)
    _check_output(command.output, len(command.prompt_token_ids), limits)
    _check_tokens(command, model)


def _check_target(command: GenerateCommand, model: ServedModel) -> None:
    check_model(command.model, model.name)
    if command.adapter:
        raise NotFound("adapter: no adapter of this name is loaded", reason="ADAPTER_NOT_FOUND", field="adapter")
    ours, theirs = model.tokenizer_fingerprint, command.tokenizer_fingerprint
    # A checkpoint without a tokenizer has nothing to compare with.
    if ours and theirs and ours != theirs:
        raise FailedPrecondition(
            "tokenizer_fingerprint: the caller's tokenizer is not the one that belongs to this model",
            reason="TOKENIZER_MISMATCH",
            field="tokenizer_fingerprint",
        )


def check_model(name: str, served: str) -> None:
    """Raises NotFound unless `name` is empty or the served one."""
    if name and name != served:
        raise NotFound("model: no model of this name is served here", reason="MODEL_NOT_FOUND", field="model")


def _check_identifiers(command: GenerateCommand, limits: RequestLimits) -> None:
    longest = limits.max_identifier_chars
    for field, text in (("request_id", command.request_id), ("cache_salt", command.cache_salt)):
        if len(text) > longest:
            raise InvalidArgument(field, f"must be at most {longest} characters long")


# Options that are a size or a count -> their bound in RequestLimits.
_BOUNDED = {
    "num_return_sequences": "max_return_sequences",
    "num_beams": "max_beams",
    "prompt_lookup_num_tokens": "max_draft_tokens",
    "num_assistant_tokens": "max_draft_tokens",
    "max_matching_ngram_size": "max_matching_ngram",
    "no_repeat_ngram_size": "max_ngram",
    "encoder_no_repeat_ngram_size": "max_ngram",
}


def _check_sizes(options: RequestedOptions, limits: RequestLimits) -> None:
    """Lists were measured when they were converted."""
    for name, value in options.items():
        if name in _BOUNDED and value > getattr(limits, _BOUNDED[name]):
            raise InvalidArgument(f"config.{name}", f"must be at most {getattr(limits, _BOUNDED[name])}")
    watermark = options.processors.watermarking_config
    if watermark is not None and watermark.context_width > limits.max_watermark_context:
        raise InvalidArgument(
            "config.watermarking_config.context_width", f"must be at most {limits.max_watermark_context}"
        )


def check_stop(stop: RequestedStop, model: ServedModel, limits: RequestLimits) -> None:
    """Bounds of the stop lists. Raises InvalidArgument naming `stop.*`."""
    strings, sequences = stop.stop_strings, stop.stop_token_ids
    if len(strings) > limits.max_stop_strings:
        raise InvalidArgument("stop.stop_strings", f"must have at most {limits.max_stop_strings} entries")
    if not all(strings):
        raise InvalidArgument("stop.stop_strings", "must not hold an empty string")
    if any(len(text) > limits.max_stop_string_chars for text in strings):
        raise InvalidArgument(
            "stop.stop_strings", f"every entry must be at most {limits.max_stop_string_chars} characters long"
        )
    if strings and not model.has_token_bytes:
        raise InvalidArgument("stop.stop_strings", "cannot be matched: the model's folder has no tokenizer.json")
    if len(sequences) > limits.max_stop_token_sequences:
        raise InvalidArgument("stop.stop_token_ids", f"must have at most {limits.max_stop_token_sequences} entries")
    if not all(1 <= len(ids) <= limits.max_stop_token_length for ids in sequences):
        raise InvalidArgument(
            "stop.stop_token_ids", f"every entry must hold between 1 and {limits.max_stop_token_length} ids"
        )


def _check_output(output: RequestedOutput, prompt_tokens: int, limits: RequestLimits) -> None:
    for name in ("top_logprobs", "prompt_logprobs"):
        count = getattr(output, name)
        if count is not None and not 0 <= count <= limits.max_top_logprobs:
            raise InvalidArgument(f"output.{name}", f"must be in [0, {limits.max_top_logprobs}]")
    if output.prompt_logprobs is not None:
        entries = prompt_tokens * (output.prompt_logprobs + 1)
        if entries > limits.max_prompt_logprob_entries:
            raise InvalidArgument(
                "output.prompt_logprobs",
                f"prompt tokens times (alternatives + 1) must be at most {limits.max_prompt_logprob_entries}",
            )
    if output.stream_interval == 0:
        raise InvalidArgument("output.stream_interval", "must be >= 1")


def _check_tokens(command: GenerateCommand, model: ServedModel) -> None:
    prompt, vocab_size = command.prompt_token_ids, model.vocab_size
    if not prompt:
        raise InvalidArgument("prompt", "must hold at least one token", reason="EMPTY_PROMPT")
    if len(prompt) >= model.max_context_tokens:
        raise InvalidArgument(
            "prompt",
            f"must be shorter than the context of {model.max_context_tokens} tokens",
            reason="PROMPT_TOO_LONG",
        )
    check_vocabulary("prompt", prompt, vocab_size)
    check_vocabulary("eos_token_ids", command.eos_token_ids, vocab_size)
    for ids in command.stop.stop_token_ids:
        check_vocabulary("stop.stop_token_ids", ids, vocab_size)
    for resumed in command.resumed_token_ids:
        check_vocabulary("resumed_token_ids", resumed, vocab_size)
    check_ids(command.options, vocab_size)
