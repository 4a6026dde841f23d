"""A weight as it lies in a checkpoint: tensors whose rows follow each other, read and converted piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.weights.checkpoint import Checkpoint


class StoredWeight:
    """The rows of `names`, in order, as `dtype` (quantization.base.Weight). Read anew each time."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> None:
        shapes = [checkpoint.shape(name) for name in names]
        self.shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._names = names
        self._ends = list(accumulate(shape[0] for shape in shapes))
        self._device = device

    def pieces(self) -> Iterator[Tensor]:
        """See Weight; a piece may be a view of the file, which may change on disk under a running server."""
        for name in self._names:
            for piece in self._checkpoint.pieces(name):
                yield piece.to(device=self._device, dtype=self.dtype)

    def joined(self) -> Tensor:
        """See Weight."""
        return self.copied(torch.empty(self.shape, dtype=self.dtype, device=self._device))

    def copied(self, whole: Tensor) -> Tensor:
        """All of it, into `whole`, which is of its shape and dtype."""
        first = 0
        for piece in self.pieces():
            whole[first : first + piece.shape[0]] = piece
            first += piece.shape[0]
        return whole

    def tensor_of(self, row: int) -> str:
        """The name of the tensor that row `row` is of."""
        return next(name for name, end in zip(self._names, self._ends, strict=True) if row < end)
