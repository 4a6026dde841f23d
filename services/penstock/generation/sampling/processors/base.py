"""The contract of processors: the effect of an option on the scores that a token is drawn from.

Shapes: N rows of the batch (one per sequence that draws), R rows of a selection, V vocabulary.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.trackers import Tracker

# A score that an option changed stays within this. The sum of two such scores over the lowest temperature is finite in
# fp32: an infinity would turn into a NaN, and one request's options must not break the step of all the others.
LARGEST_SCORE = 1e8


class Stage(enum.Enum):
    """Place of a processor in a step. Stages run in this order; processors of a stage in that of PROCESSORS."""

    # Every row, before the grammar's masks.
    SCORES = 1
    # Sampled rows, after the masks: transformers' warpers. Greedy rows have none, as there.
    WARP = 2
    # Every row, after the warpers.
    LATE = 3


class RowState(Protocol):
    """The part of a live sequence's sampling state that processors see (`sampling.state.SamplingState`)."""

    sequence: Sequence

    @property
    def trackers(self) -> Mapping[type[Processor], Tracker]:
        """The trackers, each by the processor that asked for it."""

    @property
    def prepared(self) -> Mapping[type[Processor], object]:
        """Values that processors prepared from the request's options."""


class Processor(ABC):
    """One option over the rows of a batch that use it.

    An object is built when the composition of the batch changes, and only if some row `wants` it: an unused option
    costs nothing. Rows that do not use it are never touched.
    """

    stage: ClassVar[Stage] = Stage.SCORES
    # True: it keeps the differences between a row's scores, and so each choice, draw and log-probability. A LATE
    # processor of this kind is left out when a token is drawn.
    keeps_odds: ClassVar[bool] = False
    # True (WARP only): the draw does its work without the warped vocabulary. Every batch has it, for all sampled rows,
    # with a neutral value if it is off. A row that wants another warper is drawn from its warped vocabulary.
    is_in_draw: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def wants(params: SamplingParams) -> bool:
        """True when a row with these options uses this processor."""

    @staticmethod
    def prepare(params: SamplingParams) -> object:
        """Prepare the options once per request (`RowState.prepared`); all its sequences share the result."""
        return None

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> Tracker | None:
        """Return a tracker of the sequence's tokens (`RowState.trackers`); None: the processor needs none."""
        return None

    @abstractmethod
    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        """Take the batch rows that want the processor (all sampled rows, if it is in the draw), and their states in the
        same order."""

    @abstractmethod
    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        """Change the wanting rows of the scores (fp32, contiguous) in place.

        SCORES and LATE get all rows of the batch, by number. WARP gets a few of the sampled rows at a time:
        `context.picked` finds the wanting ones among them.
        """


def params_by_row(rows: Seq[int], states: Seq[RowState]) -> list[tuple[int, SamplingParams]]:
    """Return (row, its options) of a processor's rows."""
    return [(row, state.sequence.params) for row, state in zip(rows, states, strict=True)]


def min_tokens_to_keep(params: SamplingParams) -> int:
    """Least number of tokens that a WARP processor leaves: 1; under beams one more than there are end-of-sequence ids,
    so that a beam can go on (as in transformers)."""
    return max(len(params.eos_token_ids), 1) + 1 if params.mode.keeps_more_than_ends else 1


def log_total(scores_V: torch.Tensor) -> float:
    """log(sum(exp(scores))) of one row that has a finite score.

    It comes from log_softmax, since a plain sum over one row is split by the number of threads.
    """
    return float(scores_V.amax() - scores_V.log_softmax(-1).amax())


def drop_below(scores_V: torch.Tensor, lowest: torch.Tensor) -> None:
    """Set the scores of one row below `lowest` (a scalar) to -inf, in place.

    threshold_ is vectorised; masked_fill_ branches on every token and takes fifteen times as long when about half of
    them are dropped. It replaces numbers <= its threshold, hence the next lower number.
    """
    torch.threshold_(scores_V, float(torch.nextafter(lowest, lowest.new_tensor(-torch.inf))), -torch.inf)
