"""Checks of one request against the served model and the limits: the only place that refuses impossible requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.common.model_names import those_there_are
from penstock.generation.options.checks import check_ids, check_limits, check_options, check_seed
from penstock.generation.options.inputs_embeds import check_embeds
from penstock.generation.options.kinds import Bounds, check_vocabulary
from penstock.generation.options.mode_options import check_assistant
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.table import CONFIG, OutputOptions, RequestOptions, StopOptions

TIMEOUT = Bounds(0.0, above=True)


def validate(request: GenerateOptions, model: ModelFacts, limits: RequestLimits) -> None:
    """Refuse a request that can never run, cheapest checks first.

    Raises NotFound (model, adapter), FailedPrecondition (tokenizer) and InvalidArgument naming the proto field.
    """
    _check_target(request, model)
    _check_identifiers(request, limits)
    check_options(request.options)
    if request.seed is not None:
        check_seed(request.seed, "seed")
    if request.timeout_seconds is not None and not TIMEOUT.allow(request.timeout_seconds):
        raise InvalidArgument("timeout_seconds", str(TIMEOUT))
    check_limits(request.options, limits)
    check_assistant(request.options.assistant_model, model.assistant_model)
    check_stop(request.stop, model, limits)
    check_embeds(request, model, limits)
    if model.unsupported:
        _check_supported(request, model)
    _check_output(request.output, request.num_prompt_tokens, limits)
    _check_tokens(request, model)


def with_prompt(request: GenerateOptions, defaults: ModelDefaults, model: ModelFacts) -> GenerateOptions:
    """Return the request with the beginning-of-sequence id for an empty prompt, as generate() without an input.

    It is the request's or else the model's; without either the prompt stays empty, which `validate` refuses. With
    inputs_embeds there is an input. Raises InvalidArgument for an id outside the vocabulary.
    """
    if request.prompt_token_ids or request.inputs_embeds is not None:
        return request
    asked = request.options.bos_token_id
    if asked is not None:
        check_vocabulary("config.bos_token_id", (asked,), model.vocab_size)
    begin = defaults.bos_token_id if asked is None else asked
    return request if begin is None else replace(request, prompt_token_ids=[begin])


def _check_target(request: GenerateOptions, model: ModelFacts) -> None:
    check_model(request.model, model.name)
    check_adapter(request.adapter, model)
    ours, theirs = model.tokenizer_fingerprint, request.tokenizer_fingerprint
    # A checkpoint without a tokenizer has nothing to compare with.
    if ours and theirs and ours != theirs:
        raise FailedPrecondition(
            "tokenizer_fingerprint: the caller's tokenizer is not the one that belongs to this model",
            reason="TOKENIZER_MISMATCH",
            field="tokenizer_fingerprint",
        )


def check_model(name: str, served: str) -> None:
    """Raise NotFound unless `name` is empty or the served model's."""
    if name and name != served:
        told = f"model: no model of this name is served here; {those_there_are([served])}"
        raise NotFound(told, reason="MODEL_NOT_FOUND", field="model")


def check_adapter(name: str, model: ModelFacts) -> None:
    """Raise NotFound unless `name` is empty or a known adapter's."""
    if name and not (model.has_adapter is not None and model.has_adapter(name)):
        raise NotFound("adapter: no adapter of this name is loaded", reason="ADAPTER_NOT_FOUND", field="adapter")


def _check_identifiers(request: GenerateOptions, limits: RequestLimits) -> None:
    longest = limits.max_identifier_chars
    for field in ("request_id", "cache_salt", "fair_share_key", "adapter_digest"):
        if len(getattr(request, field)) > longest:
            raise InvalidArgument(field, f"must be at most {longest} characters long")


def check_stop(stop: StopOptions, model: ModelFacts, limits: RequestLimits) -> None:
    """Check the stop options by themselves and their sizes. Raises InvalidArgument naming `stop.*`."""
    check_options(stop)
    check_limits(stop, limits)
    if stop.stop_strings and not model.has_token_bytes:
        raise InvalidArgument("stop.stop_strings", f"cannot be matched: {model.no_tokenizer}")


def _check_output(output: OutputOptions, prompt_tokens: int, limits: RequestLimits) -> None:
    check_options(output)
    check_limits(output, limits)
    if output.prompt_logprobs is not None:
        entries = prompt_tokens * (output.prompt_logprobs + 1)
        if entries > limits.max_prompt_logprob_entries:
            raise InvalidArgument(
                "output.prompt_logprobs",
                f"prompt tokens times (alternatives + 1) must be at most {limits.max_prompt_logprob_entries}",
            )


def unsupported_option(options: RequestOptions, unsupported: Mapping[str, str]) -> str | None:
    """Return the first field of `unsupported` that the options ask for; None: they ask for none."""
    asked = {f"config.{name}" for name, value in options.items() if CONFIG[name].asks(value)}
    return next((name for name in unsupported if name in asked), None)


def _check_supported(request: GenerateOptions, model: ModelFacts) -> None:
    """Refuse options that the model does not support. Raises InvalidArgument naming the field."""
    asked = {
        "inputs_embeds": request.inputs_embeds is not None,
        "output.output_hidden_states": bool(request.output.output_hidden_states),
        "output.output_attentions": bool(request.output.output_attentions),
    }
    name = unsupported_option(request.options, model.unsupported)
    name = name or next((name for name in model.unsupported if asked.get(name)), None)
    if name is not None:
        raise InvalidArgument(name, model.unsupported[name])


def _check_tokens(request: GenerateOptions, model: ModelFacts) -> None:
    prompt, vocab_size = request.prompt_token_ids, model.vocab_size
    if not request.num_prompt_tokens:
        raise InvalidArgument(
            "prompt",
            "must hold at least one token: the model has no id to begin with, and config.bos_token_id is unset",
            reason="EMPTY_PROMPT",
        )
    if request.num_prompt_tokens >= model.max_context_tokens:
        raise InvalidArgument(
            "prompt" if request.inputs_embeds is None else "inputs_embeds",
            f"must be shorter than the context of {model.max_context_tokens} tokens",
            reason="PROMPT_TOO_LONG",
        )
    check_vocabulary("prompt", prompt, vocab_size)
    check_vocabulary("eos_token_ids", request.eos_token_ids, vocab_size)
    check_ids(request.stop, vocab_size)
    for resumed in request.resumed_token_ids:
        check_vocabulary("resumed_token_ids", resumed, vocab_size)
    check_ids(request.options, vocab_size)
