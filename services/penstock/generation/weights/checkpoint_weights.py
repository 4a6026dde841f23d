"""Weights from a checkpoint: fused, converted, packed and dropped, one layer at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.common.dtypes import dtype_name
from penstock.common.errors import StartupError
from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.generation.core.model_config import Activation
from penstock.generation.layers.linear import INT8_GROUPS
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, INT8, NotFinite, WholeRows
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, LayerLinear, RowOrder

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.host.mapped import MappedFile
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import Linear, LinearMethod

_log = get_logger("penstock.generation")
# Formats of whole numbers that a quantised matrix may keep, by --quantization.
_KEPT = {
    "auto": (INT8, INT4, INT4_ASYMMETRIC),
    "none": (),
    INT8: (INT8,),
    INT8_GROUPS: (INT8,),
    INT4: (INT4, INT4_ASYMMETRIC),
}
# To look through the heap takes longer than a small layer.
_TRIM_EACH_BYTES = 16 << 20


class TensorSource(Protocol):
    """The tensors of a folder by Hugging Face's names, stored in any format. Names were checked before."""

    folder: Path

    def __contains__(self, tensor: str) -> bool: ...

    def dtype(self, tensor: str) -> torch.dtype | None:
        """Return the tensor's stored dtype; None: it is a quantised matrix."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the tensor's shape."""

    def take(self, tensor: str) -> Tensor:
        """Return a small tensor as a whole, to be converted or copied."""

    def row(self, tensor: str, number: int) -> Tensor:
        """Return one row of a tensor that is not a quantised matrix, as `take`."""

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """Yield the rows in order, some at a time; a piece is valid until the next one. Each piece except the last has
        a multiple of `multiple` rows."""

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        """Return the mapped file with a tensor that has a dtype, and the offset of its bytes there."""

    def are_equal(self, one: str, other: str) -> bool:
        """True when two tensors of one shape hold the same numbers, as stored."""

    def is_quantised(self, tensor: str) -> bool:
        """True for a quantised matrix."""

    def form(self, tensor: str) -> str:
        """Return the format of a quantised matrix's whole numbers (layers.linear.base); empty: none."""

    def whole_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[WholeRows]:
        """Yield the rows of a matrix with such a format, as `pieces`."""

    def block_type(self, tensor: str) -> str:
        """Return the type of a quantised matrix's blocks (layers.linear.gguf_blocks); empty: it has none."""

    def block_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """Yield the rows of a matrix with such a type as (rows, bytes) of uint8, as `pieces`."""

    def block_row(self, tensor: str, number: int) -> Tensor:
        """Return one matrix's rows (outputs, bytes) of a tensor (matrices, inputs, outputs) with such a type."""


