"""The connection of an EngineLLM: calls of ModelService, and one Forward stream, opened when needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from penstock.common.errors import from_rpc_error
from penstock.common.request_context import BACKEND_KEY
from penstock.v1 import common_pb2, graphs_pb2, model_pb2

from penstock_client._channel import END, Channel, Exchange
from penstock_client._exceptions import Internal
from penstock_client.config import ClientConfig

# Data of a message: below the 4 MiB that gRPC accepts by default.
PART_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a call: data, or a tensor at the server."""

    index: int
    dtype: int
    shape: tuple[int, ...]
    data: memoryview
    handle: int = 0


@dataclass(slots=True)
class Output:
    """A returned output of a call."""

    dtype: int
    shape: tuple[int, ...]
    data: bytearray


class GraphCalls:
    """Calls of one service. Threads may share it: calls of graphs run one after the other."""

    def __init__(self, address: str, config: ClientConfig, backend: str | None) -> None:
        """Connect to `address`. Raises ValueError and OSError as `Client`."""
        to_backend = () if backend is None else ((BACKEND_KEY, backend),)
        self._metadata = (*config.metadata(address), *to_backend)
        self._timeout = config.timeouts.unary
        self._channel = Channel(address, config)
        self._stub = self._channel.models
        self._lock = threading.Lock()
        # The Forward stream.
        self._exchange: Exchange | None = None
        self._last_call = 0

    def unary(self, method: str, request: Any) -> Any:
        """Make a call with one answer. Raises PenstockError."""
        try:
            return getattr(self._stub, method)(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def forward(
        self,
        request: graphs_pb2.ForwardRequest,
        inputs: list[Input],
        outputs: list[graphs_pb2.GraphOutput],
    ) -> dict[int, Output]:
        """Run a graph; return the outputs that came in messages, by index.

        Raises PenstockError. Then the stream has ended, but tensors and sequences of a lease are still there.
        """
        with self._lock:
            self._last_call += 1
            request.call_id = self._last_call
            request.outputs.extend(outputs)
            if self._exchange is None:
                self._exchange = Exchange(self._stub.Forward, metadata=self._metadata)
            try:
                for message in _messages(request, inputs):
                    self._exchange.send(message)
                return self._read(self._exchange)
            except grpc.RpcError as error:
                self._end()
                raise from_rpc_error(error) from error
            except BaseException:
                # Further messages would belong to this call.
                self._end()
                raise

    def end_stream(self) -> None:
        """End the Forward stream, if there is one: its tensors and sequences at the service end."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the stream and the connection."""
        self.end_stream()
        self._channel.close()

    def _read(self, exchange: Exchange) -> dict[int, Output]:
        found: dict[int, Output] = {}
        while (response := exchange.read()) is not END:
            if response.call_id != self._last_call:
                raise Internal("the answer is of another call", reason="PROTOCOL")
            for one in response.outputs:
                known = found.setdefault(one.index, Output(one.dtype, tuple(one.shape), bytearray()))
                known.data += one.data
            if not response.more:
                return found
        raise Internal("the stream ended without an answer", reason="TRUNCATED_STREAM")

    def _end(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()


def _messages(request: graphs_pb2.ForwardRequest, inputs: list[Input]) -> Iterator[graphs_pb2.ForwardRequest]:
    """Yield the messages of a call, each with a limited part of the data."""
    message, room = request, PART_BYTES
    for one in inputs:
        at = 0
        while True:
            part = one.data[at : at + room]
            entry = message.inputs.add(index=one.index)
            if not at:
                entry.dtype = common_pb2.DType.ValueType(one.dtype)
                entry.shape.extend(one.shape)
            if one.handle:
                entry.handle = one.handle
            else:
                entry.data = bytes(part)
            at, room = at + len(part), room - len(part)
            if not room:
                message.more = True
                yield message
                message, room = graphs_pb2.ForwardRequest(call_id=request.call_id), PART_BYTES
            if at == len(one.data):
                break
    yield message


def model_info(calls: GraphCalls, model: str) -> model_pb2.GetModelInfoResponse:
    """Return the facts about the served model. Raises PenstockError."""
    answer: model_pb2.GetModelInfoResponse = calls.unary("GetModelInfo", model_pb2.GetModelInfoRequest(model=model))
    return answer
