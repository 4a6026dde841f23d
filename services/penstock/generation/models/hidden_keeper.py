"""Hidden states of chosen rows and layers, kept during a forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class StateKeeper(Protocol):
    """Keeper of every layer's hidden states."""

    def wants(self, layer: int) -> bool:
        """True when `take` keeps something of `layer`: nobody need make the others."""

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """Take the hidden states of `layer`, numbered as in HiddenKeeper. Must not change `hidden_TI`."""


@dataclass(frozen=True, slots=True)
class JointKeeper:
    """Several StateKeepers of the same forward pass."""

    parts: tuple[StateKeeper, ...]

    def wants(self, layer: int) -> bool:
        return any(part.wants(layer) for part in self.parts)

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        for part in self.parts:
            part.take(layer, hidden_TI)


def joint(*keepers: StateKeeper | None) -> StateKeeper | None:
    """Join the keepers that are not None into one; None when all are None."""
    parts = tuple(keeper for keeper in keepers if keeper is not None)
    return JointKeeper(parts) if len(parts) > 1 else next(iter(parts), None)


@dataclass(slots=True)
class HiddenKeeper:
    """StateKeeper of rows of some layers. They are numbered as transformers' hidden_states: 0 is the embedding, i the
    output of decoder layer i - 1, and the last one is taken after the final norm."""

    # (R) int64: rows of the step.
    rows_R: Tensor
    # None: all layers.
    layers: Collection[int] | None = None
    # layer -> (R, hidden), in the model's dtype.
    states: dict[int, Tensor] = field(default_factory=dict)

    def wants(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """Keep the rows of `layer` when it is one of the chosen ones."""
        if self.wants(layer):
            self.states[layer] = hidden_TI.index_select(0, self.rows_R)


class LayerTaps:
    """StateKeeper of all rows of a few layers, numbered as in HiddenKeeper, side by side, for a draft head."""

    __slots__ = ("layers", "rows_TKI")

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        # (T, taps, hidden), in the model's dtype; None: no step was computed.
        self.rows_TKI: Tensor | None = None

    def room(self, num_rows: int, like_TI: Tensor) -> Tensor:
        """Return new memory for the taps of a step's rows, of the width, dtype and device of `like_TI`. The caller
        fills it, in place of `take`."""
        self.rows_TKI = like_TI.new_empty((num_rows, len(self.layers), like_TI.shape[-1]))
        return self.rows_TKI

    def wants(self, layer: int) -> bool:
        return layer in self.layers

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """Keep a copy of the rows of `layer` when it is one of the chosen ones: the stream is changed in place."""
        for place, tapped in enumerate(self.layers):
            if tapped != layer:
                continue
            rows_TKI = self.rows_TKI
            if rows_TKI is None:
                rows_TKI = self.room(len(hidden_TI), hidden_TI)
            rows_TKI[:, place] = hidden_TI
