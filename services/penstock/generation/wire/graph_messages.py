"""Messages of the model's graphs to plain data and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.common.errors import InvalidArgument
from penstock.common.unknown_fields import refuse_unknown_fields
from penstock.generation.core.tensors import TensorData
from penstock.generation.graphs.graph_commands import (
    ForwardCommand,
    InputTensor,
    OutputTarget,
    SampleCommand,
    SampleRow,
    TensorRequest,
    TensorSlice,
)
from penstock.generation.wire.convert import from_positions
from penstock.generation.wire.dtype_messages import from_dtype, to_dtype
from penstock.generation.wire.option_messages import to_options, to_stop
from penstock.v1 import common_pb2, graphs_pb2

if TYPE_CHECKING:
    from penstock.generation.core.step import SampledToken
    from penstock.generation.graphs.graph import Graph, GraphTensor
    from penstock.generation.graphs.graph_commands import ForwardResult
    from penstock.generation.options.request_limits import RequestLimits

# Of a shape: each size is a number that any caller may send millions of. One more than any graph has.
_MOST_DIMENSIONS = 5
# Of a call; no graph has as many.
_MOST_TENSORS = 16
# Device that the graphs are on, by its number in this process.
_DEVICE = 0


class CallAssembler:
    """Joins the messages of a stream into calls."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: most data of one call."""
        self._max_bytes = max_bytes
        self._begun: ForwardCommand | None = None
        self._bytes = 0

    @property
    def is_amid_call(self) -> bool:
        """True when a call has begun and is not complete yet."""
        return self._begun is not None

    def take(self, message: graphs_pb2.ForwardRequest) -> ForwardCommand | None:
        """Return the call that this message completes; None: more messages follow. Raises InvalidArgument."""
        if len(message.inputs) > _MOST_TENSORS or len(message.outputs) > _MOST_TENSORS:
            raise InvalidArgument("inputs", f"and outputs must have at most {_MOST_TENSORS} entries")
        self._bytes += sum(len(one.data) for one in message.inputs)
        if self._bytes > self._max_bytes:
            most = f"{self._max_bytes} bytes that --max-graph-call-bytes allows"
            raise InvalidArgument("inputs", f"must be at most the {most} in a call")
        if self._begun is None:
            self._begun = _begin(message)
        else:
            _go_on(self._begun, message)
        if message.more:
            return None
        command, self._begun, self._bytes = self._begun, None, 0
        return command


def _begin(message: graphs_pb2.ForwardRequest) -> ForwardCommand:
    return ForwardCommand(
        call_id=message.call_id,
        graph=message.graph,
        model=message.model,
        stage=message.stage if message.HasField("stage") else None,
        lease_id=message.lease_id,
        inputs=[_input(one) for one in message.inputs],
        outputs=[OutputTarget(one.index, one.handle, one.keep) for one in message.outputs],
        sequence=message.sequence,
        start=message.start if message.HasField("start") else None,
    )


def _input(one: graphs_pb2.GraphInput) -> InputTensor:
    return InputTensor(one.index, to_dtype(one.dtype), _shape(one.shape), bytearray(one.data), one.handle)


def _go_on(command: ForwardCommand, message: graphs_pb2.ForwardRequest) -> None:
    if message.call_id != command.call_id or message.graph or message.outputs:
        raise InvalidArgument("call_id", "must be that of the call that goes on, which has its graph and outputs")
    for one in message.inputs:
        last = command.inputs[-1] if command.inputs else None
        if last is not None and last.index == one.index and one.WhichOneof("source") == "data" and not last.handle:
            last.data += one.data
        else:
            command.inputs.append(_input(one))
    if len(command.inputs) > _MOST_TENSORS:
        raise InvalidArgument("inputs", f"must have at most {_MOST_TENSORS} entries")


