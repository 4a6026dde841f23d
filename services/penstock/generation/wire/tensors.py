"""Tensors of output positions as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from penstock.generation.core.tensors import StepTensors, TensorData

_DTYPES = {"float32": common_pb2.D_TYPE_FLOAT32, "int64": common_pb2.D_TYPE_INT64}


def fill_tensors(
    messages: RepeatedCompositeFieldContainer[common_pb2.StepTensors], tensors: Iterable[StepTensors | None]
) -> None:
    """One message per token; empty where the position was not asked for."""
    for one in tensors:
        message = messages.add()
        if one is None:
            continue
        for part, data in (
            (message.scores, one.scores),
            (message.score_ids, one.score_ids),
            (message.logits, one.logits),
            (message.logit_ids, one.logit_ids),
            (message.hidden_states, one.hidden_states),
            (message.attentions, one.attentions),
        ):
            # Touching a part would make it present.
            if data is not None:
                _fill(part, data)


def _fill(message: common_pb2.Tensor, data: TensorData) -> None:
    message.dtype = _DTYPES[data.dtype]
    message.shape.extend(data.shape)
    message.data = data.data
