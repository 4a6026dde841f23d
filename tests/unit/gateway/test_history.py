"""Conversations as clients send them back: each field in each API's shape is the same message for the template."""

from __future__ import annotations

import base64
import json
from typing import Any, cast

import pytest
from penstock.common.errors import InvalidArgument
from penstock.gateway.chat_history import messages_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.history import read_content
from penstock.gateway.messages import _conversation
from penstock.gateway.request_fields import Fields
from penstock.gateway.response_items import conversation_of, read_items

ROUTES = ("chat", "responses", "messages")
CUT = '{"city": "Os'
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
TEXT_FILE = "data:text/plain;base64," + base64.b64encode("Größe 3".encode()).decode()


def read(route: str, history: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages that a route reads of a history, and what it lists as ignored."""
    call = HttpCall({"messages": history}, cast("Any", None), GatewayConfig())
    if route == "chat":
        return messages_of(history, call), call.ignored
    if route == "messages":
        return _conversation(Fields(call), call), call.ignored
    return conversation_of(read_items(history), 0, call), call.ignored


def called(route: str, arguments: Any) -> list[dict[str, Any]]:
    """A call with its result, in a route's shape."""
    if route == "chat":
        function = {"name": "f", "arguments": arguments}
        return [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]
    if route == "responses":
        return [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments, "status": "incomplete"},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
        ]
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
    ]


def test_a_text_is_what_a_user_says() -> None:
    assert read("chat", "Hello") == ([{"role": "user", "content": "Hello"}], [])
    for nothing in ("", [], None, 5):
        with pytest.raises(InvalidArgument, match="messages"):
            read("chat", nothing)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("arguments", "taken"),
    [(None, "{}"), ("", ""), ("{}", "{}"), (CUT, CUT), ("oops", "oops"), ({"a": [1]}, '{"a": [1]}'), ([1], "[1]")],
    ids=str,
)
def test_a_call_is_taken_whatever_its_arguments(route: str, arguments: Any, taken: str) -> None:
    found, ignored = read(route, called(route, arguments))
    assert found[0]["tool_calls"] == [{"id": "1", "name": "f", "arguments": taken}]
    assert found[1] == {"role": "tool", "tool_call_id": "1", "content": "2"}
    assert not ignored


def result(route: str, parts: Any) -> Any:
    if route == "chat":
        return {"role": "tool", "tool_call_id": "1", "content": parts}
    if route == "responses":
        return {"type": "function_call_output", "call_id": "1", "output": parts}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": parts}]}


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
LINKED = {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}
DOCUMENT = {
    "type": "document",
    "title": "Sizes",
    "source": {"type": "text", "media_type": "text/plain", "data": "S, M"},
}
SEARCH = {
    "type": "search_result",
    "source": "https://a.b",
    "title": "T",
    "content": [{"type": "text", "text": "found"}],
}
RESULTS: dict[str, tuple[Any, str, list[str]]] = {
    "nothing": (None, "", []),
    "a text": ("ok", "ok", []),
    "texts": ([{"type": "text", "text": "a"}, "b"], "ab", []),
    "an object": ({"ok": True, "n": "é"}, '{"ok": true, "n": "é"}', []),
    "an image": ([{"type": "text", "text": "See "}, IMAGE], "See [left out: image image/png]", ["image"]),
    "a URL": ([LINKED], "[left out: image_url https://a.b/c.png]", ["image_url"]),
    "a data URL": ([{"type": "input_image", "image_url": TEXT_FILE * 9}], "[left out: input_image]", ["input_image"]),
    "a reference": ([{"type": "tool_reference", "tool_name": "g"}], "[left out: tool_reference g]", ["tool_reference"]),
    "a resource": ([{"type": "resource", "resource": {"uri": "x:y", "text": "inside"}}], "inside\n\n", []),
    "a link": (
        [{"type": "resource_link", "uri": "file:///a"}],
        "[left out: resource_link file:///a]",
        ["resource_link"],
    ),
    "a document": ([DOCUMENT], "Sizes\nS, M\n\n", []),
    "a search result": ([SEARCH], "T\nhttps://a.b\nfound\n\n", []),
    "a file of text": ([{"type": "input_file", "filename": "a.txt", "file_data": TEXT_FILE}], "a.txt\nGröße 3\n\n", []),
    "another document": (
        [{"type": "document", "title": "x.pdf", "source": PDF}],
        "[left out: document x.pdf]",
        ["document"],
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", RESULTS)
def test_a_tools_result_is_its_text_and_names_what_was_left_out(route: str, case: str) -> None:
    parts, text, left_out = RESULTS[case]
    found, ignored = read(route, [result(route, parts)])
    assert [{"content": "", **message} for message in found] == [{"role": "tool", "tool_call_id": "1", "content": text}]
    assert [name.rpartition(".")[2] for name in ignored] == left_out


def said(route: str, parts: Any) -> Any:
    return {"role": "assistant", "content": parts, **({"type": "message"} if route == "responses" else {})}


PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a text": ("a", {"content": "a"}),
    "texts": (
        [{"type": "output_text", "text": "a", "annotations": []}, {"type": "text", "text": "b"}],
        {"content": "ab"},
    ),
    "a refusal": ([{"type": "refusal", "refusal": "No."}], {"content": "No."}),
    "a thought": (
        [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "a"}],
        {"content": "a", "reasoning_content": "hm"},
    ),
    "a thought in parts": (
        [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}],
        {"content": "a", "reasoning_content": "hm"},
    ),
    "reasoning": (
        [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "a"}],
        {"content": "a", "reasoning_content": "hm"},
    ),
    "a summary": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}],
        {"content": "", "reasoning_content": "hm"},
    ),
    "null": ([{"type": "text", "text": None}, {"type": "thinking", "thinking": None}], {"content": ""}),
    "an image": (
        [{"type": "image", "name": "cat"}, {"type": "text", "text": "!"}],
        {"content": "[left out: image cat]!"},
    ),
    "nothing": ([], {"content": ""}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", PARTS)
def test_the_models_own_turn_is_taken_in_all_its_parts(route: str, case: str) -> None:
    parts, expected = PARTS[case]
    found, _ = read(route, [said(route, parts)])
    assert found == [{"role": "assistant", **expected}]


@pytest.mark.parametrize("route", ROUTES)
def test_what_another_server_sealed_is_left_out_and_listed(route: str) -> None:
    found, ignored = read(
        route, [said(route, [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}])]
    )
    assert found == [{"role": "assistant", "content": "a"}]
    assert len(ignored) == 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "part", [IMAGE, {"type": "input_audio"}, {"type": "what", "text": "x"}], ids=lambda part: part["type"]
)
def test_a_users_image_is_refused_by_its_place(route: str, part: Any) -> None:
    with pytest.raises(InvalidArgument, match="are not supported") as caught:
        read(route, [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}])
    assert caught.value.field == f"{'input' if route == 'responses' else 'messages'}[0].content[1]"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("part", [DOCUMENT, SEARCH], ids=lambda part: part["type"])
