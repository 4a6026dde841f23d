"""Objects of a request go into messages, or are refused by the name of their place and never by their content."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import InvalidArgument
from penstock.v1 import text_pb2
from penstock_client._options import chat_request
from penstock_client._structs import MOST_DEPTH, MOST_VALUES

HELLO = [{"role": "user", "content": "Hello"}]


def request(messages: Any = HELLO, tools: Any = (), documents: Any = (), variables: Any = None) -> text_pb2.ChatRequest:
    return chat_request(messages, tools, documents, variables, {})


def nested(depth: int, shape: str) -> Any:
    value: Any = "x"
    for number in range(depth):
        value = [value] if shape == "lists" or (shape == "both" and number % 2) else {"a": value}
    return value


@pytest.mark.parametrize("shape", ["lists", "objects", "both"])
def test_what_is_taken_is_what_protobuf_reads_again(shape: str) -> None:
    deepest = {"a": nested(MOST_DEPTH - 1, shape)}
    made = request(tools=[{"name": "f", "parameters": deepest}], variables=deepest)
    assert text_pb2.ChatRequest.FromString(made.SerializeToString()) == made
    for more in ({"tools": [{"name": "f", "parameters": {"a": deepest}}]}, {"variables": {"a": deepest}}):
        with pytest.raises(InvalidArgument) as caught:
            request(**more)
        assert caught.value.reason == "TOO_DEEP"
        assert caught.value.field in ("tools[0].parameters", "chat_template_kwargs")


def test_values_of_all_objects_are_counted_together() -> None:
    half = {"a": [1] * (MOST_VALUES // 2 - 1)}
    tools = [{"name": "f", "parameters": half}]
    assert request(tools=tools, variables=half)
    with pytest.raises(InvalidArgument) as caught:
        request(tools=tools, variables={**half, "b": 1})
    assert (caught.value.field, caught.value.reason) == ("chat_template_kwargs", "TOO_MANY")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"documents": [[]]}, "documents[0]"),
        ({"documents": [{}, None]}, "documents[1]"),
        ({"documents": [{"text": 1}]}, "documents[0].text"),
        ({"documents": [{"title": ["SECRET"]}]}, "documents[0].title"),
        ({"documents": [{"text": "SECRET\ud800"}]}, "documents[0].text"),
        ({"tools": ["SECRET"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"function": []}]}, "tools[0]"),
        ({"tools": [{"name": {"SECRET": 1}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "parameters": "SECRET"}]}, "tools[0].parameters"),
        ({"tools": [{"name": "f", "parameters": {"a": 10**400}}]}, "tools[0].parameters"),
        ({"tools": [{"name": "f", "parameters": {1: 2}}]}, "tools[0].parameters"),
        ({"variables": {"a": object()}}, "chat_template_kwargs"),
        ({"variables": {"SECRET\ud800": 1}}, "chat_template_kwargs"),
        ({"variables": {"a": "SECRET\ud800"}}, "chat_template_kwargs"),
        ({"messages": ["SECRET"]}, "messages[0]"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "SECRET\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": 1}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "user", "tool_calls": [{"arguments": {}, "id": [1]}]}]},
            "messages[0].tool_calls[0].id",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_place(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        request(**given)
    assert caught.value.field == field
    assert "SECRET" not in str(caught.value)
