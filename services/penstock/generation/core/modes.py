"""Facts that a decoding mode tells every room, and the options that go beside a mode. Plain data: no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
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


class Rescue(enum.Enum):
    """Rows that get what a constraint allows in spite of the other options, when those have left none of it."""

    # Every row of that kind.
    EACH = 1
    # Those of a request of which no sequence can go on.
    TOGETHER = 2
    # Every row that a grammar constrains; none that has allowed tokens only.
    GRAMMAR_ONLY = 3


class DecodingMode:
    """Facts about the mode of a request that other rooms act on; those written here are greedy search's and sampling's.

    Every other mode has a frozen dataclass derived from this one in engine/decoding/: its fields are its options, and
    it sets anew the facts that differ. Outside that folder nobody asks which mode a request is in: facts tell what to
    do.
    """

    __slots__ = ()

    # For the engine.
    # Tokens are told as they are drawn; else all of them at the end.
    streams: bool = True
    # First prompt token whose hidden state the mode needs; None: the last one alone.
    first_needed_row: int | None = None
    # What a constraint lets one sequence draw depends on whether any other can go on, so all draw in one step.
    shares_constraint: bool = False
    # For the runner.
    # The final hidden states of every token are kept, to be compared with those of candidates.
    keeps_hidden_states: bool = False
    # Layers whose logits the last one's are contrasted with, by the numbers of transformers' hidden_states: 0 is the
    # embedding.
    early_exits: tuple[int, ...] = ()
    # For the sampler.
    # Warpers leave a token more than there are end-of-sequence ids, so that a sequence can go on.
    keeps_more_than_ends: bool = False
    # What a token loses for every other group that chose it (DrawSpec.taken_ids).
    diversity_penalty: float = 0.0
    # For the options.
    # An unconditional branch may go beside it.
    may_be_guided: bool = True
    # Reason why tensors cannot be returned for each token; empty: they can.
    no_tensors: str = ""

    @property
    def rescue(self) -> Rescue:
        """Rows that a constraint brings on in spite of the other options."""
        return Rescue.EACH

    @property
    def uses(self) -> frozenset[str]:
        """Names of the options that have an effect in this mode and none in others."""
        return frozenset()

    @property
    def no_drafts(self) -> str:
        """Reason why options of drafting that it does not use have no effect."""
        return "there are no drafts, set config.assistant_model or config.prompt_lookup_num_tokens"

    @property
    def sizes(self) -> Mapping[str, float]:
        """Options that decide what a request may take of pool and batch, for a trace that makes it again; no ids."""
        return {}

    @property
    def trace(self) -> tuple[str, Mapping[str, float]]:
        """Name of this type and `sizes`: what `ModeRegistry.named` makes a mode of again."""
        return type(self).__name__, self.sizes

    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        """Name and number that transformers' get_generation_mode has for it."""
        return GenerationMode.SAMPLE if do_sample else GenerationMode.GREEDY_SEARCH


PLAIN = DecodingMode()


@dataclass(frozen=True, slots=True)
class GuidanceOptions:
    """Classifier-free guidance (Sanchez et al. 2023; transformers' guidance_scale)."""

    # 1: off.
    scale: float = 1.0
    # What the unconditional branch starts from; transformers: the last prompt token when there is no negative prompt.
    negative_prompt_ids: tuple[int, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether an unconditional branch goes beside every returned sequence."""
        return self.scale != 1.0


NO_GUIDANCE = GuidanceOptions()


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
