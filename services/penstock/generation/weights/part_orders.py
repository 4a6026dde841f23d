"""Another order of the rows of a joined weight, part by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor


class PartOrder(ABC):
    """Order of all rows of a part. It is listed when rows are read: config.json may say any number of them."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def rows(self) -> list[int]:
        """Return for each row the checkpoint's row in its place."""


@dataclass(frozen=True, slots=True)
class PartOrders:
    """Orders of the parts, which are read whole."""

    parts: tuple[PartOrder, ...]

    def applied(self, rows_OX: Tensor, first: int = 0) -> Tensor:
        """Return rows of the joined weight or bias, from row `first` on, in this order: whole parts."""
        ordered = rows_OX.clone()
        for begin, part in zip(self._begins(), self.parts, strict=True):
            place = begin - first
            if 0 <= place < rows_OX.shape[0]:
                ordered[place : place + len(part)] = rows_OX[place : place + len(part)][part.rows()]
        return ordered

    def multiple(self, first: int) -> int:
        """Return the number of rows that must be read together from row `first` on."""
        return next(len(part) for begin, part in zip(self._begins(), self.parts, strict=True) if begin == first)

    def _begins(self) -> Sequence[int]:
        return list(accumulate((len(part) for part in self.parts), initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class GatedQueries(PartOrder):
    """A query and a gate for each head in turn become all gates, then all queries, each with its dims in the order
    `dims`."""

    heads: int
    dims: Sequence[int]

    @override
    def __len__(self) -> int:
        return 2 * self.heads * len(self.dims)

    @override
    def rows(self) -> list[int]:
        width = len(self.dims)
        gates = [head * 2 * width + width + dim for head in range(self.heads) for dim in range(width)]
        return gates + [head * 2 * width + dim for head in range(self.heads) for dim in self.dims]


@dataclass(frozen=True, slots=True)
class HeadRows(PartOrder):
    """The rows of `heads` heads, each with its dims in the order `dims`."""

    heads: int
    dims: Sequence[int]

    @override
    def __len__(self) -> int:
        return self.heads * len(self.dims)

    @override
    def rows(self) -> list[int]:
        return [head * len(self.dims) + dim for head in range(self.heads) for dim in self.dims]


@dataclass(frozen=True, slots=True)
class ByKind(PartOrder):
    """The rows of `groups` groups, each with `widths` rows of each kind, become all rows of the first kind, then of the
    second, and so on."""

    groups: int
    widths: tuple[int, ...]

    @override
    def __len__(self) -> int:
        return self.groups * sum(self.widths)

    @override
    def rows(self) -> list[int]:
        size = sum(self.widths)
        begins = list(accumulate(self.widths, initial=0))
        return [
            group * size + begin + row
            for begin, width in zip(begins[:-1], self.widths, strict=True)
            for group in range(self.groups)
            for row in range(width)
        ]
