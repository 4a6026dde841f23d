"""Rows of a step's hidden states: the sequences that draw from them, and other uses of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.generation.core.draw import DrawKind

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence

_WITHOUT_LOGITS = (DrawKind.NOTHING, DrawKind.EMBEDDING)

# An entry and its first row of the step's hidden states.
EntryRows: TypeAlias = "tuple[ScheduledSequence, int]"


class DolaRow(NamedTuple):
    """A row with DoLa: its place in `DrawRows.rows`, and its candidate layers."""

    place: int
    layers: tuple[int, ...]
    has_grammar: bool


@dataclass(slots=True)
class DrawRows:
    """N drawers (sequences that draw) over distinct rows of a step; siblings that share a row are neighbours."""

    # Distinct rows to draw from: their places in the step's hidden states, ascending.
    rows: list[int] = field(default_factory=list)
    # Number of `sequences` that draw from each of `rows`.
    repeats: list[int] = field(default_factory=list)
    # (N): sequences that draw, unconditional branches included.
    sequences: list[Sequence] = field(default_factory=list)
    # Sequences computed to the end that want no logits.
    without_logits: list[Sequence] = field(default_factory=list)
    # Entries with rows that give log-probabilities of the prompt.
    scored: list[EntryRows] = field(default_factory=list)
    # Entries with rows to sum for an embedding.
    pooled: list[EntryRows] = field(default_factory=list)
    # Entries with hidden states to keep, for contrastive search.
    remembered: list[EntryRows] = field(default_factory=list)
    # Rows to contrast with earlier layers.
    dola: list[DolaRow] = field(default_factory=list)
    # Places in `sequences` that want tensors at this position.
    tensors: list[int] = field(default_factory=list)
    # Places in `sequences` with an unconditional branch.
    guided: list[int] = field(default_factory=list)
    # Sequences of `sequences` with a grammar that does not allow every token.
    constrained: list[Sequence] = field(default_factory=list)

    @classmethod
    def of(cls, scheduled: Seq[ScheduledSequence], row_starts: list[int]) -> DrawRows:
        """Find the draws of a step's entries; `row_starts` as in ModelInputs."""
        found = cls()
        for entry, first, end in zip(scheduled, row_starts, row_starts[1:], strict=False):
            for offset, verifier in entry.verifiers:
                found._add(first + offset, (verifier,))
            if entry.sample:
                found._add(end - 1, entry.sample)
            if entry.sequence.first_logprob_row is not None and entry.start < entry.sequence.num_prompt_tokens:
                found.scored.append((entry, first))
            if entry.sequence.draw.kind is DrawKind.EMBEDDING:
                found.pooled.append((entry, first))
            if entry.sequence.params.mode.keeps_hidden_states:
                found.remembered.append((entry, first))
        return found

    @property
    def row_of_drawer(self) -> list[int]:
        """(N): place of each drawer's row in the step's hidden states."""
        return self.for_drawers(self.rows)

    def for_drawers(self, values: list[int]) -> list[int]:
        """Return (N): each drawer's value, from one value for each of `rows`."""
        if len(self.rows) == len(self.sequences):
            return values
        return [value for value, count in zip(values, self.repeats, strict=True) for _ in range(count)]

    def wants_all_of(self, num_rows: int) -> bool:
        """True when all rows of the step are wanted, not only those in `rows`."""
        return len(self.rows) == num_rows or bool(self.scored or self.pooled or self.remembered)

    def _add(self, row: int, drawers: tuple[Sequence, ...]) -> None:
        if drawers[0].draw.kind in _WITHOUT_LOGITS:
            self.without_logits += drawers
            return
        # All drawers of one row belong to one request.
        layers = drawers[0].params.mode.early_exits
        if layers:
            self.dola.append(DolaRow(len(self.rows), layers, drawers[0].is_constrained))
        if drawers[0].unconditional is not None:
            self.guided += range(len(self.sequences), len(self.sequences) + len(drawers))
        if drawers[0].params.tensors is not None and drawers[0].draw.kind is not DrawKind.UNCONDITIONAL:
            self._add_tensors(drawers)
        if drawers[0].is_constrained and drawers[0].draw.kind is not DrawKind.UNCONDITIONAL:
            self.constrained += drawers
        self.rows.append(row)
        self.repeats.append(len(drawers))
        self.sequences.extend(drawers)

    def _add_tensors(self, drawers: tuple[Sequence, ...]) -> None:
        for place, drawer in enumerate(drawers, len(self.sequences)):
            tensors = drawer.params.tensors
            if tensors is not None and tensors.wants(drawer.num_output_tokens):
                self.tensors.append(place)
