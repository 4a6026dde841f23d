"""The connection of an EngineLLM: calls of ModelService, and one Forward stream that is opened when it is needed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from penstock.common.errors import from_rpc_error
from penstock.common.request_context import BACKEND_KEY
from penstock.v1 import common_pb2, graphs_pb2, model_pb2, model_pb2_grpc

from penstock_client._exceptions import Internal, Unimplemented
from penstock_client.config import ClientConfig

# Data of a message: below the 4 MiB that every gRPC takes by default.
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
    """An output of a call as it came back."""

    dtype: int
    shape: tuple[int, ...]
    data: bytearray


class GraphCalls:
    """Calls of one service. Threads may share it: calls of graphs are made one after the other."""

    def __init__(self, address: str, config: ClientConfig, backend: str | None) -> None:
        """Connect to `address`. Raises ValueError and OSError as `Client`."""
        options = config.channel_options()
        metadata = list(config.metadata(address))
        if backend is not None:
            metadata.append((BACKEND_KEY, backend))
        self._metadata = tuple(metadata)
        self._timeout = config.timeouts.unary
        self._channel = (
            grpc.secure_channel(address, config.tls.credentials(), options)
            if config.tls
            else grpc.insecure_channel(address, options)
        )
        self._stub: Any = model_pb2_grpc.ModelServiceStub(self._channel)
        self._lock = threading.Lock()
        self._call: Any = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last_call = 0

    def unary(self, method: str, request: Any) -> Any:
        """Make a call with one answer. Raises PenstockError."""
        try:
            return getattr(self._stub, method)(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def load_model(self, requests: Iterable[Any]) -> None:
        """Let the service load a model. Raises PenstockError: Unimplemented where it cannot."""
        load = getattr(self._stub, "LoadModel", None)
        if load is None:
            raise Unimplemented(
                "this release cannot load a model into a service: start the service with it, and give its address",
                reason="UNIMPLEMENTED",
            )
        try:
            for _ in load(iter(requests), metadata=self._metadata):
                pass
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def forward(
        self,
        request: graphs_pb2.ForwardRequest,
        inputs: list[Input],
        outputs: list[graphs_pb2.GraphOutput],
    ) -> dict[int, Output]:
        """Run a graph; return the outputs that came in messages, by index.

        Raises PenstockError. The stream has ended then: tensors and sequences of a lease are still there.
        """
        with self._lock:
            self._last_call += 1
            request.call_id = self._last_call
            request.outputs.extend(outputs)
            if self._call is None:
                self._requests = queue.SimpleQueue()
                self._call = self._stub.Forward(iter(self._requests.get, None), metadata=self._metadata)
            try:
                for message in _messages(request, inputs):
                    self._requests.put(message)
                return self._read()
            except grpc.RpcError as error:
                self._end()
                raise from_rpc_error(error) from error
            except BaseException:
                # Whatever comes would be of this call.
                self._end()
                raise

    def close(self) -> None:
        """End the stream and the connection."""
        with self._lock:
            self._end()
        self._channel.close()

    def _read(self) -> dict[int, Output]:
        found: dict[int, Output] = {}
        for response in self._call:
            if response.call_id != self._last_call:
                raise Internal("the answer is of another call", reason="PROTOCOL")
            for one in response.outputs:
                known = found.setdefault(one.index, Output(one.dtype, tuple(one.shape), bytearray()))
                known.data += one.data
            if not response.more:
                return found
        raise Internal("the stream ended without an answer", reason="TRUNCATED_STREAM")

    def _end(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._requests.put(None)
            call.cancel()


def _messages(request: graphs_pb2.ForwardRequest, inputs: list[Input]) -> Iterator[graphs_pb2.ForwardRequest]:
    """Yield the messages of a call, each with a bounded part of the data."""
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
    """Return the facts of the served model. Raises PenstockError."""
    answer: model_pb2.GetModelInfoResponse = calls.unary("GetModelInfo", model_pb2.GetModelInfoRequest(model=model))
    return answer
