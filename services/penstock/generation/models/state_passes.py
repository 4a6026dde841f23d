"""Passes of a step with drafts, and of the step after one, through modules with layers that keep a state.

A state cannot go back. So the rows of drafts go through the modules from a copy, and the result is thrown away. Either
the next step goes again through the rows that were accepted, together with its own (one pass a step), or the state
after every draft is kept, and the next step begins with the right one (one pass a draft).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata

# Most rows that a step goes through again without bringing the state forward. A pass more takes as long as a good part
# of a step without drafts, and rows are nearly free only while they are few.
MOST_AGAIN = 16


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a sequence that go through the modules at once. Rows of an earlier step have numbers below 0."""

    begin: int
    end: int
    # The state is then after them; otherwise they are drafts, or drafts and rows before, and it stays as it was.
    advances: bool
    # The sequence has no state yet.
    is_new: bool = False
    # Number of the first draft, where a state is kept after each of them.
    number: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of a sequence in a step: its own ones, those that are no drafts, and rows before that its state lacks."""

    count: int
    sure: int
    behind: int
    is_new: bool

    def at_once(self) -> list[RowRange]:
        """Return passes of modules that go on from a state by several rows."""
        if self.sure == self.count:
            return [RowRange(-self.behind, self.count, True, self.is_new)]
        if self.behind + self.sure <= MOST_AGAIN and not self.is_new:
            return [RowRange(-self.behind, self.count, False)]
        return [RowRange(-self.behind, self.sure, True, self.is_new), RowRange(self.sure, self.count, False)]

    def draft_by_draft(self, *, continues: bool) -> list[RowRange]:
        """Return passes with a state after every draft. The rows before are there. `continues`: those that are no
        drafts may go through the modules at once."""
        if continues or self.is_new:
            sure = [RowRange(0, self.sure, True, self.is_new)]
        else:
            sure = [RowRange(row, row + 1, True) for row in range(self.sure)]
        drafts = range(self.count - self.sure)
        return [
            *sure,
            *(RowRange(self.sure + place, self.sure + place + 1, False, number=place) for place in drafts),
        ]


def rows_of_step(metadata: AttentionMetadata) -> list[SequenceRows]:
    """Return the rows of a step's sequences."""
    counts = metadata.query_lens
    sure = metadata.state_kept or counts
    behind: Sequence[int] = metadata.state_behind or [0] * len(counts)
    is_new = [count == length for count, length in zip(counts, metadata.kv_lens, strict=True)]
    return [SequenceRows(*rows) for rows in zip(counts, sure, behind, is_new, strict=True)]


def rounds(passes: Sequence[list[RowRange]]) -> list[dict[RowRange, list[int]]]:
    """Return which sequences go through the modules together: in each round one pass of each, alike rows as one
    batch."""
    found: list[dict[RowRange, list[int]]] = [{} for _ in range(max(map(len, passes)))]
    for member, own in enumerate(passes):
        for number, rows in enumerate(own):
            found[number].setdefault(rows, []).append(member)
    return found
