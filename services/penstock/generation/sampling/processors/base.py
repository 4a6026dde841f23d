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

# A score that an option changed stays within this. The sum of two such scores over the lowest temperature is finite in
# fp32: an infinity would turn into a NaN, and one request's options must not break the step of all the others.
LARGEST_SCORE = 1e8


class RowState(Protocol):
    """The part of a live sequence's sampling state that processors see (`sampling.state.SamplingState`)."""

    sequence: Sequence

    @property
    def trackers(self) -> Mapping[type[LogitsProcessor], Tracker]:
        """The trackers, each by the processor that asked for it."""

    @property
    def prepared(self) -> Mapping[type[LogitsProcessor], object]:
        """Values that processors prepared from the request's options."""


class RowKernels(Protocol):
    """Operations on rows of scores that processors need (`sampling.kernels.SamplingKernels`)."""

    def in_head(self, vocab_size: int, count: int, seeds: Seq[int], ids: Seq[int]) -> list[bool]:
        """Tell for each (seed, id) whether the seed's permutation of the vocabulary has the id among its first
        `count`."""


class LogitsProcessor(ABC):
    """One option over the rows of a batch that use it.

    An object is built when the composition of the batch changes, and only if some row `wants` it: an unused option
    costs nothing. Rows that do not use it are never touched.
    """

    # True: the most likely token stays the most likely, so greedy rows skip it.
    is_argmax_invariant: ClassVar[bool] = False

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
        """Take the batch rows that want the processor, and their states in the same order."""

    def use(self, kernels: RowKernels) -> None:
        """Work with these kernels of the process; called before `apply`. Most processors need none."""
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
    # True: every batch has this warper, and a draw can do without the warped vocabulary. Another warper exists only
    # where some row wants it, and that row is drawn from its whole warped vocabulary.
    is_in_draw: ClassVar[bool] = False

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        """True when a row with these options uses this warper; asked only of warpers that are not part of the draw."""
        return True

    @abstractmethod
    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        """Take the options of the sampled rows of the batch, in their order."""

    @abstractmethod
    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        """Change `scores_RV` in place; `rows_R` are the rows' indices among the sampled rows of the batch."""


def min_tokens_to_keep(params: SamplingParams) -> int:
    """Least number of tokens that a warper leaves: 1; under beams one more than there are end-of-sequence ids, so that
    a beam can go on (as in transformers)."""
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
