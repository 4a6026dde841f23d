"""Facts of a decoding mode that other rooms act on, and options that go beside a mode. Plain data: no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class GenerationMode(enum.Enum):
    """Decoding mode of generate() (transformers' GenerationMode; penstock.v1.GenerationMode has the same numbers)."""

    GREEDY_SEARCH = 1
    SAMPLE = 2
    BEAM_SEARCH = 3
    BEAM_SAMPLE = 4
    GROUP_BEAM_SEARCH = 5
    CONTRASTIVE_SEARCH = 6
    CONSTRAINED_BEAM_SEARCH = 7
    ASSISTED_GENERATION = 8
    DOLA_GENERATION = 9


class Scope(enum.Enum):
    """Requests in which an option has an effect; a request outside that sets it gets a warning.

    `words` name the requests, `idle` is the reason in the warning. `drafts`: True for requests with drafts of one kind;
    an earlier kind wins over a later one. `streams`: False if all tokens come at the end.
    """

    SAMPLING = ("sampling", "nothing is sampled, set config.do_sample to sample")
    BEAMS = ("beam search", "it belongs to beam search, and num_beams is 1", False, False)
    CONTRASTIVE = ("contrastive search", "contrastive search needs one beam, no sampling and config.top_k above 1")
    LOOKUP = ("prompt lookup", "there is no prompt lookup", True)
    NGRAM_MEMORY = ("drafts from memory", "this server remembers no outputs", True)
    LOOKAHEAD = ("lookahead", "there is no lookahead", True)
    DRAFT_MODEL = ("drafts of a model", "there are no drafts of a model", True)
    DOLA = ("DoLa", "DoLa needs greedy search or sampling without drafts")
    GUIDANCE = ("guidance", "there is no guidance, set config.guidance_scale to other than 1")
    ENDING = ("models with an end-of-sequence id", "the model has no end-of-sequence id")

    def __init__(self, words: str, idle: str, drafts: bool = False, streams: bool = True) -> None:
        self.words, self.idle, self.drafts, self.streams = words, idle, drafts, streams


class EarlyStopping(enum.Enum):
    """Moment at which beam search may stop: see transformers' `early_stopping`."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


class AssistantSchedule(enum.Enum):
    """Rule by which the number of drafted tokens changes within a request (num_assistant_tokens_schedule)."""

    CONSTANT = "constant"
    HEURISTIC = "heuristic"
    HEURISTIC_TRANSIENT = "heuristic_transient"


class Rescue(enum.Enum):
    """Rows that get a constraint's allowed tokens in spite of the other options, when those have left no such token."""

    # Every such row.
    EACH = 1
    # Such rows of a request only when none of its sequences can go on.
    TOGETHER = 2
    # Every such row with a grammar; no row with allowed tokens only.
    GRAMMAR_ONLY = 3


class DecodingMode:
    """Facts about a request's mode that other rooms act on. The values here hold for greedy search and sampling.

    Every other mode derives a frozen dataclass from this one in engine/decoding/. Its fields are the mode's options,
    and it overrides the facts that differ. Outside that folder no code asks which mode a request is in: it reads these
    facts.
    """

    __slots__ = ()

    # For the engine.
    # True: tokens are emitted as they are drawn. False: all of them at the end.
    streams: bool = True
    # The mode needs hidden states from this prompt token on; None: of the last one only.
    first_needed_row: int | None = None
    # True: the tokens that a constraint allows one sequence depend on whether another can go on, so all draw in one
    # step.
    shares_constraint: bool = False
    # For the runner.
    # True: the final hidden states of every token are kept, for comparison with those of candidates.
    keeps_hidden_states: bool = False
    # Layers to contrast with the last one by their logits, numbered as transformers' hidden_states: 0 is the embedding.
    early_exits: tuple[int, ...] = ()
    # For the sampler.
    # True: warpers leave one token more than the number of end-of-sequence ids, so that a sequence can go on.
    keeps_more_than_ends: bool = False
    # Token to emit when the other options leave none to draw; None: the request ends (NO_TOKEN_LEFT).
    last_resort: int | None = None
    # Score that a token loses for every other group that chose it (DrawSpec.taken_ids).
    diversity_penalty: float = 0.0
    # For the options.
    # True: an unconditional branch may go beside it.
    may_be_guided: bool = True
    # Reason why tensors cannot be returned for each token; empty: they can.
    no_tensors: str = ""
    # Reason why no drafting option has an effect; empty: those that ask for drafts have one.
    no_drafts: str = ""

    @property
    def recalls_outputs(self) -> bool:
        """True when the strategy gets the past outputs of the request's tenant (Request.past_outputs)."""
        return False

    @property
    def asks_draft_model(self) -> bool:
        """True when the server's draft model, or its draft head, drafts."""
        return False

    @property
    def rescue(self) -> Rescue:
        """Rows that a constraint saves in spite of the other options."""
        return Rescue.EACH

    @property
    def uses(self) -> frozenset[Scope]:
        """Scopes of the options that have an effect in this mode and none in others."""
        return frozenset()

    @property
    def sizes(self) -> Mapping[str, float]:
        """Options that decide a request's share of pool and batch, so that a trace can rebuild it; never token ids."""
        return {}

    @property
    def trace(self) -> tuple[str, Mapping[str, float]]:
        """Name of this type and `sizes`: `ModeRegistry.named` makes a mode of them again."""
        return type(self).__name__, self.sizes

    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        """Return the mode that transformers' get_generation_mode names."""
        return GenerationMode.SAMPLE if do_sample else GenerationMode.GREEDY_SEARCH


PLAIN = DecodingMode()


@dataclass(frozen=True, slots=True)
class GuidanceOptions:
    """Classifier-free guidance (Sanchez et al. 2023; transformers' guidance_scale)."""

    # 1: off.
    scale: float = 1.0
    # Prompt of the unconditional branch. Empty: it starts from the last prompt token, as in transformers.
    negative_prompt_ids: tuple[int, ...] = ()

    @property
    def is_on(self) -> bool:
        """True when every returned sequence has an unconditional branch."""
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
class SynthIdOptions:
    """SynthID watermark (Dathathri et al. 2024; transformers' SynthIDTextWatermarkingConfig)."""

    ngram_len: int
    # One per layer of the tournament.
    keys: tuple[int, ...]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 65_536
    skip_first_ngram_calls: bool = False


AnyWatermark = WatermarkOptions | SynthIdOptions


@dataclass(frozen=True, slots=True)
class TensorOutputs:
    """Tensors that the answer carries for every chosen output position."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False
    # Number of the highest scores and logits that travel, with their ids; 0: the whole vocabulary.
    top_k: int = 0
    # Output positions, counted from 0; empty: every position.
    steps: frozenset[int] = frozenset()

    def wants(self, position: int) -> bool:
        """True when output position `position` is chosen."""
        return not self.steps or position in self.steps
