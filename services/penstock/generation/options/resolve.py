"""From what a caller asked for to what the engine does: request > generation_config.json > documented defaults."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.common.errors import InvalidArgument
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.generate_options import GenerateCommand, ModelDefaults, RequestLimits, ServedModel
from penstock.generation.options.lengths import resolve_lengths
from penstock.generation.options.modes import DEFAULT_TEMPERATURE, DEFAULT_TOP_K, Modes, resolve_modes
from penstock.generation.options.request_options import RequestedOptions, RequestedProcessors, RequestedWarpers
from penstock.generation.options.token_ids import check_possible
from penstock.generation.options.warnings import warnings_of

T = TypeVar("T")


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
    # Penstock's own defaults, where neither the request nor the model says otherwise, are transformers 5.x's, except
    # that an unset length means "up to the context" (never 20 tokens).
    options = command.options.over(defaults.options)
    count = _or(options.num_return_sequences, 1)
    if count > limits.max_return_sequences:
        raise InvalidArgument("config.num_return_sequences", f"must be at most {limits.max_return_sequences}")
    modes = resolve_modes(options, defaults, model, limits, count)
    if options.token_healing:
        _check_healing(command.output.prompt_logprobs, model)
    check_possible(options, model.vocab_size)
    if command.constraint is not None:
        _check_constrained(options)
    fields = {
        "do_sample": modes.do_sample,
        **(_warpers(options.warpers) if modes.do_sample else {}),
        **_processors(options.processors),
        **_ends(command, defaults),
        "mode": modes.mode,
        "guidance": modes.guidance,
        "token_healing": bool(options.token_healing),
        "seed": _resolve_seed(command),
        "num_return_sequences": count,
        "skip_special_tokens": _or(command.output.skip_special_tokens, True),
        "top_logprobs": command.output.top_logprobs,
        "prompt_logprobs": command.output.prompt_logprobs,
        "max_time": options.length.max_time,
    }
    warnings = warnings_of(command.options, command.output, modes, has_eos=bool(fields["eos_token_ids"]))
    open_ended = _open_ended(model, fields)
    maximum, minimum = resolve_lengths(command, defaults, _room(command, model, modes), open_ended, warnings)
    _check_resumed(command, count, maximum)
    params = SamplingParams(max_new_tokens=maximum, min_new_tokens=minimum, **fields)
    return Resolved(params, tuple(warnings), command.output.stream_interval or 1)


def _room(command: GenerateCommand, model: ServedModel, modes: Modes) -> int:
    """Tokens that the context has for output; a guided request's other branch must fit it as well."""
    return model.max_context_tokens - max(len(command.prompt_token_ids), len(modes.guidance.negative_prompt_ids))


def _open_ended(model: ServedModel, fields: dict[str, Any]) -> Callable[[int], int] | None:
    """Prompt tokens -> most new ones that the pool holds, for parameters of these `fields`; None: no bound."""
    most = model.max_output_tokens
    return None if most is None else lambda prompt: most(SamplingParams(1, **fields), prompt)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _given(**values: Any) -> dict[str, Any]:
    """Those that are set; SamplingParams has transformers' defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}


def _warpers(asked: RequestedWarpers) -> dict[str, Any]:
    return _given(
        temperature=_or(asked.temperature, DEFAULT_TEMPERATURE),
        top_k=_or(asked.top_k, DEFAULT_TOP_K),
        top_p=asked.top_p,
        min_p=asked.min_p,
        top_h=asked.top_h,
        typical_p=asked.typical_p,
        epsilon_cutoff=asked.epsilon_cutoff,
        eta_cutoff=asked.eta_cutoff,
    )


def _processors(asked: RequestedProcessors) -> dict[str, Any]:
    return _given(
        repetition_penalty=asked.repetition_penalty,
        encoder_repetition_penalty=asked.encoder_repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        logit_bias=None if asked.logit_bias is None else dict(asked.logit_bias),
        no_repeat_ngram_size=asked.no_repeat_ngram_size,
        encoder_no_repeat_ngram_size=asked.encoder_no_repeat_ngram_size,
        bad_words_ids=asked.bad_words_ids,
        sequence_bias=None if asked.sequence_bias is None else dict(asked.sequence_bias),
        suppress_tokens=asked.suppress_tokens,
        begin_suppress_tokens=asked.begin_suppress_tokens,
        forced_bos_token_id=asked.forced_bos_token_id,
        forced_eos_token_ids=asked.forced_eos_token_id,
        exponential_decay_length_penalty=asked.exponential_decay_length_penalty,
        allowed_token_ids=None if asked.allowed_token_ids is None else frozenset(asked.allowed_token_ids),
        allowed_token_trie=asked.allowed_token_trie,
        watermark=asked.watermarking_config,
        renormalize_logits=asked.renormalize_logits,
        remove_invalid_values=asked.remove_invalid_values,
    )


def _ends(command: GenerateCommand, defaults: ModelDefaults) -> dict[str, Any]:
    stop = command.stop
    ignore_eos = bool(stop.ignore_eos)
    eos_sequences = () if ignore_eos or command.eos_token_ids else defaults.eos_sequences
    return {
        "eos_token_ids": command.eos_token_ids or defaults.eos_token_ids,
        "ignore_eos": ignore_eos,
        "stop_token_ids": stop.stop_token_ids + eos_sequences,
        "stop_strings": stop.stop_strings or defaults.stop_strings,
        "include_stop_string_in_output": bool(stop.include_stop_string_in_output),
    }


def _resolve_seed(command: GenerateCommand) -> int:
    """The router always sets one; a direct caller who did not is told the drawn one in Started."""
    if command.seed is not None:
        return command.seed
    return command.options.seed if command.options.seed is not None else secrets.randbits(63)


def _check_healing(prompt_logprobs: int | None, model: ServedModel) -> None:
    if not model.has_token_bytes:
        raise InvalidArgument("config.token_healing", "cannot be done: the model's folder has no tokenizer.json")
    if prompt_logprobs is not None:
        raise InvalidArgument("config.token_healing", "must be false with output.prompt_logprobs: the prompt changes")


def _check_constrained(options: RequestedOptions) -> None:
    """A grammar and forced words can contradict each other, and healed text would be part of what is constrained."""
    if options.beams.constraints or options.beams.force_words_ids:
        raise InvalidArgument("constraint", "must not be set in constrained beam search")
    if options.token_healing:
        raise InvalidArgument("config.token_healing", "must be false with a constraint")


def _check_resumed(command: GenerateCommand, count: int, maximum: int) -> None:
    resumed = command.resumed_token_ids
    if not resumed:
        return
    if len(resumed) != count:
        raise InvalidArgument("resumed_token_ids", "must be empty or hold one list per returned sequence")
    if any(len(ids) > maximum for ids in resumed):
        raise InvalidArgument("resumed_token_ids", f"no list may exceed the {maximum} tokens to generate")
