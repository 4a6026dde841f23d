"""Hidden states of chosen rows and layers, kept during a forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class StateKeeper(Protocol):
    """Keeper of every layer's hidden states."""

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """Take the hidden states of `layer`, numbered as in HiddenKeeper. Must not change `hidden_TI`."""


@dataclass(frozen=True, slots=True)
class JointKeeper:
    """Several keepers of the same forward pass."""

    parts: tuple[StateKeeper, ...]

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """See StateKeeper.take."""
        for part in self.parts:
            part.take(layer, hidden_TI)


def joint(*keepers: StateKeeper | None) -> StateKeeper | None:
    """Join the keepers that are not None into one; None when all are None."""
    parts = tuple(keeper for keeper in keepers if keeper is not None)
    return JointKeeper(parts) if len(parts) > 1 else next(iter(parts), None)


@dataclass(slots=True)
class HiddenKeeper:
    """Keeps rows of some layers. They are numbered as transformers' hidden_states: 0 is the embedding, i the output of
    decoder layer i - 1, and the last one is taken after the final norm."""

    # (R) int64: rows of the step.
    rows_R: Tensor
    # None: all layers.
    layers: Collection[int] | None = None
    # layer -> (R, hidden), in the model's dtype.
    states: dict[int, Tensor] = field(default_factory=dict)

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """Keep the rows of `layer` when it is one of the chosen ones."""
        if self.layers is None or layer in self.layers:
            self.states[layer] = hidden_TI.index_select(0, self.rows_R)


@dataclass(slots=True)
class LayerTaps:
    """Keeps all rows of a few layers, numbered as in HiddenKeeper, for a draft head."""

    layers: tuple[int, ...]
    # layer -> (T, hidden), in the model's dtype.
    states: dict[int, Tensor] = field(default_factory=dict)

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        """Keep a copy of the rows of `layer` when it is one of the chosen ones: the stream is changed in place."""
        if layer in self.layers:
            self.states[layer] = hidden_TI.clone()
