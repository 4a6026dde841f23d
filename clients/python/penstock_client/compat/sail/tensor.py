"""SAIL's Tensor in memory here, and its Handle: a device, which Penstock has at the service."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from penstock_client.compat.sail.graph_values import Dtype, element_bits, number_array, numpy, read_into, stored, zeros
from penstock_client.compat.sail.server_tensor import ServerTensor

if TYPE_CHECKING:
    from penstock_client.compat.sail.graph_values import Array


class Handle:
    """A device. Penstock has it at the service; here it is its number."""

    def __init__(self, dev_id: int) -> None:
        self._dev_id = dev_id

    def get_device_id(self) -> int:
        """Number of the device."""
        return self._dev_id

    def get_target(self) -> str:
        """Name of the kind of device; a SAIL's is that of a chip, and drivers choose between chips by it."""
        return "PENSTOCK"

    def get_sn(self) -> str:
        """Serial number of the device; Penstock knows none."""
        return ""


class Tensor:
    """A tensor in memory here, with SAIL's methods. bfloat16 is stored as the upper halves of float32, in uint16."""

    def __init__(
        self,
        handle: Handle | Tensor | ServerTensor,
        shape: Any,
        dtype: Dtype | int | None = None,
        own_sys_data: bool = True,
        own_dev_data: bool = True,
    ) -> None:
        """`Tensor(handle, shape, dtype, ...)` of zeros, `Tensor(handle, array)` of the array's values, or
        `Tensor(tensor, shape, offset)`: a view of another tensor's elements from `offset` on.

        A view shares the memory of a tensor that is here. Of one at the service it has a copy, which graphs that write
        into it carry back. Raises TypeError, ValueError for elements that are not there.
        """
        # Set for a view of a tensor at the service: it, and the first element.
        self._source: tuple[ServerTensor, int] | None = None
        # All elements, where a graph has written fewer: a tensor made for the largest output takes any.
        self._memory: Array | None = None
        if not isinstance(handle, Handle):
            self._view(handle, list(shape), 0 if dtype is None else dtype)
            return
        if isinstance(dtype, int):
            raise TypeError("Tensor(handle, shape, dtype): the type must be a Dtype")
        if dtype is None:
            array = numpy().asarray(shape)
            kinds = {"f4": Dtype.BM_FLOAT32, "f2": Dtype.BM_FLOAT16, "i4": Dtype.BM_INT32, "i1": Dtype.BM_INT8}
            kind = array.dtype.str.lstrip("<|")
            if kind not in kinds:
                raise TypeError(f"an array of {array.dtype} is none of {', '.join(one.name for one in Dtype)}")
            self._dtype, self.array = kinds[kind], stored(array, kinds[kind]).copy()
        else:
            self._dtype, self.array = dtype, zeros(shape, dtype)

    def _view(self, source: Tensor | ServerTensor, shape: list[int], offset: Any) -> None:
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError("Tensor(tensor, shape, offset): the offset must be a whole number of elements")
        count, size = prod(shape), prod(source.shape())
        if min(offset, count) < 0 or offset + count > size:
            raise ValueError(f"the tensor has {size} elements: a view of {count} from {offset} on is not all there")
        self._dtype = source.dtype()
        if isinstance(source, Tensor):
            self.array = source.array.reshape(-1)[offset : offset + count].reshape(shape)
            return
        self._source = source, offset
        self.array = source.read(offset, count).reshape(shape)

    def hold(self, shape: Sequence[int]) -> None:
        """Become as large as an output of this shape, within the memory that there is; its first elements stay."""
        count = prod(shape)
        if self._memory is None:
            self._memory = self.array.reshape(-1)
        if count != self.array.size and count <= self._memory.size:
            self.array = self._memory[:count].reshape(tuple(shape))

    def pull(self) -> None:
        """Take a view's elements from the service again."""
        if self._source is not None:
            source, offset = self._source
            self.array.reshape(-1)[:] = source.read(offset, self.array.size)

    def push(self) -> None:
        """Write a view's elements to the service."""
        if self._source is not None:
            source, offset = self._source
            source.write(offset, self.array)

    def shape(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self.array.shape)

    def dtype(self) -> Dtype:
        """Element type."""
        return self._dtype

    def reshape(self, shape: Sequence[int]) -> None:
        """Return the same elements in another shape. Raises ValueError for another number of them."""
        if prod(shape) != self.array.size:
            raise ValueError(f"the tensor has {self.array.size} elements")
        self.array = self.array.reshape(tuple(shape))

    def update_data(self, values: Any) -> None:
        """Write all elements; uint16 are the bits of 16-bit floats. Raises TypeError and ValueError."""
        given = element_bits(values, self._dtype, self.array.size)
        read_into(self.array, stored(given, self._dtype), self._dtype)
        self.push()

    def asnumpy(self) -> Array:
        """Return a copy of the elements; int() and float() of it give the only one whatever the shape."""
        self.pull()
        copied: Array = self.array.copy().view(number_array())
        return copied

    def sync_d2d(self, source: Tensor | ServerTensor, source_offset: int, offset: int, count: int) -> None:
        """Copy `count` elements of another tensor, from `source_offset` there to `offset` here."""
        end = offset + count
        there = prod(source.shape())
        if min(source_offset, offset, count) < 0 or source_offset + count > there or end > self.array.size:
            raise ValueError("the elements are not all there")
        if isinstance(source, ServerTensor):
            taken = source.read(source_offset, count)
        else:
            source.pull()
            taken = source.array.reshape(-1)[source_offset : source_offset + count]
        self.array.reshape(-1)[offset:end] = taken
        self.push()

    def sync_s2d(self) -> None:
        """Do nothing: there is one memory here, and it is sent when a graph runs."""

    def sync_d2s(self) -> None:
        """Do nothing: results are here when a graph has run."""
