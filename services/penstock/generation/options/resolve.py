"""Turns a caller's options into the engine's parameters: request > generation_config.json > documented defaults."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.checks import check_possible
from penstock.generation.options.inputs_embeds import ENCODER_OPTIONS, check_beside_embeds, embeds_warnings
from penstock.generation.options.lengths import resolve_lengths
from penstock.generation.options.mode_options import Modes, resolve_modes
from penstock.generation.options.option_spec import OptionSet
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.table import DEFAULT_TOP_K, RequestOptions
from penstock.generation.options.thinking import check_thinking
from penstock.generation.options.warnings import warnings_of


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's options with every default filled in."""

    params: SamplingParams
    # Warnings, about the same as transformers'.
    warnings: tuple[str, ...]
    # Tokens per delta.
    stream_interval: int


def resolve(request: GenerateOptions, defaults: ModelDefaults, model: ModelFacts, limits: RequestLimits) -> Resolved:
    """Fill in defaults. `request` has passed `validate`. Raises InvalidArgument for impossible combinations."""
    # Values that neither the request nor the model sets are transformers 5.x's defaults, with one exception: an unset
    # length means "up to the context" (never 20 tokens).
    options = request.options.over(defaults.options)
    count = 1 if options.num_return_sequences is None else options.num_return_sequences
    if count > limits.max_return_sequences:
        raise InvalidArgument("config.num_return_sequences", f"must be at most {limits.max_return_sequences}")
    modes = resolve_modes(options, defaults, model, limits, count)
    if options.token_healing:
        _check_healing(request.output.prompt_logprobs, model)
    check_possible(options, model.vocab_size)
    if request.constraint is not None:
        _check_constrained(options)
    check_beside_embeds(request, options, modes)
    fields = {
        **_as_they_are(options, request.stop, request.output, do_sample=modes.do_sample),
        "do_sample": modes.do_sample,
        **_ends(request, defaults),
        "mode": modes.mode,
        "guidance": modes.guidance,
        "token_healing": bool(options.token_healing),
        "seed": _resolve_seed(request),
        "num_return_sequences": count,
    }
    if request.inputs_embeds is not None:
        for name in ENCODER_OPTIONS:
            fields.pop(name, None)
    warnings = [*warnings_of(request, options, modes, has_eos=bool(fields["eos_token_ids"])), *embeds_warnings(request)]
    warnings += check_thinking(request, modes, model, limits)
    open_ended = _open_ended(model, fields)
    maximum, minimum = resolve_lengths(request, defaults, _room(request, model, modes), open_ended, warnings)
    _check_resumed(request, count, maximum)
    params = SamplingParams(max_new_tokens=maximum, min_new_tokens=minimum, **fields)
    return Resolved(params, tuple(warnings), request.output.stream_interval or 1)


def _room(request: GenerateOptions, model: ModelFacts, modes: Modes) -> int:
    """Return the number of output tokens that fit the context; the unconditional branch of a guided request must fit it
    too."""
    return model.max_context_tokens - max(request.num_prompt_tokens, len(modes.guidance.negative_prompt_ids))


def _open_ended(model: ModelFacts, fields: dict[str, Any]) -> Callable[[int], int] | None:
    """Return a function: prompt tokens -> most new tokens that fit the pool, for parameters of these `fields`; None: no
    bound."""
    most = model.max_output_tokens
    return None if most is None else lambda prompt: most(SamplingParams(1, **fields), prompt)


def _as_they_are(*parts: OptionSet, do_sample: bool) -> dict[str, Any]:
    """Return the set options that SamplingParams has, too; the others have transformers' defaults there."""
    fields: dict[str, Any] = {"top_k": DEFAULT_TOP_K} if do_sample else {}
    for options in parts:
        for name, value in options.items():
            spec = options.specs[name]
            if spec.param is not None and (do_sample or not spec.is_sampling_only):
                fields[spec.param] = spec.kind.to_param(value)
    return fields


def _ends(request: GenerateOptions, defaults: ModelDefaults) -> dict[str, Any]:
    stop = request.stop
    asked = request.eos_token_ids or request.options.eos_token_id
    eos_sequences = () if stop.ignore_eos or asked else defaults.eos_sequences
    return {
        "eos_token_ids": asked or defaults.eos_token_ids,
        "stop_token_ids": stop.stop_token_ids + eos_sequences,
        "stop_strings": stop.stop_strings or defaults.stop_strings,
    }


def _resolve_seed(request: GenerateOptions) -> int:
    """Return the request's seed, or a random one. The router always sets one; a direct caller finds the random one in
    Started."""
    if request.seed is not None:
        return request.seed
    return request.options.seed if request.options.seed is not None else secrets.randbits(63)


def _check_healing(prompt_logprobs: int | None, model: ModelFacts) -> None:
    if not model.has_token_bytes:
        raise InvalidArgument("config.token_healing", f"cannot be done: {model.no_tokenizer}")
    if prompt_logprobs is not None:
        raise InvalidArgument("config.token_healing", "must be false with output.prompt_logprobs: the prompt changes")


def _check_constrained(options: RequestOptions) -> None:
    """Refuse a grammar with forced words, since the two can contradict each other, and with token healing, since the
    grammar would constrain healed text, too."""
    if options.constraints or options.force_words_ids:
        raise InvalidArgument("constraint", "must not be set in constrained beam search")
    if options.token_healing:
        raise InvalidArgument("config.token_healing", "must be false with a constraint")


def _check_resumed(request: GenerateOptions, count: int, maximum: int) -> None:
    resumed = request.resumed_token_ids
    if not resumed:
        return
    if len(resumed) != count:
        raise InvalidArgument("resumed_token_ids", "must be empty or hold one list per returned sequence")
    if any(len(ids) > maximum for ids in resumed):
        raise InvalidArgument("resumed_token_ids", f"no list may exceed the {maximum} tokens to generate")