class CheckpointWeights:
    """loader.Weights of a Hugging Face checkpoint. Every tensor of it is taken exactly once."""

    def __init__(
        self,
        checkpoint: TensorSource,
        device: Device,
        dtype: torch.dtype,
        quantization: str,
        *,
        is_tied: bool,
        map_embeddings: bool,
        method: LinearMethod | None = None,
    ) -> None:
        """Take an open checkpoint.

        `quantization` is the flag's value; "auto" keeps the whole numbers of a quantised checkpoint if there is a
        product for their format. `is_tied`: config.json says that embedding and head are one. `map_embeddings`: the
        embedding is mapped from the page cache, if the device can do that and the tensor is stored as `dtype`.
        `method` replaces the device's own.
        """
        self.dtype = dtype
        self.num_bytes = 0
        self.mapped_bytes = 0
        # `num_bytes` when the heap was trimmed last.
        self._trimmed_at = 0
        # Returns the importance of every matrix's inputs by its name, called when it is first needed; None: all are
        # alike.
        self.importance: Callable[[], Mapping[str, Tensor]] | None = None
        self._checkpoint = checkpoint
        self._device = device
        self._is_tied = is_tied
        self._map_embeddings = map_embeddings
        quantised = "none" if quantization == "auto" else quantization
        self._linear_method = device.linear_method(dtype, quantised) if method is None else method
        self._exact_method = self._linear_method if quantised == "none" else device.linear_method(dtype)
        has_products = dtype in (torch.bfloat16, torch.float32)
        self._kept = _KEPT.get(quantization, ()) if has_products else ()
        self._keeps_blocks = has_products and quantization == "auto"
        # With either --quantization the head is int8.
        self._kept_head = (INT8,) if has_products and quantization == INT4 else self._kept
        self._whole_methods: dict[str, LinearMethod | None] = {}
        self._forms: Counter[str] = Counter()
        self._kernels = device.layer_kernels(dtype)

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        """Tied as in transformers 5.x: a single tensor serves both; two that differ stay two."""
        there = [name for name in (EMBEDDING, LM_HEAD) if name in self._checkpoint]
        stored = self._weight(there[-1:])
        head = self._made(
            stored,
            lambda: (
                self._whole(stored, self._kept_head, None, None, Activation.SILU) or self._linear_method.head(stored)
            ),
        )
        is_one = len(there) == 1 or self._checkpoint.are_equal(*there)
        if self._is_tied and not is_one:
            _log.warning("config.json ties the embeddings, but the checkpoint's two tensors differ: not tied")
        return head, None if is_one and head.rows() is not None else self.token_table(there[0])

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        """Raises StartupError naming the tensor that the format cannot hold."""
        method = self._exact_method if linear.is_exact else self._linear_method
        kept = () if linear.is_exact else self._kept
        kernels = self._kernels if linear.gated else None

        def made(weight: StoredWeight | StackedExpert, bias: Tensor | None) -> Linear:
            if method.weighs_inputs and self.importance is not None:
                weight.importance = self._importance_of(f"{prefix}{linear.name}", weight)
            if linear.gated:
                return method.gated(weight, bias, self._kernels, activation)
            return method.linear(weight, bias)

        names = [f"{prefix}{part}" for part in linear.parts]
        if linear.expert is not None:
            stacked = StackedExpert(self._checkpoint, names[0], linear, self.dtype, self._device.torch_device)
            of_blocks = partial(self._of_blocks, stacked, stacked.bias(), kernels, activation)
            return self._made(stacked, lambda: (of_blocks() if kept else None) or made(stacked, stacked.bias()))
        bias = self._joined([f"{name}.bias" for name in names]) if linear.has_bias else None
        if bias is not None and linear.order is not None:
            bias = linear.order.applied(bias)
        stored = self._weight([f"{name}.weight" for name in names], linear.order)
        if linear.is_float32:
            stored.dtype = torch.float32
            return self._made(stored, lambda: self._device.linear_method(torch.float32).linear(stored, bias))
        return self._made(stored, lambda: self._whole(stored, kept, bias, kernels, activation) or made(stored, bias))

    def embedded(self, ids: Sequence[int]) -> Tensor:
        """Return the embedding's rows (ids, hidden), without its scale; nothing counts as taken."""
        name = EMBEDDING if EMBEDDING in self._checkpoint else LM_HEAD
        if not self._checkpoint.is_quantised(name):
            return torch.stack([self._converted(self._checkpoint.row(name, number)) for number in ids])
        rows: list[Tensor] = [torch.empty(0)] * len(ids)
        first = 0
        for piece in self._checkpoint.pieces(name):
            last = first + len(piece)
            for place, number in enumerate(ids):
                if first <= number < last:
                    rows[place] = self._converted(piece[number - first].clone())
            first = last
        return torch.stack(rows)

    def kept_form(self, prefix: str, linear: LayerLinear) -> str:
        """Return the format of whole numbers that `linear` will keep; empty: it keeps none. Opens its matrices."""
        if linear.is_exact or linear.expert is not None:
            return ""
        return self._common_form([f"{prefix}{part}.weight" for part in linear.parts], self._kept)

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        """A quantised matrix becomes numbers of the dtype."""
        stored = self._weight([f"{prefix}{part}.weight" for part in linear.parts], linear.order)
        if quantised := sum(map(self._checkpoint.is_quantised, stored.names)):
            self._forms[dtype_name(self.dtype)] += quantised
        return self._counted_tensor(stored.joined())

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        value = self._checkpoint.take(name)
        if is_exact:
            return self._counted_tensor(value.to(self._device.torch_device, torch.float32, copy=True))
        return self._counted_tensor(self._owned(value))

    def layer_is_complete(self) -> None:
        """Return freed memory to the system, where there may be much: tensors that were converted before packing would
        otherwise keep a third of a model in the heap."""
        if self.num_bytes - self._trimmed_at >= _TRIM_EACH_BYTES:
            self._trimmed_at = self.num_bytes
            trim_heap()

    def token_table(self, name: str) -> Tensor:
        """A view of the file, or in memory of its own."""
        stored = self._weight([name])
        table = self._mapped_table(name)
        if table is None:
            table = stored.copied(self._device.weight_memory(stored.shape, stored.dtype))
        else:
            self.mapped_bytes += table.nbytes
        return self._counted_tensor(table)

    def _mapped_table(self, name: str) -> Tensor | None:
        """Return an embedding as a view of the file; None: it must be converted or copied."""
        if not self._map_embeddings or self._checkpoint.dtype(name) != self.dtype:
            return None
        file, begin = self._checkpoint.mapped(name)
        return self._device.mapped_tensor(file, begin, self._checkpoint.shape(name), self.dtype)

    @property
    def forms(self) -> Mapping[str, int]:
        return self._forms

    def _importance_of(self, name: str, weight: StoredWeight | StackedExpert) -> Tensor | None:
        """Return the importance of a matrix's inputs; None where none is known that can be: another program may have
        written the cache, and random ids may be too much for float16."""
        assert self.importance is not None
        found = self.importance().get(name)
        if found is None or found.shape != weight.shape[1:] or found.dtype is not torch.float32:
            return None
        return found if bool(found.isfinite().all()) and float(found.min()) >= 0 else None

    def _made(self, weight: StoredWeight | StackedExpert, make: Callable[[], Linear]) -> Linear:
        """Return the Linear that `make` makes from these rows. Raises StartupError naming the tensor that its format
        cannot hold."""
        try:
            linear = make()
        except NotFinite as error:
            raise StartupError(
                f"{self._checkpoint.folder}: tensor {weight.tensor_of(error.row)} has a NaN or an infinite number, "
                "which no quantised weight can hold: --quantization none loads it unchanged",
                flag="MODEL",
            ) from error
        self.num_bytes += linear.num_bytes
        quantised = sum(map(self._checkpoint.is_quantised, weight.names))
        if weight.block_types:
            self._forms.update(name.lower() for name in weight.block_types)
        elif quantised:
            self._forms[linear.quantised_as or dtype_name(self.dtype)] += quantised
        return linear

    def _whole(
        self,
        weight: StoredWeight,
        kept: tuple[str, ...],
        bias: Tensor | None,
        kernels: LayerKernels | None = None,
        activation: Activation = Activation.SILU,
    ) -> Linear | None:
        """Return the Linear of blocks or of whole numbers; None: the tensors have no format to keep."""
        if kept and (linear := self._of_blocks(weight, bias, kernels, activation)) is not None:
            return linear
        weight.form = self._common_form(weight.names, kept)
        method = self._whole_method(weight.form) if weight.form else None
        return None if method is None else method.whole(weight, bias, kernels, activation)

    def _of_blocks(
        self,
        weight: StoredWeight | StackedExpert,
        bias: Tensor | None,
        kernels: LayerKernels | None,
        activation: Activation,
    ) -> Linear | None:
        """Return the Linear of blocks, with several types if need be; None: not all tensors have them, or the device
        has no product."""
        if self._keeps_blocks:
            # No further than the first without: asking opens a matrix.
            types = takewhile(bool, map(self._checkpoint.block_type, weight.names))
            weight.block_types = list(types)
        if weight.block_types and len(weight.block_types) == len(weight.names):
            linear = self._linear_method.blocks(weight, bias, kernels, activation)
            if linear is not None:
                return linear
        weight.block_types = []
        return None

    def _common_form(self, names: Sequence[str], kept: tuple[str, ...]) -> str:
        """Return the format of one product of these tensors; empty: they have none in common, or none of `kept`."""
        forms = {self._checkpoint.form(name) for name in names} if kept else set()
        if forms == {INT4, INT4_ASYMMETRIC}:
            # A symmetric part gets offsets, too.
            return INT4_ASYMMETRIC
        return next(iter(forms)) if len(forms) == 1 and forms <= set(kept) else ""

    def _whole_method(self, form: str) -> LinearMethod | None:
        """Return the method of a format; None: this device has no such product, and nobody asked for it by name."""
        if form not in self._whole_methods:
            try:
                self._whole_methods[form] = self._device.linear_method(self.dtype, INT8 if form == INT8 else INT4)
            except StartupError as error:
                _log.warning("matrices of whole numbers become numbers of the dtype", form=form, cause=error.message)
                self._whole_methods[form] = None
        return self._whole_methods[form]

    def _weight(self, names: list[str], order: RowOrder | None = None) -> StoredWeight:
        return StoredWeight(self._checkpoint, names, self.dtype, self._device.torch_device, order)

    def _joined(self, names: list[str]) -> Tensor:
        """Join small tensors in memory of their own, even a single one: every method uses a bias unchanged."""
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
    """The rows of `names`, in order, as `dtype`: a layers.linear.base.Weight, a WholeWeight if they have a format of
    whole numbers, or a layers.linear.base.BlockWeight if they have blocks. Each use reads them anew. `order`:
    the order of the rows' heads."""

    def __init__(
        self,
        checkpoint: TensorSource,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        order: RowOrder | None = None,
    ) -> None:
        shapes = [checkpoint.shape(name) for name in names]
        self.shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        self.dtype = dtype
        self.form = ""
        # Of each name, where they are kept.
        self.block_types: list[str] = []
        self.importance: Tensor | None = None
        self._checkpoint = checkpoint
        self.names = names
        self._ends = list(accumulate(shape[0] for shape in shapes))
        self._device = device
        self._order = order

    def pieces(self) -> Iterator[Tensor]:
        """A piece may be a view of the file, which may change on disk under a running server."""
        if self._order is not None:
            yield from self._ordered_pieces(self._order)
            return
        for name in self.names:
            for piece in self._checkpoint.pieces(name):
                yield piece.to(device=self._device, dtype=self.dtype)

    def _ordered_pieces(self, order: RowOrder) -> Iterator[Tensor]:
        first = 0
        for name in self.names:
            for piece in self._checkpoint.pieces(name, multiple=order.multiple(first)):
                yield order.applied(piece.to(device=self._device, dtype=self.dtype), first)
                first += piece.shape[0]

    def whole_pieces(self) -> Iterator[WholeRows]:
        first, order = 0, self._order
        for name in self.names:
            for piece in self._checkpoint.whole_pieces(name, multiple=1 if order is None else order.multiple(first)):
                rows = piece.asymmetric() if self.form == INT4_ASYMMETRIC else piece
                if order is not None:
                    rows = WholeRows(
                        order.applied(rows.values, first),
                        order.applied(rows.scale, first),
                        None if rows.offset is None else order.applied(rows.offset, first),
                    )
                yield rows.to(self._device)
                first += piece.values.shape[0]

    def block_parts(self) -> list[tuple[str, int]]:
        rows = [self._checkpoint.shape(name)[0] for name in self.names]
        return list(zip(self.block_types, rows, strict=True))

    def block_pieces(self) -> Iterator[Tensor]:
        first, order = 0, self._order
        for name in self.names:
            for piece in self._checkpoint.block_pieces(name, multiple=1 if order is None else order.multiple(first)):
                yield piece if order is None else order.applied(piece, first)
                first += len(piece)

    def joined(self) -> Tensor:
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
        return next(name for name, end in zip(self.names, self._ends, strict=True) if row < end)


