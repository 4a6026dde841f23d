"""Scores of some tokens of some rows, as places in the flattened scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.attention.to_device import uploaded

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    import numpy.typing as npt


def id_array(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    """Distinct token ids, ascending."""
    return np.unique(np.fromiter(ids, dtype=np.int64))


class RowTokens:
    """Tokens of rows: (row, id) pairs without ids beyond the vocabulary.

    A checkpoint may name ids beyond its output layer; these can never be drawn.
    """

    def __init__(self, rows: Seq[int], ids: Seq[npt.NDArray[np.int64]], device: torch.device) -> None:
        """`ids[i]` are tokens of row `rows[i]`."""
        self._rows_E = np.array(rows, dtype=np.int64).repeat([len(some) for some in ids])
        self._ids_E = np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)
        self._device = device
        # For the vocabulary of this many tokens; that never changes in a process.
        self._vocab_size = 0
        self._index_E = torch.empty(0, dtype=torch.int64)
        self._kept_E: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    def index(self, vocab_size: int) -> torch.Tensor:
        """Places in the flattened scores."""
        if vocab_size != self._vocab_size:
            self._kept_E = self._ids_E < vocab_size
            places_E = self._rows_E * vocab_size + self._ids_E
            self._index_E = uploaded(places_E[self._kept_E], self._device)
            self._vocab_size = vocab_size
        return self._index_E

    def fill(self, scores_NV: torch.Tensor, value: float) -> None:
        """Set the scores at all places to `value`."""
        scores_NV.view(-1)[self.index(scores_NV.shape[1])] = value

    def of(self, values_E: npt.NDArray[np.float32], vocab_size: int) -> torch.Tensor:
        """Return the values (one per pair) that belong to the places of `index`."""
        self.index(vocab_size)
        return uploaded(values_E[self._kept_E], self._device)


def only(scores_V: torch.Tensor, ids_A: torch.Tensor) -> None:
    """Set every score of one row to -inf, in place, except those of these tokens."""
    kept_A = scores_V[ids_A]
    scores_V.fill_(-torch.inf)
    scores_V[ids_A] = kept_A
