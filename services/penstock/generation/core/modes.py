"""Options of the decoding modes, resolved. Names are transformers' GenerationConfig's. Plain data: no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GenerationMode(enum.Enum):
    """What generate() does (transformers' GenerationMode; penstock.v1.GenerationMode has the same numbers)."""

    GREEDY_SEARCH = 1
    SAMPLE = 2
    BEAM_SEARCH = 3
    BEAM_SAMPLE = 4
    GROUP_BEAM_SEARCH = 5
    CONTRASTIVE_SEARCH = 6
    CONSTRAINED_BEAM_SEARCH = 7
    ASSISTED_GENERATION = 8
    DOLA_GENERATION = 9


class EarlyStopping(enum.Enum):
    """When beam search may stop: see transformers' `early_stopping`."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


class AssistantSchedule(enum.Enum):
    """How the number of drafted tokens changes within a request (transformers' num_assistant_tokens_schedule)."""

    CONSTANT = "constant"
    HEURISTIC = "heuristic"
    HEURISTIC_TRANSIENT = "heuristic_transient"


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Beam search, beam sampling, group beam search and constrained beam search."""

    num_beams: int
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE
    # Group beam search: what a group that is done counts as, for the diversity penalty of the others. None: the first
    # end-of-sequence id, as in transformers.
    pad_token_id: int | None = None
    # Constrained beam search: every one must be met by one of its alternatives, a phrase being its only alternative.
    constraints: tuple[tuple[tuple[int, ...], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ContrastiveOptions:
    """Contrastive search (Su et al. 2022; transformers 4.41). `top_k` candidates a step."""

    penalty_alpha: float
    top_k: int


@dataclass(frozen=True, slots=True)
class AssistanceOptions:
    """Assisted generation: by prompt lookup when `prompt_lookup_num_tokens` is set, else by the served draft model."""

    num_assistant_tokens: int = 20
    schedule: AssistantSchedule = AssistantSchedule.CONSTANT
    # Drafting stops at a token that the draft model gives less than this probability; 0: never.
    confidence_threshold: float = 0.4
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2

    @property
    def uses_draft_model(self) -> bool:
        """Whether drafts come from a model rather than from the prompt."""
        return self.prompt_lookup_num_tokens is None


@dataclass(frozen=True, slots=True)
class GuidanceOptions:
    """Classifier-free guidance (Sanchez et al. 2023; transformers' guidance_scale)."""

    scale: float
    # What the unconditional branch starts from; transformers: the last prompt token when there is no negative prompt.
    negative_prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DolaOptions:
    """DoLa (Chuang et al. 2023): layers whose early exits are contrasted with the last, resolved to numbers.

    Numbers are those of transformers' hidden_states: 0 is the embedding.
    """

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WatermarkOptions:
    """Green-list watermark (Kirchenbauer et al. 2023; transformers' WatermarkingConfig)."""

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1


@dataclass(frozen=True, slots=True)
class TensorOutputs:
    """Tensors that the answer carries for every chosen output position."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False
    # Scores and logits: so many of the highest with their ids; 0: the whole vocabulary.
    top_k: int = 0
    # Output positions, from 0; empty: every one.
    steps: frozenset[int] = frozenset()

    def wants(self, position: int) -> bool:
        """Whether output position `position` is one of the chosen."""
        return not self.steps or position in self.steps
