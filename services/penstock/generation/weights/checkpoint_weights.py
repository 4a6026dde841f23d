"""Weights from a checkpoint: fused, converted, packed and dropped, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.core.model_config import Activation
from penstock.generation.host.memory import trim_heap
from penstock.generation.layers.linear.base import NotFinite
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, HeadOrder, LayerLinear

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.linear.base import Linear, Weight
    from penstock.generation.weights.checkpoint import Checkpoint

_log = get_logger("penstock.generation")


class CheckpointWeights:
    """loader.Weights of a Hugging Face checkpoint. Every tensor of it is taken exactly once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        dtype: torch.dtype,
        quantization: str,
        *,
        is_tied: bool,
        map_embeddings: bool,
    ) -> None:
        """Take an open checkpoint.

        `is_tied`: config.json says that embedding and head are one. `map_embeddings`: the embedding is used where the
        page cache has it, if the device can do that and the tensor is stored as `dtype`.
        """
        self.dtype = dtype
        self.num_bytes = 0
        self.mapped_bytes = 0
        self._checkpoint = checkpoint
        self._device = device
        self._is_tied = is_tied
        self._map_embeddings = map_embeddings
        self._linear_method = device.linear_method(dtype, quantization)
        self._exact_method = device.linear_method(dtype) if quantization != "none" else self._linear_method
        self._kernels = device.layer_kernels(dtype)

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        """See Weights. Tied as transformers 5.x ties: a tensor that is there alone serves both; two that differ stay
        two."""
        there = [name for name in (EMBEDDING, LM_HEAD) if name in self._checkpoint]
        head = self._made(there[-1:], self._linear_method.head)
        is_one = len(there) == 1 or self._checkpoint.are_equal(*there)
        if self._is_tied and not is_one:
            _log.warning("config.json ties the embeddings, but the checkpoint's two tensors differ: not tied")
        return head, None if is_one and head.rows() is not None else self._table(there[0])

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        """See Weights. Raises StartupError naming the tensor that the format cannot hold."""
        method = self._exact_method if linear.is_exact else self._linear_method

        def made(weight: Weight, bias: Tensor | None) -> Linear:
            if linear.gated:
                return method.gated(weight, bias, self._kernels, activation)
            return method.linear(weight, bias)

        names = [f"{prefix}{part}" for part in linear.parts]
        if linear.expert is not None:
            stacked = StackedExpert(self._checkpoint, names[0], linear, self.dtype, self._device.torch_device)
            return self._made_of(stacked, lambda weight: made(weight, stacked.bias()))
        bias = self._joined([f"{name}.bias" for name in names]) if linear.has_bias else None
        if bias is not None and linear.order is not None:
            bias = linear.order.applied(bias)
        stored = self._weight([f"{name}.weight" for name in names], linear.order)
        return self._made_of(stored, lambda weight: made(weight, bias))

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        """See Weights."""
        value = self._checkpoint.take(name)
        if is_exact:
            return self._counted_tensor(value.to(self._device.torch_device, torch.float32, copy=True))
        return self._counted_tensor(self._owned(value))

    def layer_is_complete(self) -> None:
        """See Weights. Give freed memory back: tensors that were converted before packing would otherwise keep a third
        of a model in the heap."""
        trim_heap()

    def _table(self, name: str) -> Tensor:
        """Return an embedding, as a view of the file or in memory of its own."""
        stored = self._weight([name])
        table = self._mapped_table(name)
        if table is None:
            table = stored.copied(self._device.weight_memory(stored.shape, stored.dtype))
        else:
            self.mapped_bytes += table.nbytes
        return self._counted_tensor(table)

    def _mapped_table(self, name: str) -> Tensor | None:
        """Return an embedding as a view of the file; None where it must be converted or copied."""
        if not self._map_embeddings or self._checkpoint.dtype(name) != self.dtype:
            return None
        file, begin = self._checkpoint.mapped(name)
        return self._device.mapped_tensor(file, begin, self._checkpoint.shape(name), self.dtype)

    def _made(self, names: list[str], make: Callable[[Weight], Linear]) -> Linear:
        """Return the Linear of these tensors' rows. Raises StartupError naming the tensor that its format cannot
        hold."""
        return self._made_of(self._weight(names), make)

    def _made_of(self, weight: StoredWeight | StackedExpert, make: Callable[[Weight], Linear]) -> Linear:
        try:
            linear = make(weight)
        except NotFinite as error:
            raise StartupError(
                f"{self._checkpoint.folder}: tensor {weight.tensor_of(error.row)} has a NaN or an infinite number, "
                "which no quantised weight can hold: --quantization none loads it as it is",
                flag="MODEL",
            ) from error
        self.num_bytes += linear.num_bytes
        return linear

    def _weight(self, names: list[str], order: HeadOrder | None = None) -> StoredWeight:
        return StoredWeight(self._checkpoint, names, self.dtype, self._device.torch_device, order)

    def _joined(self, names: list[str]) -> Tensor:
        """Join small tensors in memory of their own, even a single one: every method uses a bias as it is."""
        return torch.cat([self._converted(self._checkpoint.take(name)) for name in names])

    def _counted_tensor(self, value: Tensor) -> Tensor:
        self.num_bytes += value.nbytes
        return value

    def _owned(self, value: Tensor) -> Tensor:
        """Return the value converted, never as a view of the file, which may change on disk under a running server."""
        converted = self._converted(value)
        return converted.clone() if converted is value else converted

    def _converted(self, value: Tensor) -> Tensor:
        return value.to(device=self._device.torch_device, dtype=self.dtype)


