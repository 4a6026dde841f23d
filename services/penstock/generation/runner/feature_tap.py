"""Way from the served model's steps to its draft head: hidden states of sequences that the head drafts for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.generation.models.hidden_keeper import LayerTaps

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
    from penstock.generation.models.draft_head import Embed
    from penstock.generation.runner.draw_rows import EntryRows


class FeatureTap(Protocol):
    """Taker of hidden states, on the engine's thread."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers to take, numbered as HiddenKeeper's."""
        ...

    def take(self, entries: Seq[EntryRows], rows_TKI: Tensor, embed: Embed) -> None:
        """Take the step's rows of the tapped layers, (T, taps, hidden). Those of `entries` count; `embed` is the
        embedding of the model that computed them."""
        ...


class TappedStep:
    """Taps of one step, and of others that follow it."""

    __slots__ = ("_entries", "_places", "_tap", "layers")

    def __init__(self, tap: FeatureTap, scheduled: Seq[ScheduledSequence], places: Seq[tuple[int, int]]) -> None:
        """`places`: of the entries that are tapped, and the first row of each."""
        self._tap, self._places = tap, places
        self._entries: Seq[EntryRows] = [(scheduled[place], first) for place, first in places]
        self.layers = LayerTaps(tap.taps)

    @classmethod
    def of(cls, tap: FeatureTap, output: SchedulerOutput, row_starts: Seq[int]) -> TappedStep | None:
        """Return the taps of a step's entries; None: a head reads none of them now."""
        places = [
            (place, row_starts[place]) for place, entry in enumerate(output.scheduled) if entry.sequence.is_tapped
        ]
        return cls(tap, output.scheduled, places) if places else None

    def wants_last(self, num_layers: int) -> bool:
        """True when all rows after the final norm are tapped."""
        return num_layers in self.layers.layers

    def hand_over(self, embed: Embed) -> None:
        """Hand the rows over after the forward pass, which has filled `layers`."""
        assert self.layers.rows_TKI is not None, "a step with taps fills them"
        self._tap.take(self._entries, self.layers.rows_TKI, embed)

    def follow(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Tap the next step, which has entries of the same sequences in the same rows."""
        self.layers = LayerTaps(self.layers.layers)
        self._entries = [(scheduled[place], first) for place, first in self._places]