def test_a_users_document_of_text_is_read(route: str, part: Any) -> None:
    found, ignored = read(route, [{"role": "user", "content": [part, {"type": "text", "text": "Why?"}]}])
    assert found[0]["content"].endswith("\n\nWhy?")
    assert not ignored


OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a refusal": ({"content": None, "refusal": "No."}, {"content": "No."}),
    "no refusal": ({"content": "a", "refusal": None}, {"content": "a"}),
    "thinking": ({"content": "a", "thinking": "hm"}, {"content": "a", "reasoning_content": "hm"}),
    "reasoning": ({"content": "a", "reasoning": "hm"}, {"content": "a", "reasoning_content": "hm"}),
    "blocks": (
        {"content": "a", "reasoning_content": None, "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
        {"content": "a", "reasoning_content": "hm"},
    ),
    "details": (
        {"content": "a", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"content": "a", "reasoning_content": "hm"},
    ),
    "a function call": (
        {"content": None, "function_call": {"name": "f", "arguments": CUT}},
        {"tool_calls": [{"id": "", "name": "f", "arguments": CUT}]},
    ),
    "a call without an id": (
        {"content": "", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "{}"}}]},
        {"content": "", "tool_calls": [{"id": "", "name": "f", "arguments": "{}"}]},
    ),
    "a call among the parts": (
        {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
    ),
}


@pytest.mark.parametrize("case", OLDER)
def test_fields_of_a_chats_message_by_all_their_names(case: str) -> None:
    given, expected = OLDER[case]
    found, ignored = read("chat", [{"role": "assistant", **given}])
    assert found == [{"role": "assistant", **expected}]
    assert not ignored


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("message", [{}, {"content": None}, {"text": "Hi"}])
def test_what_a_caller_says_itself_is_never_nothing(route: str, role: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"\.content: must be a text or a list") as caught:
        read(route, [{"role": role, **message}])
    assert caught.value.field is not None
    assert caught.value.field.endswith("[0].content")


def test_a_function_is_a_tool() -> None:
    found, _ = read("chat", [{"role": "function", "name": "f", "content": {"n": 1}}])
    assert found == [{"role": "tool", "name": "f", "content": json.dumps({"n": 1})}]


def test_a_part_of_its_own_kind_costs_what_others_cost() -> None:
    call = HttpCall({}, cast("Any", None), GatewayConfig())
    parts = [{"type": f"kind{number}"} for number in range(2000)] * 2
    said = read_content(parts, "messages[0].content", "assistant", call)
    assert said.text.count("[left out: kind7]") == 2
    most = call.config.max_ignored_fields
    assert call.ignored == [f"messages[].content[].kind{number}" for number in range(most)]


def test_texts_of_parts_are_joined_once() -> None:
    """Adding each to those before it, 16,000 parts copy gigabytes, while the loop answers nobody."""
    call = HttpCall({}, cast("Any", None), GatewayConfig())
    parts = [{"type": "text", "text": "abc"}, {"type": "thinking", "thinking": "hm"}] * 50
    said = read_content(parts, "messages[0].content", "assistant", call)
    assert (said.texts, said.thoughts) == (["abc"] * 50, ["hm"] * 50)
    assert (said.text, said.reasoning) == ("abc" * 50, "hm" * 50)


@pytest.mark.parametrize("role", ["user", "system", "developer", "critic"])
def test_an_image_is_left_out_of_history_alone(role: str) -> None:
    with pytest.raises(InvalidArgument, match="image parts are not supported"):
        read("chat", [{"role": role, "content": [IMAGE]}])
    for known in ("assistant", "tool", "function"):
        assert "[left out: image" in read("chat", [{"role": known, "content": [IMAGE]}])[0][0]["content"]


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({"function_call": {}}, []),
        ({"function_call": False, "refusal": False, "thinking": False, "tool_calls": False}, []),
        ({"refusal": True}, ["messages[].refusal"]),
        ({"refusal": {"why": "x"}}, ["messages[].refusal"]),
        ({"thinking": True}, ["messages[].thinking"]),
        ({"reasoning": {"effort": "low"}}, ["messages[].reasoning"]),
    ],
)
def test_a_field_that_says_nothing_is_absent(more: dict[str, Any], ignored: list[str]) -> None:
    assert read("chat", [{"role": "assistant", "content": "a", **more}]) == (
        [{"role": "assistant", "content": "a"}],
        ignored,
    )
