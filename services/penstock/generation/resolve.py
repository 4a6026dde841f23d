"""From what a caller asked for to what the engine does: request > generation_config.json > documented defaults."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TypeVar

from penstock.common.errors import InvalidArgument
from penstock.generation.options import BEAM_ONLY
from penstock.generation.requested import GenerateCommand, ModelDefaults, RequestedOptions, RequestLimits, ServedModel
from penstock.generation.sampling.params import SamplingParams

T = TypeVar("T")

# Penstock's own defaults, where neither the request nor the model says otherwise: transformers 5.x's, except that an
# unset length means "up to the context" (never 20 tokens).
DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_K = 50
DEFAULT_TOP_P = 1.0

# Sampling options, and the values that transformers does not warn about while decoding is greedy.
_SAMPLING_ONLY: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, DEFAULT_TOP_K),
    "top_p": (1.0,),
    "min_p": (0.0,),
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's options with every default filled in."""

    params: SamplingParams
    # What transformers only warns about.
    warnings: tuple[str, ...]
    # Tokens per delta.
    stream_interval: int


def resolve(command: GenerateCommand, defaults: ModelDefaults, model: ServedModel, limits: RequestLimits) -> Resolved:
    """Fill in defaults. `command` has passed `validate`. Raises InvalidArgument for impossible combinations."""
    options, fallback = command.options, defaults.options
    warnings: list[str] = []
    temperature = _first(options.temperature, fallback.temperature, DEFAULT_TEMPERATURE)
    wants_sampling = _first(options.do_sample, fallback.do_sample, False)
    do_sample = wants_sampling and temperature > 0
    _warn_about_strategy(options, do_sample, warnings)
    count = _resolve_count(command, fallback, do_sample, limits)
    maximum, minimum = _resolve_lengths(command, fallback, model, count, warnings)
    _check_resumed(command, count, maximum)
    if command.output.echo:
        warnings.append("output.echo has no effect here: the router returns the prompt, a token client holds it")
    ignore_eos = bool(command.stop.ignore_eos)
    eos_sequences = () if ignore_eos or command.eos_token_ids else defaults.eos_sequences
    params = SamplingParams(
        max_new_tokens=maximum,
        min_new_tokens=minimum,
        do_sample=do_sample,
        temperature=temperature if do_sample else 1.0,
        top_k=_first(options.top_k, fallback.top_k, DEFAULT_TOP_K) if do_sample else 0,
        top_p=_first(options.top_p, fallback.top_p, DEFAULT_TOP_P) if do_sample else 1.0,
        min_p=_first(options.min_p, fallback.min_p, 0.0) if do_sample else 0.0,
        repetition_penalty=_first(options.repetition_penalty, fallback.repetition_penalty, 1.0),
        frequency_penalty=_first(options.frequency_penalty, fallback.frequency_penalty, 0.0),
        presence_penalty=_first(options.presence_penalty, fallback.presence_penalty, 0.0),
        logit_bias=dict(options.logit_bias),
        seed=_resolve_seed(command),
        num_return_sequences=count,
        eos_token_ids=command.eos_token_ids or defaults.eos_token_ids,
        ignore_eos=ignore_eos,
        stop_token_ids=command.stop.stop_token_ids + eos_sequences,
        stop_strings=command.stop.stop_strings or defaults.stop_strings,
        include_stop_string_in_output=bool(command.stop.include_stop_string_in_output),
        skip_special_tokens=_first(command.output.skip_special_tokens, None, True),
        top_logprobs=command.output.top_logprobs,
        prompt_logprobs=command.output.prompt_logprobs,
        max_time=_first(options.max_time, fallback.max_time, None),
    )
    return Resolved(params, tuple(warnings), command.output.stream_interval or 1)


def _first(requested: T | None, fallback: T | None, default: T) -> T:
    if requested is not None:
        return requested
    return default if fallback is None else fallback


def _resolve_seed(command: GenerateCommand) -> int:
    """The router always sets one; a direct caller who did not is told the drawn one in Started."""
    if command.seed is not None:
        return command.seed
    return command.options.seed if command.options.seed is not None else secrets.randbits(63)


