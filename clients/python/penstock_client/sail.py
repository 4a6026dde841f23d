"""The names of `sophon.sail` that drivers of EngineLLM use, so that one needs another import and no other change.

>>> import penstock_client.sail as sail
>>> engine = sail.EngineLLM("127.0.0.1:50052", [0])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from penstock_client._engine_llm import EngineLLM as _EngineLLM
from penstock_client._graph_values import BmrtFlag, Dtype, numpy, read_into, stored, zeros

if TYPE_CHECKING:
    from penstock_client._graph_values import Array

__all__ = ["BmrtFlag", "Dtype", "EngineLLM", "Handle", "Tensor"]


class Handle:
    """A device. Penstock has it at the service; here it is its number."""

    def __init__(self, dev_id: int) -> None:
        self._dev_id = dev_id

    def get_device_id(self) -> int:
        """Number of the device."""
        return self._dev_id


class Tensor:
    """A tensor in memory here, with SAIL's methods. bfloat16 is stored as the upper halves of float32, in uint16."""

    def __init__(
        self,
        handle: Handle,
        shape: Any,
        dtype: Dtype | None = None,
        own_sys_data: bool = True,
        own_dev_data: bool = True,
    ) -> None:
        """`Tensor(handle, shape, dtype, ...)` of zeros, or `Tensor(handle, array)` of the array's values."""
        if dtype is None:
            array = numpy().asarray(shape)
            kinds = {"f4": Dtype.BM_FLOAT32, "f2": Dtype.BM_FLOAT16, "i4": Dtype.BM_INT32, "i1": Dtype.BM_INT8}
            kind = array.dtype.str.lstrip("<|")
            if kind not in kinds:
                raise TypeError(f"an array of {array.dtype} is none of {', '.join(one.name for one in Dtype)}")
            self._dtype, self.array = kinds[kind], stored(array, kinds[kind]).copy()
        else:
            self._dtype, self.array = dtype, zeros(shape, dtype)

    def shape(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self.array.shape)

    def dtype(self) -> Dtype:
        """Element type."""
        return self._dtype

    def reshape(self, shape: Sequence[int]) -> None:
        """See the same elements in another shape. Raises ValueError for another number of them."""
        if prod(shape) != self.array.size:
            raise ValueError(f"the tensor has {self.array.size} elements")
        self.array = self.array.reshape(tuple(shape))

    def update_data(self, values: Any) -> None:
        """Write all elements; uint16 are the bits of 16-bit floats. Raises TypeError and ValueError."""
        read_into(self.array, stored(values, self._dtype), self._dtype)

    def asnumpy(self) -> Array:
        """Return a copy of the elements, of which int() and float() take the only one whatever the shape."""
        copied: Array = self.array.copy().view(_array_type())
        return copied

    def sync_d2d(self, source: Tensor, source_offset: int, offset: int, count: int) -> None:
        """Copy `count` elements of another tensor, from `source_offset` there to `offset` here."""
        end = offset + count
        if min(source_offset, offset, count) < 0 or source_offset + count > source.array.size or end > self.array.size:
            raise ValueError("the elements are not all there")
        self.array.reshape(-1)[offset:end] = source.array.reshape(-1)[source_offset : source_offset + count]

    def sync_s2d(self) -> None:
        """Do nothing: there is one memory here, and it is sent when a graph runs."""

    def sync_d2s(self) -> None:
        """Do nothing: results are here when a graph has run."""


@cache
def _array_type() -> type:
    """Return the type of arrays that drivers get: numpy's own do not become numbers any more when they have a shape."""
    np = numpy()

    class OneNumber(np.ndarray):  # type: ignore[misc,name-defined]
        def __int__(self) -> int:
            return int(self.item())

        def __float__(self) -> float:
            return float(self.item())

    return OneNumber


class EngineLLM(_EngineLLM):
    """EngineLLM whose tensors here are Tensors. It takes arrays and ServerTensors as well."""

    def _new_array(self, shape: Sequence[int], dtype: Dtype) -> Any:
        return Tensor(Handle(0), shape, dtype)

    def _array_of(self, tensor: Any) -> Any:
        return tensor.array if isinstance(tensor, Tensor) else tensor
