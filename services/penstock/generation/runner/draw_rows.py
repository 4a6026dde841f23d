"""Which rows of a step's hidden states are drawn from and by whom, and which are wanted for something else."""

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
    """N drawers over distinct rows of the step; siblings that share a row are neighbours."""

    # Row of the step's hidden states of each distinct row, ascending.
    rows: list[int] = field(default_factory=list)
    # How many of `sequences` draw from each.
    repeats: list[int] = field(default_factory=list)
    # (N): who draws, guides included.
    sequences: list[Sequence] = field(default_factory=list)
    # Those that want no logits.
    without_logits: list[Sequence] = field(default_factory=list)
    # Whose rows tell log-probabilities of the prompt.
    scored: list[EntryRows] = field(default_factory=list)
    # Whose rows are summed for an embedding.
    pooled: list[EntryRows] = field(default_factory=list)
    # Whose hidden states are kept, for contrastive search.
    remembered: list[EntryRows] = field(default_factory=list)
    # Rows that are contrasted with earlier layers.
    dola: list[DolaRow] = field(default_factory=list)
    # Places in `sequences` of those whose tensors are wanted at this position.
    tensors: list[int] = field(default_factory=list)
    # Places in `sequences` of those with a guide.
    guided: list[int] = field(default_factory=list)
    # Those of `sequences` with a grammar.
    constrained: list[Sequence] = field(default_factory=list)

    @classmethod
    def of(cls, scheduled: Seq[ScheduledSequence], row_starts: list[int]) -> DrawRows:
        """The draws of a step's entries; `row_starts` as in ModelInputs."""
        found = cls()
        for entry, first, end in zip(scheduled, row_starts, row_starts[1:], strict=False):
            for offset, probe in entry.probes:
                found._add(first + offset, (probe,))
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
        """(N): each drawer's row."""
        return self.for_drawers(self.rows)

    def for_drawers(self, values: list[int]) -> list[int]:
        """(N): what each drawer's row has, of a value for each of `rows`."""
        if len(self.rows) == len(self.sequences):
            return values
        return [value for value, count in zip(values, self.repeats, strict=True) for _ in range(count)]

    def wants_all_of(self, num_rows: int) -> bool:
        """Whether all rows of the step are wanted, and not those in `rows` alone."""
        return len(self.rows) == num_rows or bool(self.scored or self.pooled or self.remembered)

    def _add(self, row: int, drawers: tuple[Sequence, ...]) -> None:
        if drawers[0].draw.kind in _WITHOUT_LOGITS:
            self.without_logits += drawers
            return
        # Who draws from one row is of one request.
        layers = drawers[0].params.mode.early_exits
        if layers:
            self.dola.append(DolaRow(len(self.rows), layers, drawers[0].grammar is not None))
        if drawers[0].guide is not None:
            self.guided += range(len(self.sequences), len(self.sequences) + len(drawers))
        if drawers[0].params.tensors is not None and drawers[0].draw.kind is not DrawKind.GUIDE:
            self._add_tensors(drawers)
        if drawers[0].grammar is not None and drawers[0].draw.kind is not DrawKind.GUIDE:
            self.constrained += drawers
        self.rows.append(row)
        self.repeats.append(len(drawers))
        self.sequences.extend(drawers)

    def _add_tensors(self, drawers: tuple[Sequence, ...]) -> None:
        for place, drawer in enumerate(drawers, len(self.sequences)):
            tensors = drawer.params.tensors
            if tensors is not None and tensors.wants(drawer.num_output_tokens):
                self.tensors.append(place)
