"""Greedy generation by hand over Forward, with keys and values here or in the server's pool."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.v1 import common_pb2, graphs_pb2

# numpy has no bfloat16: its bits travel as they came.
STORED = {
    common_pb2.D_TYPE_FLOAT32: np.dtype("<f4"),
    common_pb2.D_TYPE_BFLOAT16: np.dtype("<u2"),
    common_pb2.D_TYPE_INT32: np.dtype("<i4"),
}
DTYPES = {dtype: number for number, dtype in STORED.items()}


def add_input(request: graphs_pb2.ForwardRequest, index: int, array: Any) -> None:
    """Add an array to a call."""
    request.inputs.add(index=index, dtype=DTYPES[array.dtype], shape=array.shape, data=array.tobytes())


def call_of(graph: str, inputs: dict[int, Any], **fields: Any) -> graphs_pb2.ForwardRequest:
    """Make a call of one message."""
    request = graphs_pb2.ForwardRequest(graph=graph, **fields)
    for index, array in inputs.items():
        add_input(request, index, array)
    return request


def array_of(result: graphs_pb2.GraphResult) -> Any:
    """Return an output as an array."""
    return np.frombuffer(result.data, STORED[result.dtype]).reshape(result.shape)


class GraphDriver:
    """One Forward stream over a model of `num_layers` layers."""

    def __init__(self, stub: Any, num_layers: int, **metadata: str) -> None:
        self.num_layers = num_layers
        self.call = stub.Forward(metadata=tuple((key.replace("_", "-"), value) for key, value in metadata.items()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.call.cancel()

    async def send(self, *requests: graphs_pb2.ForwardRequest) -> list[graphs_pb2.ForwardResponse]:
        """Send the messages of one call; return those of its answer. Raises PenstockError."""
        try:
            for request in requests:
                await self.call.write(request)
            answers = [await self.call.read()]
            while answers[-1] is not grpc.aio.EOF and answers[-1].more:
                answers.append(await self.call.read())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except (grpc.aio.UsageError, grpc.aio.InternalError):
            await self._raise()
            raise
        if answers[-1] is grpc.aio.EOF:
            await self._raise()
        return answers

    async def run(self, graph: str, inputs: dict[int, Any], **fields: Any) -> list[Any]:
        """Run a graph; return its outputs as arrays. Raises PenstockError."""
        answers = await self.send(call_of(graph, inputs, **fields))
        assert len(answers) == 1
        return [array_of(one) for one in answers[0].outputs]

    async def refused(self, *requests: graphs_pb2.ForwardRequest) -> PenstockError:
        """Return the error that a call ends the stream with; without a message, that it ends with by itself.

        grpc.aio's client may lose the status of a stream that ends while it writes.
        """
        try:
            await self.send(*requests)
        except PenstockError as error:
            return error
        raise AssertionError("the call was not refused")

    async def head(self, hidden: Any) -> Any:
        """Return the most likely token (1, 1) after the last row of hidden states (1, rows, hidden)."""
        (logits,) = await self.run("lm_head", {0: hidden[:, -1]})
        (token,) = await self.run("greedy_head", {0: logits})
        return token

    async def by_hand(self, prompt: list[int], count: int) -> list[int]:
        """Return `count` tokens; keys and values travel."""
        (hidden,) = await self.run("embedding", {0: np.array([prompt], "<i4")})
        keys, values = [], []
        for layer in range(self.num_layers):
            hidden, key, value = await self.run(f"block_{layer}", {0: hidden})
            keys.append(key)
            values.append(value)
        found = [await self.head(hidden)]
        while len(found) < count:
            (hidden,) = await self.run("embedding_cache", {0: found[-1]})
            for layer in range(self.num_layers):
                inputs = {0: hidden, 3: keys[layer], 4: values[layer]}
                hidden, key, value = await self.run(f"block_cache_{layer}", inputs)
                keys[layer], values[layer] = (
                    np.concatenate([keys[layer], key], 1),
                    np.concatenate([values[layer], value], 1),
                )
            found.append(await self.head(hidden))
        return [int(token[0, 0]) for token in found]

    async def in_pool(self, prompt: list[int], count: int, name: str, **fields: Any) -> list[int]:
        """Return `count` tokens; keys and values are those of a named sequence."""
        (hidden,) = await self.run("embedding", {0: np.array([prompt], "<i4")})
        found: list[Any] = []
        graph = "block"
        while True:
            for layer in range(self.num_layers):
                hidden, *_ = await self.run(f"{graph}_{layer}", {0: hidden}, sequence=name, **fields)
            found.append(await self.head(hidden))
            if len(found) == count:
                return [int(token[0, 0]) for token in found]
            (hidden,) = await self.run("embedding_cache", {0: found[-1]})
            graph = "block_cache"

    async def _raise(self) -> None:
        code = await self.call.code()
        raise from_rpc_error(
            grpc.aio.AioRpcError(
                code, await self.call.initial_metadata(), await self.call.trailing_metadata(), await self.call.details()
            )
        )
