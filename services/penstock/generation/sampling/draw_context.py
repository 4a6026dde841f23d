"""A step as its processors see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from penstock.generation.sampling.ops.counted_draws import Stream, keys_of, uniforms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

T = TypeVar("T")
_NONE = torch.empty(0, dtype=torch.int64)


class RowKernels(Protocol):
    """Operations on rows of scores for processors (`sampling_kernels.SamplingKernels`)."""

    def in_head(self, vocab_size: int, count: int, seeds: Seq[int], ids: Seq[int]) -> list[bool]:
        """Tell for each (seed, id) whether the seed's permutation of the vocabulary has the id among its first
        `count`."""


class RowStreams:
    """The streams of uniforms of a batch's rows, each by its name (`Stream`)."""

    def __init__(self, keys_N: npt.NDArray[np.uint64]) -> None:
        """Take the key of every row's sequence (`counted_draws.stream_key`)."""
        self._sequences_N = keys_N
        self._keys: dict[Stream, npt.NDArray[np.uint64]] = {}

    def keys(self, stream: Stream) -> npt.NDArray[np.uint64]:
        """Return the key of every row's stream of that name; the first call makes it."""
        keys_N = self._keys.get(stream)
        if keys_N is None:
            keys_N = self._keys[stream] = keys_of(self._sequences_N, stream)
        return keys_N


class DrawContext:
    """Facts of a step that processors may use beside the scores: the rows' positions, uniforms and kernels.

    positions_N: number of output tokens so far of every row of the batch.
    picked_R: for WARP, places of the scores' rows among the batch's sampled rows.
    """

    __slots__ = ("_places", "_rows_R", "_streams", "kernels", "picked_R", "positions_N")

    def __init__(
        self,
        positions_N: npt.NDArray[np.uint64],
        streams: RowStreams,
        kernels: RowKernels,
        picked_R: torch.Tensor = _NONE,
        rows_R: torch.Tensor | None = None,
    ) -> None:
        """Take the step; `rows_R` are the batch rows of `picked_R`; without both the scores are of the whole batch."""
        self.positions_N = positions_N
        self.kernels = kernels
        self.picked_R = picked_R
        self._streams = streams
        self._rows_R = rows_R
        # Batch row -> its place in the scores. Made on demand: reading the rows waits for the device.
        self._places: dict[int, int] | None = None

    def of_rows(self, picked_R: torch.Tensor, rows_R: torch.Tensor) -> DrawContext:
        """Return the context of scores of the sampled rows `picked_R`; `rows_R` are their numbers in the batch."""
        return DrawContext(self.positions_N, self._streams, self.kernels, picked_R, rows_R)

    def picked(self, wanting: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
        """Yield (place in the scores, thing) for each (batch row, thing) with its row among the scores."""
        if self._rows_R is None:
            yield from wanting
            return
        if self._places is None:
            self._places = {row: place for place, row in enumerate(self._rows_R.tolist())}
        for row, thing in wanting:
            place = self._places.get(row)
            if place is not None:
                yield place, thing

    def uniforms(self, stream: Stream, rows_R: Seq[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return a uniform in [0, 1) for each of these batch rows: a pure function of the sequence's seed, the stream's
        name and the row's position."""
        return uniforms(self._streams.keys(stream)[rows_R], self.positions_N[rows_R])
