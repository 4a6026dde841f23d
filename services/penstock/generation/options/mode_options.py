"""The decoding mode that a request asks for, with its options, and impossible combinations.

Source: transformers' get_generation_mode (5.23; 4.41.1 for contrastive search, groups and constraints, 4.55.4 for DoLa)
and the checks of generate() there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument, NotFound
from penstock.generation.core.decoding_mode import (
    NO_GUIDANCE,
    PLAIN,
    AssistantSchedule,
    DecodingMode,
    EarlyStopping,
    GuidanceOptions,
)
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import ModelDefaults, ModelFacts
from penstock.generation.options.table import DEFAULT_TOP_K, RequestOptions

# Layers of DoLa: deeper models take their candidates from this number of first or last layers only.
_DEEP, _DEEP_SPAN = 40, 20


@dataclass(frozen=True, slots=True)
class Modes:
    """Fields of SamplingParams that choose the decoding mode."""

    do_sample: bool
    mode: DecodingMode
    guidance: GuidanceOptions


def resolve_modes(
    options: RequestOptions, defaults: ModelDefaults, model: ModelFacts, limits: RequestLimits, count: int
) -> Modes:
    """Return the mode of `options`, which hold the model's defaults too, for `count` returned sequences.

    Raises InvalidArgument for combinations that cannot be honoured, NotFound for an unknown assistant model.
    """
    do_sample = wants_sampling(options)
    mode: DecodingMode | None = _beams(options, defaults, limits, do_sample, count)
    if mode is None and not do_sample:
        mode = _contrastive(options, model, count)
    if mode is None:
        mode = _assistance(options, limits) or _dola(options, model) or PLAIN
    guidance = _guidance(options, model)
    if guidance.is_on and not mode.may_be_guided:
        raise InvalidArgument(
            "config.guidance_scale", "must be 1 with groups of beams, forced words, contrastive search or drafts"
        )
    return Modes(do_sample, mode, guidance)


def wants_sampling(options: RequestOptions) -> bool:
    """True when do_sample is on and the temperature is not 0: that is greedy."""
    return bool(options.do_sample) and options.temperature != 0


def _beams(
    options: RequestOptions, defaults: ModelDefaults, limits: RequestLimits, do_sample: bool, count: int
) -> BeamOptions | None:
    num_beams, groups = options.num_beams or 1, options.num_beam_groups or 1
    diversity = options.diversity_penalty or 0.0
    # transformers' order: its own constraints first, then the words.
    constraints = (options.constraints or ()) + (options.force_words_ids or ())
    if num_beams > limits.max_beams:
        raise InvalidArgument("config.num_beams", f"must be at most {limits.max_beams}")
    if constraints:
        _check_constrained(num_beams, groups, diversity, do_sample)
    if num_beams == 1:
        return None
    if groups > 1 or diversity:
        _check_groups(num_beams, groups, diversity, do_sample)
    if count > num_beams:
        raise InvalidArgument("config.num_return_sequences", "must be at most config.num_beams")
    return BeamOptions(
        num_beams,
        num_beam_groups=groups,
        diversity_penalty=diversity,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        early_stopping=options.early_stopping or EarlyStopping.FALSE,
        pad_token_id=defaults.pad_token_id if options.pad_token_id is None else options.pad_token_id,
        constraints=constraints,
    )


def _check_constrained(num_beams: int, groups: int, diversity: float, do_sample: bool) -> None:
    """Check as transformers 4.41.1: GenerationConfig.validate and ConstrainedBeamSearchScorer."""
    if num_beams == 1:
        raise InvalidArgument("config.num_beams", "must be above 1: forced words need constrained beam search")
    if do_sample:
        raise InvalidArgument("config.do_sample", "must be false: forced words need constrained beam search")
    if groups > 1:
        raise InvalidArgument("config.num_beam_groups", "must be 1 in constrained beam search")
    if diversity:
        raise InvalidArgument("config.diversity_penalty", "must be 0 in constrained beam search")


def _check_groups(num_beams: int, groups: int, diversity: float, do_sample: bool) -> None:
    """Check as transformers 4.41.1: GenerationConfig.validate, BeamSearchScorer and HammingDiversityLogitsProcessor."""
    if groups == 1:
        raise InvalidArgument("config.diversity_penalty", "must be 0 unless config.num_beam_groups is above 1")
    if do_sample:
        raise InvalidArgument("config.do_sample", "must be false in group beam search")
    if groups > num_beams or num_beams % groups:
        raise InvalidArgument("config.num_beam_groups", "must divide config.num_beams")
    if not diversity:
        raise InvalidArgument("config.diversity_penalty", "must be above 0, or the groups would be equal")


def _contrastive(options: RequestOptions, model: ModelFacts, count: int) -> ContrastiveOptions | None:
    top_k = options.top_k
    top_k = min(DEFAULT_TOP_K if top_k is None else top_k, model.vocab_size)
    if not options.penalty_alpha or top_k <= 1:
        return None
    if count > 1:
        raise InvalidArgument(
            "config.num_return_sequences", "must be 1 while decoding is contrastive: the sequences would be equal"
        )
    return ContrastiveOptions(options.penalty_alpha, top_k)


def _assistance(options: RequestOptions, limits: RequestLimits) -> AssistanceOptions | None:
    lookup = options.prompt_lookup_num_tokens or None
    memory = options.ngram_memory_num_tokens or None if limits.remembers_outputs else None
    window = options.lookahead_window or None
    if lookup is None and memory is None and window is None and not options.assistant_model:
        return None
    plain, most = AssistanceOptions(), limits.max_draft_tokens
    number = options.num_assistant_tokens
    return AssistanceOptions(
        num_assistant_tokens=min(plain.num_assistant_tokens, most) if number is None else number,
        schedule=options.num_assistant_tokens_schedule or AssistantSchedule.CONSTANT,
        confidence_threshold=plain.confidence_threshold
        if options.assistant_confidence_threshold is None
        else options.assistant_confidence_threshold,
        prompt_lookup_num_tokens=lookup,
        max_matching_ngram_size=options.max_matching_ngram_size or plain.max_matching_ngram_size,
        ngram_memory_num_tokens=memory,
        ngram_memory_match=options.ngram_memory_match or plain.ngram_memory_match,
        lookahead_window=window,
        lookahead_ngram_size=options.lookahead_ngram_size or plain.lookahead_ngram_size,
        lookahead_guesses=options.lookahead_guesses or plain.lookahead_guesses,
    )


def check_assistant(name: str | None, served: str) -> None:
    """Raise NotFound unless `name` is unset, empty or the served draft model's."""
    if name and name != served:
        # So that a caller need not guess; a model's name is no secret.
        there = f"{served!r} is" if served else "none is, see --assistant-model and --draft-head"
        raise NotFound(
            f"config.assistant_model: no draft model of this name is served beside the model, {there}",
            reason="ASSISTANT_NOT_FOUND",
            field="config.assistant_model",
        )


