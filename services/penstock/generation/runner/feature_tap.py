"""Way from the served model's steps to its draft head: hidden states of sequences that the head drafts for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.generation.models.hidden_keeper import LayerTaps

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from penstock.generation.core.step import SchedulerOutput
    from penstock.generation.models.draft_head import Embed
    from penstock.generation.runner.draw_rows import EntryRows


class FeatureTap(Protocol):
    """Taker of hidden states, on the engine's thread."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers to take, numbered as HiddenKeeper's."""
        ...

    def take(self, entries: Seq[EntryRows], states: Seq[Tensor], embed: Embed) -> None:
        """Take the step's rows of the tapped layers, each (T, hidden). Those of `entries` count; `embed` is the
        embedding of the model that computed them."""
        ...


class TappedStep:
    """Taps of one step."""

    __slots__ = ("_entries", "_tap", "layers")

    def __init__(self, tap: FeatureTap, entries: Seq[EntryRows]) -> None:
        self._tap, self._entries = tap, entries
        self.layers = LayerTaps(tap.taps)

    @classmethod
    def of(cls, tap: FeatureTap, output: SchedulerOutput, row_starts: Seq[int]) -> TappedStep | None:
        """Return the taps of a step's entries; None: no request in it has a head's drafts."""
        # The mode is of the request: no adapter, grammar or option changes it.
        pairs = zip(output.scheduled, row_starts, strict=False)
        entries = [(entry, first) for entry, first in pairs if entry.sequence.params.mode.asks_draft_model]
        return cls(tap, entries) if entries else None

    def wants_last(self, num_layers: int) -> bool:
        """True when all rows after the final norm are tapped."""
        return num_layers in self.layers.layers

    def hand_over(self, hidden_TI: Tensor, num_layers: int, embed: Embed) -> None:
        """Hand the rows over after the forward pass; `hidden_TI` are its results, which count if `wants_last`."""
        states = self.layers.states
        if self.wants_last(num_layers):
            states[num_layers] = hidden_TI
        self._tap.take(self._entries, [states[layer] for layer in self.layers.layers], embed)
