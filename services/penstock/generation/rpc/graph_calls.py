"""Calls of ModelService that open the model: graphs, tensors at the server, draws. They need --model-access."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generation.graphs.model_access import MESSAGE_BYTES, ModelAccess, gone
from penstock.generation.lifecycle import Lifecycle
from penstock.generation.service import GenerationCore
from penstock.generation.wire import graph_messages as wire
from penstock.generation.wire.dtype_messages import from_dtype
from penstock.v1 import graphs_pb2, model_pb2, model_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_SERVICE = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
FACTS_METHOD = f"/{_SERVICE.full_name}/GetModelInfo"
# Methods with tokens of their own: all except the one that returns facts.
OPENING_METHODS = tuple(
    name for one in _SERVICE.methods if (name := f"/{_SERVICE.full_name}/{one.name}") != FACTS_METHOD
)


class GraphCalls(model_pb2_grpc.ModelServiceServicer):
    """The calls, over one Lifecycle."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def Forward(  # type: ignore[override]
        self, request_iterator: AsyncIterator[graphs_pb2.ForwardRequest], context: Context
    ) -> None:
        """Run calls of graphs, one after the other."""
        access = self._access()
        assembler = wire.CallAssembler(access.limits.max_graph_call_bytes)
        with access.stream() as stream:
            async for message in request_iterator:
                command = assembler.take(message)
                if command is None:
                    continue
                # It may have begun to drain meanwhile, or serve another model.
                if self._access() is not access:
                    raise gone()
                results = await stream.forward(command)
                for response in wire.from_results(command.call_id, results, MESSAGE_BYTES):
                    await context.write(response)
            if assembler.is_amid_call:
                raise InvalidArgument("more", "must be false in the last message of a call")

    async def AllocateTensors(
        self, request: graphs_pb2.AllocateTensorsRequest, context: Context
    ) -> graphs_pb2.AllocateTensorsResponse:
        """Make tensors in a lease."""
        access = self._access()
        seconds = request.lease_seconds if request.HasField("lease_seconds") else None
        if len(request.tensors) > access.limits.max_graph_tensors:
            raise InvalidArgument("tensors", f"must have at most {access.limits.max_graph_tensors} entries")
        tensors = wire.to_tensors(request.tensors)
        lease, handles = access.allocate(request.model, request.lease_id, seconds, tensors)
        return graphs_pb2.AllocateTensorsResponse(lease_id=lease.lease_id, lease_seconds=lease.seconds, handles=handles)

    async def ReadTensor(
        self, request: graphs_pb2.ReadTensorRequest, context: Context
    ) -> graphs_pb2.ReadTensorResponse:
        """Return elements of a tensor."""
        tensor, data, count = self._access().read(request.model, request.lease_id, wire.to_run(request))
        return graphs_pb2.ReadTensorResponse(
            dtype=from_dtype(str(tensor.dtype)), shape=tensor.shape, data=bytes(data), num_elements=count
        )

    async def WriteTensor(
        self, request: graphs_pb2.WriteTensorRequest, context: Context
    ) -> graphs_pb2.WriteTensorResponse:
        """Change elements of a tensor."""
        kind = request.WhichOneof("source")
        await self._access().write(
            request.model,
            request.lease_id,
            request.handle,
            request.offset,
            request.data if kind == "data" else None,
            wire.to_slice(request.slice) if kind == "slice" else None,
        )
        return graphs_pb2.WriteTensorResponse()

    async def FreeTensors(
        self, request: graphs_pb2.FreeTensorsRequest, context: Context
    ) -> graphs_pb2.FreeTensorsResponse:
        """Free tensors and sequences."""
        # Also while the process drains.
        access = _opened(self._lifecycle.loaded())
        tensors, sequences = access.free(
            request.model, request.lease_id, list(request.handles), list(request.sequences), everything=request.all
        )
        return graphs_pb2.FreeTensorsResponse(tensors=tensors, sequences=sequences)

    async def Sample(self, request: graphs_pb2.SampleRequest, context: Context) -> graphs_pb2.SampleResponse:
        """Draw tokens from given logits."""
        access = self._access()
        command = wire.to_sample(request, self._lifecycle.accepting().limits)
        return wire.from_sampled(await access.sample(command))

    def _access(self) -> ModelAccess:
        return _opened(self._lifecycle.accepting())


def _opened(core: GenerationCore) -> ModelAccess:
    access = core.access
    facts = core.loaded.weights.model.config
    if access is None and (facts.route == "fallback" or not facts.has_graphs):
        raise FailedPrecondition(
            "the model has no graphs: transformers' modules run it (--model-route), layers and all, or it keeps "
            "compressed keys and values, or states of layers",
            reason="NO_GRAPHS",
        )
    if access is None:
        raise FailedPrecondition(
            "the model is not open to callers here: --model-access local, the default, opens it on loopback only; "
            "all opens it to callers with a token of --model-access-token-file",
            reason="MODEL_ACCESS_OFF",
        )
    return access