def _warn_about_strategy(options: RequestedOptions, do_sample: bool, warnings: list[str]) -> None:
    """Only the request's own fields warn: a model's file with sampling values is no mistake of the caller."""
    if not do_sample:
        if options.do_sample and options.temperature == 0:
            warnings.append("config.do_sample has no effect: config.temperature = 0 means greedy")
        for name, silent in _SAMPLING_ONLY.items():
            value = getattr(options, name)
            if value is not None and value not in silent:
                warnings.append(f"config.{name} has no effect: decoding is greedy, set config.do_sample to sample")
    for name, silent_values in BEAM_ONLY.items():
        if name in options.others and options.others[name] not in silent_values:
            warnings.append(f"config.{name} has no effect: it belongs to beam search, and num_beams is 1")


def _resolve_count(command: GenerateCommand, fallback: RequestedOptions, do_sample: bool, limits: RequestLimits) -> int:
    field = "config.num_return_sequences"
    count = _first(command.options.num_return_sequences, fallback.num_return_sequences, 1)
    if count > 1 and not do_sample:
        raise InvalidArgument(field, "must be 1 while decoding is greedy: the sequences would be equal")
    if count > limits.max_return_sequences:
        raise InvalidArgument(field, f"must be at most {limits.max_return_sequences}")
    return count


def _resolve_lengths(
    command: GenerateCommand, fallback: RequestedOptions, model: ServedModel, count: int, warnings: list[str]
) -> tuple[int, int]:
    """Return (max_new_tokens, min_new_tokens). A limit on new tokens wins over a total length of the same origin."""
    prompt, options = len(command.prompt_token_ids), command.options
    maximum = _requested_maximum(options, prompt, warnings)
    if maximum is None:
        maximum = _open_ended(fallback, prompt, model.open_ended_tokens(prompt, count), warnings)
    room = model.max_context_tokens - prompt
    if maximum > room:
        maximum = room
        warnings.append(f"the requested length exceeds the context: generating at most {room} tokens")
    minimum = _minimum(options, prompt)
    if minimum is None:
        minimum = _minimum(fallback, prompt) or 0
    if minimum > maximum:
        warnings.append("the minimum length exceeds the maximum: generation stops at the maximum")
    return maximum, min(minimum, maximum)


def _open_ended(fallback: RequestedOptions, prompt: int, room: int, warnings: list[str]) -> int:
    """The model's own limit, else all the room there is. Neither is the caller's wish, so neither can be too much."""
    limit = _fallback_maximum(fallback, prompt)
    if limit is not None:
        return min(limit, room)
    warnings.append(f"config.max_new_tokens is unset: generating at most {room} tokens")
    return room


def _requested_maximum(options: RequestedOptions, prompt: int, warnings: list[str]) -> int | None:
    if options.max_new_tokens is not None:
        if options.max_length is not None:
            warnings.append("config.max_length has no effect: config.max_new_tokens is set and wins")
        return options.max_new_tokens
    if options.max_length is None:
        return None
    if prompt >= options.max_length:
        raise InvalidArgument("config.max_length", "must exceed the number of prompt tokens")
    return options.max_length - prompt


def _fallback_maximum(fallback: RequestedOptions, prompt: int) -> int | None:
    """A model's max_length that the prompt already fills cannot be meant for this request."""
    if fallback.max_new_tokens is not None:
        return fallback.max_new_tokens
    if fallback.max_length is not None and fallback.max_length > prompt:
        return fallback.max_length - prompt
    return None


def _minimum(options: RequestedOptions, prompt: int) -> int | None:
    if options.min_new_tokens is not None:
        return options.min_new_tokens
    return None if options.min_length is None else max(options.min_length - prompt, 0)


def _check_resumed(command: GenerateCommand, count: int, maximum: int) -> None:
    resumed = command.resumed_token_ids
    if not resumed:
        return
    if len(resumed) != count:
        raise InvalidArgument("resumed_token_ids", "must be empty or hold one list per returned sequence")
    if any(len(ids) > maximum for ids in resumed):
        raise InvalidArgument("resumed_token_ids", f"no list may exceed the {maximum} tokens to generate")
