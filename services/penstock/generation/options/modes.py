"""Which decoding mode a request asks for, with its options, and which combinations cannot be.

As transformers' get_generation_mode (5.23; 4.41.1 for contrastive search, groups and constraints, 4.55.4 for DoLa) and
what generate() checks there.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.errors import InvalidArgument, NotFound
from penstock.generation.core.modes import (
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
from penstock.generation.options.dola_layers import candidate_layers
from penstock.generation.options.generate_options import ModelDefaults, RequestLimits, ServedModel
from penstock.generation.options.request_options import RequestedOptions

DEFAULT_TOP_K = 50
DEFAULT_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class Modes:
    """Fields of SamplingParams that tell how tokens are decoded."""

    do_sample: bool
    mode: DecodingMode
    guidance: GuidanceOptions


def resolve_modes(
    options: RequestedOptions, defaults: ModelDefaults, model: ServedModel, limits: RequestLimits, count: int
) -> Modes:
    """The mode of `options`, which hold the model's defaults too, for `count` returned sequences.

    Raises InvalidArgument for combinations that cannot be honoured, NotFound for an unknown assistant model.
    """
    do_sample = wants_sampling(options)
    mode: DecodingMode | None = _beams(options, defaults, limits, do_sample, count)
    if mode is None and not do_sample:
        mode = _contrastive(options, model, count)
    if mode is None:
        if not do_sample:
            _check_alone(count, "greedy")
        mode = _assistance(options, limits) or _dola(options, model) or PLAIN
    guidance = _guidance(options, model)
    if guidance.is_on and not mode.may_be_guided:
        raise InvalidArgument("config.guidance_scale", "must be 1 with beams, contrastive search or drafts")
    return Modes(do_sample, mode, guidance)


def wants_sampling(options: RequestedOptions) -> bool:
    """do_sample, but that a temperature of 0 is greedy."""
    return bool(options.do_sample) and options.warpers.temperature != 0


def _check_alone(count: int, kind: str) -> None:
    if count > 1:
        what = f"must be 1 while decoding is {kind}: the sequences would be equal"
        raise InvalidArgument("config.num_return_sequences", what)


def _beams(
    options: RequestedOptions, defaults: ModelDefaults, limits: RequestLimits, do_sample: bool, count: int
) -> BeamOptions | None:
    asked = options.beams
    num_beams, groups = asked.num_beams or 1, asked.num_beam_groups or 1
    diversity = asked.diversity_penalty or 0.0
    # transformers' order: its own constraints first, then the words.
    constraints = (asked.constraints or ()) + (asked.force_words_ids or ())
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
        length_penalty=1.0 if asked.length_penalty is None else asked.length_penalty,
        early_stopping=asked.early_stopping or EarlyStopping.FALSE,
        pad_token_id=defaults.pad_token_id,
        constraints=constraints,
    )


def _check_constrained(num_beams: int, groups: int, diversity: float, do_sample: bool) -> None:
    """4.41.1: GenerationConfig.validate and ConstrainedBeamSearchScorer."""
    if num_beams == 1:
        raise InvalidArgument("config.num_beams", "must be above 1: forced words need constrained beam search")
    if do_sample:
        raise InvalidArgument("config.do_sample", "must be false: forced words need constrained beam search")
    if groups > 1:
        raise InvalidArgument("config.num_beam_groups", "must be 1 in constrained beam search")
    if diversity:
        raise InvalidArgument("config.diversity_penalty", "must be 0 in constrained beam search")


def _check_groups(num_beams: int, groups: int, diversity: float, do_sample: bool) -> None:
    """4.41.1: GenerationConfig.validate, BeamSearchScorer and HammingDiversityLogitsProcessor."""
    if groups == 1:
        raise InvalidArgument("config.diversity_penalty", "must be 0 unless config.num_beam_groups is above 1")
    if do_sample:
        raise InvalidArgument("config.do_sample", "must be false in group beam search")
    if groups > num_beams or num_beams % groups:
        raise InvalidArgument("config.num_beam_groups", "must divide config.num_beams")
    if not diversity:
        raise InvalidArgument("config.diversity_penalty", "must be above 0, or the groups would be equal")


def _contrastive(options: RequestedOptions, model: ServedModel, count: int) -> ContrastiveOptions | None:
    top_k = options.warpers.top_k
    top_k = min(DEFAULT_TOP_K if top_k is None else top_k, model.vocab_size)
    if not options.penalty_alpha or top_k <= 1:
        return None
    _check_alone(count, "contrastive")
    return ContrastiveOptions(options.penalty_alpha, top_k)


def _assistance(options: RequestedOptions, limits: RequestLimits) -> AssistanceOptions | None:
    asked = options.assistance
    lookup = asked.prompt_lookup_num_tokens or None
    if lookup is None and not asked.assistant_model:
        return None
    plain, most = AssistanceOptions(), limits.max_draft_tokens
    number = asked.num_assistant_tokens
    return AssistanceOptions(
        num_assistant_tokens=min(plain.num_assistant_tokens, most) if number is None else number,
        schedule=asked.num_assistant_tokens_schedule or AssistantSchedule.CONSTANT,
        confidence_threshold=plain.confidence_threshold
        if asked.assistant_confidence_threshold is None
        else asked.assistant_confidence_threshold,
        prompt_lookup_num_tokens=lookup,
        max_matching_ngram_size=asked.max_matching_ngram_size or plain.max_matching_ngram_size,
    )


def check_assistant(name: str | None, served: str) -> None:
    """Raises NotFound unless `name` is unset, empty or the served draft model's."""
    if name and name != served:
        raise NotFound(
            "config.assistant_model: no draft model of this name is served beside the model",
            reason="ASSISTANT_NOT_FOUND",
            field="config.assistant_model",
        )


def _dola(options: RequestedOptions, model: ServedModel) -> DolaOptions | None:
    layers = options.dola_layers
    if layers is None:
        return None
    if not isinstance(layers, str) and max(layers) >= model.num_layers:
        raise InvalidArgument("config.dola_layers", f"every layer must be below the last, {model.num_layers}")
    return DolaOptions(candidate_layers(layers, model.num_layers, tied=model.tied_embeddings))


def _guidance(options: RequestedOptions, model: ServedModel) -> GuidanceOptions:
    scale, negative = options.guidance.guidance_scale, options.guidance.negative_prompt_ids
    if scale is None or scale == 1:
        return NO_GUIDANCE
    if negative is not None and len(negative) >= model.max_context_tokens:
        raise InvalidArgument(
            "config.negative_prompt_ids",
            f"must be shorter than the context of {model.max_context_tokens} tokens",
            reason="PROMPT_TOO_LONG",
        )
    return GuidanceOptions(scale, negative or ())
