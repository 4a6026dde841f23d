"""Experts that a checkpoint stacks in two tensors of a layer, by the names that one tensor an expert has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.weights.tensor_names import layer_prefix

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from penstock.generation.core.model_config import Experts, ModelConfig
    from penstock.generation.host.mapped import MappedFile
    from penstock.generation.layers.linear.base import WholeRows
    from penstock.generation.weights.checkpoint_weights import TensorSource


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of one expert in a stacked tensor (experts, outputs, inputs)."""

    tensor: str
    expert: int
    first: int
    last: int
    inputs: int


class UnstackedExperts:
    """TensorSource of a checkpoint with `experts.gate_up_proj` (experts, 2 * inner, hidden) and `experts.down_proj`
    (experts, hidden, inner) in its layers, as transformers 5.x's modules have them: gates before values."""

    def __init__(self, source: TensorSource, places: Mapping[str, ExpertRows]) -> None:
        """Take the source, after its names and shapes were checked; see `unstacked`."""
        self.folder: Path = source.folder
        self._source, self._places = source, places

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._places or tensor in self._source

    def dtype(self, tensor: str) -> torch.dtype | None:
        return self._source.dtype(self._stored(tensor))

    def shape(self, tensor: str) -> tuple[int, ...]:
        place = self._places.get(tensor)
        return self._source.shape(tensor) if place is None else (place.last - place.first, place.inputs)

    def take(self, tensor: str) -> Tensor:
        place = self._places.get(tensor)
        if place is None:
            return self._source.take(tensor)
        return self._source.row(place.tensor, place.expert)[place.first : place.last]

    def row(self, tensor: str, number: int) -> Tensor:
        return self.take(tensor)[number] if tensor in self._places else self._source.row(tensor, number)

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """An expert's matrix is one piece."""
        if tensor in self._places:
            yield self.take(tensor)
        else:
            yield from self._source.pieces(tensor, multiple=multiple)

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        return self._source.mapped(tensor)

    def are_equal(self, one: str, other: str) -> bool:
        return self._source.are_equal(one, other)

    def is_quantised(self, tensor: str) -> bool:
        return self._source.is_quantised(self._stored(tensor))

    def form(self, tensor: str) -> str:
        return "" if tensor in self._places else self._source.form(tensor)

    def whole_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[WholeRows]:
        return self._source.whole_pieces(tensor, multiple=multiple)

    def block_type(self, tensor: str) -> str:
        return "" if tensor in self._places else self._source.block_type(tensor)

    def block_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        return self._source.block_pieces(tensor, multiple=multiple)

    def block_row(self, tensor: str, number: int) -> Tensor:
        return self._source.block_row(tensor, number)

    def _stored(self, tensor: str) -> str:
        place = self._places.get(tensor)
        return tensor if place is None else place.tensor


def stacked_shapes(
    config: ModelConfig, expected: Mapping[str, tuple[int, ...]], has: Callable[[str], bool]
) -> tuple[dict[str, tuple[int, ...]], dict[str, ExpertRows]]:
    """Return the shapes of the tensors of a checkpoint that may stack its experts, and the places of the experts'
    matrices, by name.

    `expected` are the shapes with a tensor an expert. `has` tells by a name if there is such a tensor. Layers without
    a stacked tensor stay as they are.
    """
    shapes, places = dict(expected), dict[str, ExpertRows]()
    experts = config.experts
    if experts is None or experts.is_stacked:
        return shapes, places
    for layer in range(config.num_layers):
        own = f"{layer_prefix(layer)}{experts.module}.experts"
        gate_up, down = f"{own}.gate_up_proj", f"{own}.down_proj"
        if not config.has_experts(layer) or not has(gate_up):
            continue
        inner, hidden = experts.inner, config.hidden_size
        shapes |= {gate_up: (experts.count, 2 * inner, hidden), down: (experts.count, hidden, inner)}
        for number in range(experts.count):
            found = _places(own, number, experts, hidden)
            places |= found
            for name in found:
                del shapes[name]
    return shapes, places


def _places(own: str, number: int, experts: Experts, hidden: int) -> dict[str, ExpertRows]:
    gate, up, down = (f"{own}.{number}.{part}.weight" for part in experts.parts)
    inner = experts.inner
    return {
        gate: ExpertRows(f"{own}.gate_up_proj", number, 0, inner, hidden),
        up: ExpertRows(f"{own}.gate_up_proj", number, inner, 2 * inner, hidden),
        down: ExpertRows(f"{own}.down_proj", number, 0, hidden, inner),
    }