def from_results(call_id: int, results: Iterable[ForwardResult], most: int) -> Iterator[graphs_pb2.ForwardResponse]:
    """Yield the messages of a call's outputs, each with at most `most` bytes of data."""
    response, room = graphs_pb2.ForwardResponse(call_id=call_id), most
    for result in results:
        at = 0
        while True:
            part = result.data[at : at + room]
            response.outputs.add(
                index=result.index,
                dtype=from_dtype(result.dtype),
                shape=result.shape,
                data=bytes(part),
                handle=result.handle,
            )
            at, room = at + len(part), room - len(part)
            if at == len(result.data):
                break
            response.more = True
            yield response
            response, room = graphs_pb2.ForwardResponse(call_id=call_id), most
        if not room:
            response.more = True
            yield response
            response, room = graphs_pb2.ForwardResponse(call_id=call_id), most
    yield response


def from_graph(graph: Graph, *, can_keep: bool) -> graphs_pb2.GraphInfo:
    """Describe a graph; `can_keep`: tensors can stay at the server."""
    return graphs_pb2.GraphInfo(
        name=graph.name,
        inputs=[_tensor_info(graph, one) for one in graph.inputs],
        outputs=[_tensor_info(graph, one) for one in graph.outputs],
        stages=[graphs_pb2.GraphStage(batch=one.batch, length=one.length) for one in graph.stages],
        is_dynamic=True,
        addr_mode=int(can_keep),
        device_ids=[_DEVICE],
        weight_format=graph.weights.format,
        weight_scale=graph.weights.scale,
    )


def _tensor_info(graph: Graph, tensor: GraphTensor) -> graphs_pb2.GraphTensorInfo:
    return graphs_pb2.GraphTensorInfo(
        name=tensor.name,
        index=tensor.index,
        dtype=from_dtype(tensor.dtype),
        shapes=[graphs_pb2.TensorShape(sizes=shape) for shape in graph.stage_shapes(tensor)],
        min_shape=graphs_pb2.TensorShape(sizes=graph.min_shape(tensor)),
        max_shape=graphs_pb2.TensorShape(sizes=graph.max_shape(tensor)),
        scale=1.0,
        device_id=_DEVICE,
        is_optional=tensor.is_optional,
    )


def to_tensors(specs: Iterable[graphs_pb2.TensorSpec]) -> list[TensorRequest]:
    """Return wanted tensors as plain data, unchecked."""
    return [TensorRequest(to_dtype(one.dtype), _shape(one.shape)) for one in specs]


def to_run(message: graphs_pb2.ReadTensorRequest) -> TensorSlice:
    """Return the elements to read as plain data, unchecked."""
    return TensorSlice(message.handle, message.offset, message.count if message.HasField("count") else None)


def to_slice(message: graphs_pb2.TensorSlice) -> TensorSlice:
    """Return elements of another tensor as plain data, unchecked."""
    return TensorSlice(message.handle, message.offset, message.count)


def to_sample(message: graphs_pb2.SampleRequest, limits: RequestLimits) -> SampleCommand:
    """Return a SampleRequest as plain data, unchecked except for the sizes of lists and for unknown options.

    Raises InvalidArgument.
    """
    if len(message.rows) > limits.max_return_sequences:
        raise InvalidArgument("rows", f"must have at most {limits.max_return_sequences} entries")
    refuse_unknown_fields(message.config, "config")
    refuse_unknown_fields(message.stop, "stop")
    return SampleCommand(
        rows=[
            SampleRow(
                list(row.prompt_token_ids), list(row.output_token_ids), row.seed if row.HasField("seed") else None
            )
            for row in message.rows
        ],
        options=to_options(message.config, limits),
        stop=to_stop(message.stop, limits),
        model=message.model,
        logits=_tensor(message.logits) if message.HasField("logits") else None,
        lease_id=message.lease_id,
        handle=message.handle,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def from_sampled(drawn: Iterable[SampledToken]) -> graphs_pb2.SampleResponse:
    """Return drawn tokens as a message."""
    response = graphs_pb2.SampleResponse()
    for token in drawn:
        one = response.tokens.add(token_id=token.token_id)
        if token.logprobs is not None:
            one.logprobs.CopyFrom(from_positions((token.logprobs,))[0])
    return response


def _tensor(message: common_pb2.Tensor) -> TensorData:
    return TensorData(to_dtype(message.dtype), _shape(message.shape), message.data)


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(sizes[:_MOST_DIMENSIONS])
