"""Another order of the rows of a joined weight, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartOrders:
    """Order of all rows of each part: for each row, the checkpoint's row in its place. Parts are read whole."""

    parts: tuple[tuple[int, ...], ...]

    def applied(self, rows_OX: Tensor, first: int = 0) -> Tensor:
        """Return rows of the joined weight or bias, from row `first` on, in this order: whole parts."""
        ordered = rows_OX.clone()
        for begin, rows in zip(self._begins(), self.parts, strict=True):
            place = begin - first
            if 0 <= place < rows_OX.shape[0]:
                ordered[place : place + len(rows)] = rows_OX[place : place + len(rows)][list(rows)]
        return ordered

    def multiple(self, first: int) -> int:
        """Return the number of rows that must be read together from row `first` on."""
        return next(len(rows) for begin, rows in zip(self._begins(), self.parts, strict=True) if begin == first)

    def _begins(self) -> Sequence[int]:
        return list(accumulate((len(rows) for rows in self.parts), initial=0))[:-1]


def gated_queries(heads: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of a part with a query and a gate for each head in turn: all gates, then all queries, each with
    its dims in the order `dims`."""
    width = len(dims)
    gates = [head * 2 * width + width + dim for head in range(heads) for dim in range(width)]
    queries = [head * 2 * width + dim for head in range(heads) for dim in dims]
    return (*gates, *queries)


def head_rows(heads: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of a part of `heads` heads, each with its dims in the order `dims`."""
    return tuple(head * len(dims) + dim for head in range(heads) for dim in dims)


def by_kind(groups: int, widths: Sequence[int]) -> tuple[int, ...]:
    """Return the order of a part in which every one of `groups` groups has `widths` rows of each kind: all rows of the
    first kind, then of the second, and so on."""
    size = sum(widths)
    begins = list(accumulate(widths, initial=0))
    return tuple(
        group * size + begin + row
        for begin, width in zip(begins[:-1], widths, strict=True)
        for group in range(groups)
        for row in range(width)
    )