class StackedExpert:
    """One expert of a tensor with all experts, as in gpt-oss: a Weight and BlockWeight of layers.linear.base. Each use
    reads it anew."""

    def __init__(
        self, checkpoint: TensorSource, name: str, linear: LayerLinear, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the expert `linear.expert` of the tensor `name`, (experts, inputs, outputs), and its bias."""
        self.shape = linear.shape
        self.dtype = dtype
        self.importance: Tensor | None = None
        self.names = (name,)
        # See StoredWeight.
        self.block_types: list[str] = []
        self._checkpoint = checkpoint
        self._linear = linear
        self._device = device

    def pieces(self) -> Iterator[Tensor]:
        yield self.joined()

    def joined(self) -> Tensor:
        return self._apart(self._stored(self.names[0]).t())

    def block_parts(self) -> list[tuple[str, int]]:
        return [(self.block_types[0], self.shape[0])]

    def block_pieces(self) -> Iterator[Tensor]:
        assert self._linear.expert is not None
        yield self._apart(self._checkpoint.block_row(self.names[0], self._linear.expert))

    def bias(self) -> Tensor:
        """Return the bias (outputs)."""
        return self._apart(self._stored(f"{self.names[0]}_bias"))

    def tensor_of(self, row: int) -> str:
        """Return the name of the tensor that row `row` belongs to."""
        return self.names[0]

    def _stored(self, name: str) -> Tensor:
        assert self._linear.expert is not None
        return self._checkpoint.row(name, self._linear.expert).to(device=self._device, dtype=self.dtype)

    def _apart(self, value_OX: Tensor) -> Tensor:
        """Return the outputs in memory of their own, gates before values."""
        if not self._linear.gated:
            return value_OX.clone(memory_format=torch.contiguous_format)
        return torch.cat((value_OX[::2], value_OX[1::2]))
