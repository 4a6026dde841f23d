"""Tensor that stays at the server, like SAIL's Tensor: EngineLLM's `process` accepts it in place of an array."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from penstock.v1 import graphs_pb2

from penstock_client.compat.sail.graph_calls import PART_BYTES, GraphCalls
from penstock_client.compat.sail.graph_values import Dtype, element_bits, from_bytes, number_array, stored

if TYPE_CHECKING:
    from penstock_client.compat.sail.graph_values import Array


class ServerTensor:
    """A tensor of a lease. Its elements travel only on request."""

    def __init__(
        self, calls: GraphCalls, model: str, lease_id: str, handle: int, shape: Sequence[int], dtype: Dtype
    ) -> None:
        self.handle = handle
        self._calls = calls
        self._model = model
        self._lease_id = lease_id
        self._shape = list(shape)
        self._dtype = dtype

    def shape(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self._shape)

    def dtype(self) -> Dtype:
        """Element type."""
        return self._dtype

    def reshape(self, shape: Sequence[int]) -> None:
        """Change the shape of the same elements. Raises ValueError for another number of elements."""
        if prod(shape) != prod(self._shape):
            raise ValueError(f"the tensor has {prod(self._shape)} elements")
        self._shape = list(shape)

    def update_data(self, values: Any) -> None:
        """Write all elements. Raises TypeError and ValueError for other values, PenstockError."""
        array = stored(element_bits(values, self._dtype, prod(self._shape)), self._dtype)
        if array.size != prod(self._shape):
            raise ValueError(f"the tensor has {prod(self._shape)} elements, the array {array.size}")
        self.write(0, array)

    def write(self, offset: int, array: Array) -> None:
        """Write stored elements from `offset` on. Raises PenstockError."""
        data, item = array.tobytes(), array.itemsize
        for at in range(0, len(data), PART_BYTES):
            self._write(offset + at // item, data=data[at : at + PART_BYTES])

    def asnumpy(self) -> Array:
        """Return all elements in an array of its own; int() and float() of it give the only one whatever the shape.

        Raises PenstockError.
        """
        found: Array = self.read(0, prod(self._shape)).reshape(self._shape).view(number_array())
        return found

    def read(self, offset: int, count: int) -> Array:
        """Return `count` elements from `offset` on, in one dimension. Raises PenstockError."""
        data = bytearray()
        at = offset
        while at < offset + count:
            answer: graphs_pb2.ReadTensorResponse = self._calls.unary(
                "ReadTensor",
                graphs_pb2.ReadTensorRequest(model=self._model, lease_id=self._lease_id, handle=self.handle, offset=at),
            )
            data += answer.data
            at += answer.num_elements
        item = len(data) // max(at - offset, 1)
        return from_bytes(bytes(data[: count * item]), [count], self._dtype)

    def sync_d2d(self, source: ServerTensor, source_offset: int, offset: int, count: int) -> None:
        """Copy `count` elements of another tensor of the same engine, from `source_offset` there to `offset` here.

        They do not leave the server. Raises PenstockError.
        """
        part = graphs_pb2.TensorSlice(handle=source.handle, offset=source_offset, count=count)
        self._write(offset, slice=part)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Let numpy read it."""
        array = self.asnumpy()
        return array if dtype is None else array.astype(dtype)

    def _write(self, offset: int, **source: Any) -> None:
        self._calls.unary(
            "WriteTensor",
            graphs_pb2.WriteTensorRequest(
                model=self._model, lease_id=self._lease_id, handle=self.handle, offset=offset, **source
            ),
        )
