"""Tensors that a caller gives in place of some of a model's: checked by name, received in pieces, and read like a
checkpoint's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.common.dtypes import COMPUTED, dtype_name
from penstock.common.errors import InvalidArgument
from penstock.generation.core.weight_tensor import TensorSpec
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES
from penstock.generation.weights.plain_tensors import PlainTensors
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, joint_tensors, tensor_shapes

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.host.mapped import MappedFile

# Most bytes of a piece, unless the rows that must stay together are larger.
_PIECE_BYTES = 1 << 24


def check_specs(specs: Sequence[TensorSpec], config: ModelConfig) -> None:
    """Raise InvalidArgument unless `specs` are tensors of such a model, each once, with all that run as one product."""
    shapes = tensor_shapes(config)
    if config.tie_word_embeddings:
        shapes[LM_HEAD] = shapes[EMBEDDING]
    if not specs:
        raise InvalidArgument("tensors", "must name at least one tensor")
    if len(specs) > len(shapes):
        raise InvalidArgument("tensors", f"must be at most {len(shapes)}, the model's", reason="TOO_MANY")
    names = set()
    for place, spec in enumerate(specs):
        field = f"tensors[{place}]"
        if spec.name not in shapes:
            raise InvalidArgument(f"{field}.name", "must be a tensor of this model, by its name in the checkpoint")
        if spec.name in names:
            raise InvalidArgument(f"{field}.name", "must not come twice")
        if spec.dtype not in COMPUTED:
            raise InvalidArgument(f"{field}.dtype", f"of {spec.name} must be one of {', '.join(COMPUTED)}")
        if spec.shape != shapes[spec.name]:
            raise InvalidArgument(f"{field}.shape", f"of {spec.name} must be {list(shapes[spec.name])}")
        names.add(spec.name)
    for group in joint_tensors(config):
        missing = [name for name in group if name not in names]
        if missing and len(missing) < len(group):
            given = next(name for name in group if name in names)
            raise InvalidArgument("tensors", f"must have {', '.join(missing)} beside {given}: they run as one product")


class NewTensors(PlainTensors):
    """Checked tensors in memory: a `checkpoint_weights.TensorSource`."""

    # Where a checkpoint's errors name its folder.
    folder = Path("tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors on any device, without gradients; nothing keeps them afterwards."""
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def specs(self) -> list[TensorSpec]:
        """Return their specs, for `check_specs`: nothing was checked before."""
        return [TensorSpec(name, dtype_name(one.dtype), tuple(one.shape)) for name, one in self._tensors.items()]

    def check_finite(self) -> None:
        """Raise InvalidArgument naming a tensor with a NaN or infinity: every request would fail with it."""
        for name in self._tensors:
            # In pieces: the check of a whole embedding would take as much memory again.
            if not all(bool(piece.isfinite().all()) for piece in self.pieces(name)):
                raise InvalidArgument("tensors", f"{name} has a number that is not finite")

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def dtype(self, tensor: str) -> torch.dtype:
        return self._tensors[tensor].dtype

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._tensors[tensor].shape)

    def take(self, tensor: str) -> Tensor:
        return self._tensors[tensor]

    def row(self, tensor: str, number: int) -> Tensor:
        return self._tensors[tensor][number]

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        value = self._tensors[tensor]
        rows = max(_PIECE_BYTES // (value[0].nbytes * multiple), 1) * multiple
        for first in range(0, len(value), rows):
            yield value[first : first + rows]

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        raise TypeError("tensors in memory are in no file")

    def are_equal(self, one: str, other: str) -> bool:
        return torch.equal(self._tensors[one], self._tensors[other])


class WeightIntake:
    """Place for tensors: their bytes come one after the other, in the order of their specs, which were checked."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Take the memory for all of them."""
        self.num_bytes = sum(spec.num_bytes for spec in specs)
        self.received = 0
        self._tensors = {spec.name: torch.empty(spec.shape, dtype=COMPUTED_DTYPES[spec.dtype]) for spec in specs}
        # What is still to be filled, the next tensor last.
        self._left = [_bytes_of(tensor) for tensor in reversed(self._tensors.values())]

    @property
    def wants_bytes(self) -> bool:
        """True until all have come."""
        return self.received < self.num_bytes

    def take(self, data: bytes) -> None:
        """Take the next bytes. Raises InvalidArgument when they are none, or more than the tensors have."""
        if not data:
            raise InvalidArgument("chunk", "must have bytes")
        if len(data) > self.num_bytes - self.received:
            raise InvalidArgument("chunk", f"must end with the tensors, after {self.num_bytes} bytes in all")
        self.received += len(data)
        rest = memoryview(data)
        while rest:
            place = self._left.pop()
            count = min(len(place), len(rest))
            place[:count] = rest[:count]
            rest = rest[count:]
            if count < len(place):
                self._left.append(place[count:])

    def cut_short(self) -> InvalidArgument:
        """Return the error of a stream that ends before all bytes came."""
        return InvalidArgument("chunk", f"must go on: {self.received} of {self.num_bytes} bytes came")

    def tensors(self) -> NewTensors:
        """Return the tensors, which are complete."""
        return NewTensors(self._tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's memory as bytes that can be written."""
    return tensor.view(-1).view(torch.uint8).numpy().data
