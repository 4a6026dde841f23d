"""Items of /v1/responses: the conversation that they are, and the events that make an answer's."""

from __future__ import annotations

from typing import Any, cast

import pytest
from penstock.common.errors import InvalidArgument
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.response_items import OutputItems, conversation_of, read_items


def conversation(*items: Any) -> list[dict[str, Any]]:
    call = HttpCall({}, cast("Any", None), GatewayConfig())
    return conversation_of(read_items(list(items)), 0, call)


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    found = conversation(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        {**call, "call_id": "2", "name": "g"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        {**call, "call_id": "3"},
    )

    def calls(*pairs: tuple[str, str]) -> list[dict[str, str]]:
        return [{"id": number, "name": name, "arguments": "{}"} for number, name in pairs]

    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": calls(("1", "f"), ("2", "g")),
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "done", "reasoning_content": "so", "tool_calls": calls(("3", "f"))},
    ]


def test_a_text_is_one_message_and_every_item_has_an_id_of_its_own() -> None:
    (item,) = read_items("hello")
    assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "user", "hello")
    given = read_items([{"role": "user", "content": "x", "id": "mine"}, {"role": "user", "content": "x"}])
    assert given[0]["id"] == "mine"
    assert len({one["id"] for one in (*given, item)}) == 3


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (3, "input[0]"),
        ({}, "input[0].type"),
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": ["message"]}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "1"}, "input[0].name"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "reasoning", "content": 3}, "input[0].content"),
    ],
)
def test_faults_name_item_and_field(item: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        conversation(item)
    assert caught.value.field == field


@pytest.mark.parametrize("given", [None, [], {}, 3])
def test_an_input_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_items(given)
    assert caught.value.field == "input"


def test_events_and_items_say_the_same() -> None:
    items = OutputItems()
    events = [
        *items.reason("let "),
        *items.reason("me"),
        *items.write("Ye", [{"token": "Ye"}]),
        *items.write("s", [{"token": "s"}]),
        *items.call(0, "a", "f", ""),
        *items.call(0, "", "", '{"x"'),
        *items.call(0, "", "", ":1}"),
        *items.call(1, "b", "g", "{}"),
        *items.end("incomplete"),
    ]
    assert [(one["type"], one["status"]) for one in items.items] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]
    assert items.items[0]["content"][0]["text"] == "let me"
    assert items.items[1]["content"][0] == {
        "type": "output_text",
        "text": "Yes",
        "annotations": [],
        "logprobs": [{"token": "Ye"}, {"token": "s"}],
    }
    assert [one["arguments"] for one in items.items[2:]] == ['{"x":1}', "{}"]
    added = [value for name, value in events if name == "response.output_item.added"]
    assert [one["output_index"] for one in added] == [0, 1, 2, 3]
    assert all(one["item"]["status"] == "in_progress" and not one["item"].get("content") for one in added)
    parts = [value["part"] for name, value in events if name == "response.content_part.added"]
    assert [part["text"] for part in parts] == ["", ""]
    assert parts[1]["logprobs"] == []
    done = [value["item"] for name, value in events if name == "response.output_item.done"]
    assert done == items.items
    assert items.end() == []


def test_log_probabilities_of_tokens_without_text_go_with_the_next_text() -> None:
    items = OutputItems()
    first, second, last = ([{"token": name, "bytes": [number]}] for name, number in (("a", 1), ("b", 2), ("c", 3)))
    assert items.write("", first) == []
    (*_, (name, event)) = items.write("\u00e9", second)
    assert (name, event["logprobs"]) == ("response.output_text.delta", [*first, *second])
    # A character that the limit cut has no text at all.
    assert items.write("", last) == []
    items.end()
    assert items.items[0]["content"][0]["logprobs"] == [*first, *second, *last]


def test_a_call_that_broke_off_is_incomplete() -> None:
    """It was told as completed, with half of its arguments."""
    items = OutputItems()
    items.call(0, "c1", "f", '{"city": "Oslo"}')
    items.call(1, "c2", "f", '{"city": "')
    (*_, (name, done)) = items.end(is_whole=False)
    assert (name, done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert [item["status"] for item in items.items] == ["completed", "incomplete"]
    text = OutputItems()
    text.write("It rains.", [])
    text.end(is_whole=False)
    assert text.items[0]["status"] == "completed"
