"""A constraint from a client of the router to the text that comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest
from factories.servers.stack import Stack
from penstock.common.errors import InvalidArgument, from_rpc_error
from penstock.v1 import common_pb2, config_pb2, text_pb2, text_pb2_grpc, tokenizer_pb2

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
CONFIG = config_pb2.GenerationConfig(max_new_tokens=300)


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    with Stack() as stack, grpc.insecure_channel(stack.address) as channel:
        yield text_pb2_grpc.TextServiceStub(channel)


def read(stream: Any) -> tuple[str, int]:
    """Read the whole text and the reason of its end."""
    events = list(stream)
    text = "".join(event.delta.text for event in events if event.HasField("delta"))
    return text, events[-1].finished.sequences[0].finish_reason


def test_generate_answers_in_the_schemas_shape(stub: Any) -> None:
    constraint = config_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    request = text_pb2.GenerateTextRequest(text="Is the sky blue?", config=CONFIG, constraint=constraint)
    text, reason = read(stub.Generate(request))
    assert reason == common_pb2.FINISH_REASON_CONSTRAINT_DONE
    jsonschema.validate(json.loads(text), SCHEMA)


def test_chat_answers_with_a_choice(stub: Any) -> None:
    request = text_pb2.ChatRequest(
        messages=[tokenizer_pb2.Message(role="user", content="Is the sky blue?")],
        config=CONFIG,
        constraint=config_pb2.Constraint(choice=config_pb2.Choices(values=["yes", "no"])),
    )
    text, _ = read(stub.Chat(request))
    assert text in ("yes", "no")


def test_a_bad_constraint_is_the_callers_error(stub: Any) -> None:
    constraint = config_pb2.Constraint(json_schema='{"uniqueItems": true}')
    with pytest.raises(grpc.RpcError) as raised:
        read(stub.Generate(text_pb2.GenerateTextRequest(text="Hello", config=CONFIG, constraint=constraint)))
    error = from_rpc_error(raised.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == "constraint.json_schema"
    assert "uniqueItems" in error.message
