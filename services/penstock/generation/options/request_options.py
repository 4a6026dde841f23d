"""The fields of GenerationConfig as a caller or a model's file sets them, in groups. None means unset; no proto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.generation.core.modes import AssistantSchedule, EarlyStopping, WatermarkOptions

TokenSequence = tuple[int, ...]
# One of these must appear.
Alternatives = tuple[TokenSequence, ...]


@dataclass(frozen=True, slots=True)
class RequestedLength:
    """How long the output may and must be; max_length and min_length include the prompt, max_time is in seconds."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int | None = None
    max_time: float | None = None


@dataclass(frozen=True, slots=True)
class RequestedBeams:
    """Beam search and its kinds."""

    num_beams: int | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    constraints: tuple[Alternatives, ...] | None = None
    force_words_ids: tuple[Alternatives, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestedAssistance:
    """Drafts. An empty `assistant_model` and a `prompt_lookup_num_tokens` of 0 are off."""

    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    assistant_model: str | None = None
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: AssistantSchedule | None = None
    assistant_confidence_threshold: float | None = None


@dataclass(frozen=True, slots=True)
class RequestedGuidance:
    """Classifier-free guidance."""

    guidance_scale: float | None = None
    negative_prompt_ids: TokenSequence | None = None


@dataclass(frozen=True, slots=True)
class RequestedWarpers:
    """What changes the distribution that is sampled from."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None


@dataclass(frozen=True, slots=True)
class RequestedProcessors:
    """What changes the scores in every mode."""

    repetition_penalty: float | None = None
    encoder_repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: tuple[TokenSequence, ...] | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: TokenSequence | None = None
    # (start_index, decay_factor)
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: TokenSequence | None = None
    begin_suppress_tokens: TokenSequence | None = None
    sequence_bias: tuple[tuple[TokenSequence, float], ...] | None = None
    watermarking_config: WatermarkOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: TokenSequence | None = None
    allowed_token_trie: tuple[TokenSequence, ...] | None = None


# Shared by all options that set nothing of a group: most requests set little, and what is shared is known by identity.
_EMPTY_LENGTH, _EMPTY_BEAMS, _EMPTY_ASSISTANCE = RequestedLength(), RequestedBeams(), RequestedAssistance()
_EMPTY_GUIDANCE, _EMPTY_WARPERS, _EMPTY_PROCESSORS = RequestedGuidance(), RequestedWarpers(), RequestedProcessors()


@dataclass(frozen=True, slots=True)
class RequestedOptions:
    """A GenerationConfig; also the shape of a model's generation_config.json, which has a lower precedence.

    proto3 cannot tell an empty list from an unset one, so an empty list is unset.
    """

    length: RequestedLength = _EMPTY_LENGTH
    beams: RequestedBeams = _EMPTY_BEAMS
    assistance: RequestedAssistance = _EMPTY_ASSISTANCE
    guidance: RequestedGuidance = _EMPTY_GUIDANCE
    warpers: RequestedWarpers = _EMPTY_WARPERS
    processors: RequestedProcessors = _EMPTY_PROCESSORS
    do_sample: bool | None = None
    num_return_sequences: int | None = None
    penalty_alpha: float | None = None
    # "low", "high" or layer numbers.
    dola_layers: str | tuple[int, ...] | None = None
    token_healing: bool | None = None
    seed: int | None = None

    @classmethod
    def of(cls, **values: Any) -> RequestedOptions:
        """Options by their names in the proto, whatever their group. Raises KeyError for an unknown name."""
        own: dict[str, Any] = {}
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group = GROUP_OF[name]
            if group is None:
                own[name] = value
            else:
                grouped.setdefault(group, {})[name] = value
        return cls(**{group: _GROUPS[group](**members) for group, members in grouped.items()}, **own)

    def items(self) -> Iterator[tuple[str, Any]]:
        """The set options: name in the proto, value."""
        for group, (empty, names) in _MEMBERS.items():
            members = getattr(self, group)
            if members is not empty:
                yield from ((name, value) for name in names if (value := getattr(members, name)) is not None)
        yield from ((name, value) for name in _OWN if (value := getattr(self, name)) is not None)

    def over(self, fallback: RequestedOptions) -> RequestedOptions:
        """These options, and `fallback`'s where these are unset."""
        merged = {name: _over(getattr(self, name), getattr(fallback, name), _MEMBERS[name]) for name in _MEMBERS}
        own = {name: getattr(self if getattr(self, name) is not None else fallback, name) for name in _OWN}
        return RequestedOptions(**merged, **own)


def _over(asked: Any, fallback: Any, members: tuple[Any, tuple[str, ...]]) -> Any:
    """`asked`, with `fallback`'s members where its own are unset; both of one group."""
    empty, names = members
    if fallback is empty:
        return asked
    if asked is empty:
        return fallback
    return type(empty)(
        *(value if (value := getattr(asked, name)) is not None else getattr(fallback, name) for name in names)
    )


_GROUPS: dict[str, type[Any]] = {
    "length": RequestedLength,
    "beams": RequestedBeams,
    "assistance": RequestedAssistance,
    "guidance": RequestedGuidance,
    "warpers": RequestedWarpers,
    "processors": RequestedProcessors,
}
# Group -> its empty instance and the names of its members.
_MEMBERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    group: (getattr(RequestedOptions(), group), tuple(member.name for member in fields(cls)))
    for group, cls in _GROUPS.items()
}
_OWN = tuple(member.name for member in fields(RequestedOptions) if member.name not in _GROUPS)
# Every option's name in the proto -> its group; None: RequestedOptions itself.
GROUP_OF: dict[str, str | None] = {
    **{name: group for group, (_, names) in _MEMBERS.items() for name in names},
    **dict.fromkeys(_OWN),
}
