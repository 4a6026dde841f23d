"""The contract of the logits processors.

Shapes: N rows of the batch (one per sequence that draws), R rows of a selection, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    import numpy as np
    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.trackers import Tracker

# What an option makes of a score stays within this. The sum of two such scores over the lowest temperature is finite
# in fp32: an infinity would turn into a NaN, and what one request asks for must not break the step of all the others.
LARGEST_SCORE = 1e8


class RowState(Protocol):
    """The part of a live sequence's sampling state that processors see (`sampling.state.SamplingState`)."""

    sequence: Sequence

    @property
    def trackers(self) -> Mapping[type[LogitsProcessor], Tracker]:
        """By the processor that asked for it."""

    @property
    def prepared(self) -> Mapping[type[LogitsProcessor], object]:
        """What processors made of the request's options."""


class RowKernels(Protocol):
    """Operations on rows of scores that processors need (`sampling.kernels.SamplingKernels`)."""

    def in_head(self, vocab_size: int, count: int, seeds: Seq[int], ids: Seq[int]) -> list[bool]:
        """For each (seed, id): the seed's permutation of the vocabulary has the id among its first `count`."""


class LogitsProcessor(ABC):
    """One option over the rows of a batch that use it.

    An object is built when the composition of the batch changes and only if some row `wants` it, so that an option
    nobody uses costs nothing. Rows that do not use it are never touched.
    """

    # True: the most likely token stays the most likely, so greedy rows skip it.
    is_argmax_invariant: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def wants(params: SamplingParams) -> bool:
        """Whether a row with these options uses this processor."""

    @staticmethod
    def prepare(params: SamplingParams) -> object:
        """What it makes of the options once per request (`RowState.prepared`), shared by all its sequences."""
        return None

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> Tracker | None:
        """What it keeps of the sequence's tokens (`RowState.trackers`); None: nothing."""
        return None

    @abstractmethod
    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        """`rows` are the batch rows that want it and `states` theirs, in the same order."""

    def use(self, kernels: RowKernels) -> None:
        """Work with these kernels, of the process; called before `apply`. Most need none."""
        return

    @abstractmethod
    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        """Change the wanting rows of `scores_NV` (fp32, contiguous) in place.

        `positions_N` is the number of output tokens of every batch row.
        """


class Warper(ABC):
    """A sampling-only processor: reshapes the distribution of a row and keeps its most likely token.

    Unlike a LogitsProcessor it holds a value for every sampled row of the batch (a neutral one where it is off), since
    the sampler runs it on selections of rows that depend on the scores.
    """

    is_argmax_invariant: ClassVar[bool] = True
    # True: every batch has one, and a draw can do without the warped vocabulary. The others exist only where some row
    # wants them, and send it the long way.
    is_in_draw: ClassVar[bool] = False

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        """Tell if a row with these options uses this warper; asked of those that are not in the draw."""
        return True

    @abstractmethod
    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        """`params` are those of the sampled rows of the batch, in their order."""

    @abstractmethod
    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        """Change `scores_RV` in place; `rows_R` are the rows' indices among the sampled rows of the batch."""


def min_tokens_to_keep(params: SamplingParams) -> int:
    """Tokens that a warper leaves at least: 1, or one more than there are end-of-sequence ids where a sequence must be
    able to go on (transformers' beams)."""
    return max(len(params.eos_token_ids), 1) + 1 if params.mode.keeps_more_than_ends else 1


def log_total(scores_V: torch.Tensor) -> float:
    """log(sum(exp(scores))) of one row that has a finite score.

    From log_softmax: a plain sum over one row is split by the number of threads.
    """
    return float(scores_V.amax() - scores_V.log_softmax(-1).amax())


def drop_below(scores_V: torch.Tensor, lowest: torch.Tensor) -> None:
    """Scores of one row below `lowest` (a scalar) become -inf, in place.

    threshold_ is vectorised; masked_fill_ branches on every token and takes fifteen times as long when about half of
    them are dropped. It replaces what is <= its threshold, hence the next lower number.
    """
    torch.threshold_(scores_V, float(torch.nextafter(lowest, lowest.new_tensor(-torch.inf))), -torch.inf)
