"""WriteWeights: tensors as messages, and the server's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.v1 import model_pb2

from penstock_client._exceptions import Internal
from penstock_client._load_model import CHUNK_BYTES
from penstock_client._tensors import weight_bytes, weight_tensor


def write_requests(tensors: Mapping[str, Any], model: str) -> Iterator[model_pb2.WriteWeightsRequest]:
    """Yield the messages of a write: the names of all tensors, then their bytes, one tensor at a time in memory.

    Raises TypeError for values other than torch tensors or numpy arrays of floating-point numbers.
    """
    named = [weight_tensor(name, values) for name, values in tensors.items()]
    yield model_pb2.WriteWeightsRequest(start=model_pb2.WriteWeightsStart(model=model, tensors=named))
    for values in tensors.values():
        data = memoryview(weight_bytes(values))
        for begin in range(0, len(data), CHUNK_BYTES):
            yield model_pb2.WriteWeightsRequest(chunk=bytes(data[begin : begin + CHUNK_BYTES]))


class WriteState:
    """State of a write: the server answers every message, and then with the result."""

    def __init__(self) -> None:
        self._written: model_pb2.WeightsWritten | None = None
        self.is_over = False

    def take(self, answer: Any, end: Any) -> None:
        """Take an answer; `end` follows the last one."""
        if answer is end:
            self.is_over = True
        elif answer.HasField("written"):
            self._written = answer.written

    def written(self) -> model_pb2.WeightsWritten:
        """Return the result. Raises Internal when the call ended without it."""
        if self._written is None:
            raise Internal("the write ended without its result", reason="PROTOCOL")
        return self._written
