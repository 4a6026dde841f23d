"""Checks of one request against the served model and the limits: the only place that refuses impossible requests."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.generation.options import Bounds, check_options, check_seed, unsupported
from penstock.generation.requested import (
    GenerateCommand,
    RequestedOutput,
    RequestedStop,
    RequestLimits,
    ServedModel,
)

TIMEOUT = Bounds(0.0, above=True)


def validate(command: GenerateCommand, model: ServedModel, limits: RequestLimits) -> None:
    """Refuse what can never run, cheapest checks first.

    Raises NotFound (model, adapter), FailedPrecondition (tokenizer) and InvalidArgument naming the proto field.
    """
    _check_target(command, model)
    _check_identifiers(command, limits)
    if command.has_constraint:
        raise unsupported("constraint")
    check_options(command.options)
    if command.seed is not None:
        check_seed(command.seed, "seed")
    if command.timeout_seconds is not None and not TIMEOUT.allow(command.timeout_seconds):
        raise InvalidArgument("timeout_seconds", str(TIMEOUT))
    _check_counts(command, limits)
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


def _check_counts(command: GenerateCommand, limits: RequestLimits) -> None:
    options = command.options
    if (options.num_return_sequences or 1) > limits.max_return_sequences:
        raise InvalidArgument("config.num_return_sequences", f"must be at most {limits.max_return_sequences}")
    if len(options.logit_bias) > limits.max_logit_bias:
        raise InvalidArgument("config.logit_bias", f"must have at most {limits.max_logit_bias} entries")
    if len(command.eos_token_ids) > limits.max_eos_token_ids:
        raise InvalidArgument("eos_token_ids", f"must have at most {limits.max_eos_token_ids} entries")


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
    for name in output.tensors:
        raise unsupported(f"output.{name}")


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
    _check_vocabulary("prompt", prompt, vocab_size)
    _check_vocabulary("eos_token_ids", command.eos_token_ids, vocab_size)
    _check_vocabulary("config.logit_bias", command.options.logit_bias, vocab_size)
    for ids in command.stop.stop_token_ids:
        _check_vocabulary("stop.stop_token_ids", ids, vocab_size)
    _check_resumed(command, model)


def _check_resumed(command: GenerateCommand, model: ServedModel) -> None:
    field = "resumed_token_ids"
    for ids in command.resumed_token_ids:
        _check_vocabulary(field, ids, model.vocab_size)


def _check_vocabulary(field: str, ids: Iterable[int], vocab_size: int) -> None:
    if max(ids, default=0) >= vocab_size:
        raise InvalidArgument(field, f"every id must be below {vocab_size}", reason="TOKEN_OUT_OF_VOCABULARY")
