"""Messages of WriteWeights as plain data."""

from __future__ import annotations

from penstock.common.errors import InvalidArgument
from penstock.common.unknown_fields import refuse_unknown_fields
from penstock.generation.core.weight_tensor import TensorSpec
from penstock.generation.wire.dtype_messages import to_dtype
from penstock.v1 import model_pb2


def to_specs(message: model_pb2.WriteWeightsRequest) -> list[TensorSpec]:
    """Return the tensors that a stream's first message names. Raises InvalidArgument naming the field."""
    if message.WhichOneof("request") != "start":
        raise InvalidArgument("start", "must come first")
    refuse_unknown_fields(message.start, "start")
    return [TensorSpec(one.name, to_dtype(one.dtype), tuple(one.shape)) for one in message.start.tensors]


def to_bytes(message: model_pb2.WriteWeightsRequest) -> bytes:
    """Return the bytes of a later message. Raises InvalidArgument."""
    if message.WhichOneof("request") != "chunk":
        raise InvalidArgument("chunk", "must follow start, and nothing else")
    return message.chunk