class StoredWeight:
    """The rows of `names`, in order, as `dtype`: a layers.linear.base.Weight. Each use reads them anew. `order`: of the
    heads that the rows are."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        order: HeadOrder | None = None,
    ) -> None:
        shapes = [checkpoint.shape(name) for name in names]
        self.shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._names = names
        self._ends = list(accumulate(shape[0] for shape in shapes))
        self._device = device
        self._order = order

    def pieces(self) -> Iterator[Tensor]:
        """See Weight. A piece may be a view of the file, which may change on disk under a running server."""
        if self._order is not None:
            yield from self._ordered_pieces(self._order)
            return
        for name in self._names:
            for piece in self._checkpoint.pieces(name):
                yield piece.to(device=self._device, dtype=self.dtype)

    def _ordered_pieces(self, order: HeadOrder) -> Iterator[Tensor]:
        first = 0
        for name in self._names:
            for piece in self._checkpoint.pieces(name, multiple=len(order.dims)):
                yield order.applied(piece.to(device=self._device, dtype=self.dtype), first)
                first += piece.shape[0]

    def joined(self) -> Tensor:
        """See Weight."""
        return self.copied(torch.empty(self.shape, dtype=self.dtype, device=self._device))

    def copied(self, whole: Tensor) -> Tensor:
        """Copy all rows into `whole`, which has their shape and dtype, and return it."""
        first = 0
        for piece in self.pieces():
            whole[first : first + piece.shape[0]] = piece
            first += piece.shape[0]
        return whole

    def tensor_of(self, row: int) -> str:
        """Return the name of the tensor that row `row` belongs to."""
        return next(name for name, end in zip(self._names, self._ends, strict=True) if row < end)


class StackedExpert:
    """One expert of a tensor that has all, as gpt-oss stores them: a layers.linear.base.Weight. Each use reads it
    anew."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, linear: LayerLinear, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the expert `linear.expert` of the tensor `name`, (experts, inputs, outputs), and its bias."""
        self.shape = linear.shape
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._name = name
        self._linear = linear
        self._device = device

    def pieces(self) -> Iterator[Tensor]:
        """See Weight: one piece."""
        yield self.joined()

    def joined(self) -> Tensor:
        """See Weight."""
        return self._apart(self._stored(self._name).t())

    def bias(self) -> Tensor:
        """Return the bias (outputs)."""
        return self._apart(self._stored(f"{self._name}_bias"))

    def tensor_of(self, row: int) -> str:
        """Return the name of the tensor that row `row` belongs to."""
        return self._name

    def _stored(self, name: str) -> Tensor:
        assert self._linear.expert is not None
        return self._checkpoint.row(name, self._linear.expert).to(device=self._device, dtype=self.dtype)

    def _apart(self, value_OX: Tensor) -> Tensor:
        """Return the outputs in memory of their own, gates before values."""
        if not self._linear.gated:
            return value_OX.clone(memory_format=torch.contiguous_format)
        return torch.cat((value_OX[::2], value_OX[1::2]))