def _dola(options: RequestOptions, model: ModelFacts) -> DolaOptions | None:
    layers = options.dola_layers
    if layers is None:
        return None
    if not isinstance(layers, str) and max(layers) >= model.num_layers:
        raise InvalidArgument("config.dola_layers", f"every layer must be below the last, {model.num_layers}")
    return DolaOptions(candidate_layers(layers, model.num_layers, tied=model.tied_embeddings))


def candidate_layers(layers: str | Sequence[int], num_layers: int, *, tied: bool) -> tuple[int, ...]:
    """Return the candidate layers of a model with `num_layers` decoder layers, as transformers 4.55.4's _dola_decoding.

    `layers` is "low", "high" or numbers, 0 being the embedding and i the output of layer i - 1; numbers that are not
    below `num_layers` are left out. `tied`: the embedding is the output head as well, so that an exit from it would
    only repeat the input token, and "low" begins later. Raises InvalidArgument naming config.dola_layers when no
    layer is left.
    """
    if isinstance(layers, str):
        chosen = _preset(layers, num_layers, _first_useful(num_layers) if tied else 0)
    else:
        if any(layer < 0 for layer in layers):
            raise InvalidArgument("config.dola_layers", "must hold no negative layer")
        chosen = [layer for layer in dict.fromkeys(layers) if layer < num_layers]
    if not chosen:
        raise InvalidArgument("config.dola_layers", f"names no layer below the last of the model's {num_layers}")
    return tuple(chosen)


def _first_useful(num_layers: int) -> int:
    """Return the first layer of "low" when the embedding is tied."""
    if num_layers > 2:
        return 2
    return 1 if num_layers == 2 else 0


def _preset(name: str, num_layers: int, first: int) -> list[int]:
    half = num_layers // 2
    deep = num_layers > _DEEP
    if name == "low":
        return [first] if first == half else list(range(first, _DEEP_SPAN if deep else half, 2))
    if name == "high":
        return list(range(num_layers - _DEEP_SPAN if deep else half, num_layers, 2))
    raise InvalidArgument("config.dola_layers", 'must be "low", "high" or layer numbers')


def _guidance(options: RequestOptions, model: ModelFacts) -> GuidanceOptions:
    scale, negative = options.guidance_scale, options.negative_prompt_ids
    if scale is None or scale == 1:
        return NO_GUIDANCE
    if negative is not None and len(negative) >= model.max_context_tokens:
        raise InvalidArgument(
            "config.negative_prompt_ids",
            f"must be shorter than the context of {model.max_context_tokens} tokens",
            reason="PROMPT_TOO_LONG",
        )
    return GuidanceOptions(scale, negative or ())
