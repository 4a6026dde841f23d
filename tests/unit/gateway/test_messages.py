"""Anthropic's form: conversations that become the client's, and blocks of streamed answers."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.messages import _Blocks, _conversation, _input, _stop
from penstock.gateway.request_fields import Fields
from penstock_client import Choice, Delta
from penstock_client._types import ToolCall


def conversation(**body: Any) -> tuple[list[dict[str, Any]], list[str]]:
    call = HttpCall(body, None, GatewayConfig())  # type: ignore[arg-type] # nothing is sent
    return _conversation(Fields(call), call), call.ignored


def test_blocks_become_messages() -> None:
    found, ignored = conversation(
        system="Be brief.",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "…"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"ä": 1}},
                    {"type": "tool_use", "id": "2", "name": "g"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "one"},
                    {"type": "tool_result", "tool_use_id": "2"},
                ],
            },
        ],
    )
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "name": "f", "arguments": '{"ä": 1}'},
                {"id": "2", "name": "g", "arguments": "{}"},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
    ]
    assert ignored == ["messages[].name", "messages[].content[].redacted_thinking"]


def events(blocks: _Blocks, *deltas: Delta) -> list[dict[str, Any]]:
    made = b"".join([*(blocks.pieces(delta) for delta in deltas), blocks.end()]).decode()
    found = []
    for block in made.split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_one_block_is_open_at_a_time() -> None:
    found = events(
        _Blocks(),
        Delta(0, 0, "", reasoning="let "),
        Delta(1, 0, "Yes", reasoning="me"),
        Delta(2, 0, "."),
        Delta(3, 0, "", tool_calls=(ToolCall(0, "a", "f", ""), ToolCall(0, "", "", '{"x"'))),
        Delta(4, 0, "", tool_calls=(ToolCall(0, "", "", ":1}"), ToolCall(1, "b", "g", "{}"))),
    )
    assert [(one["type"].removeprefix("content_block_"), one["index"]) for one in found] == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)),
        *(("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)),
        *(("start", 3), ("delta", 3), ("stop", 3)),
    ]
    starts = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert [(one["type"], one.get("name")) for one in starts] == [
        *(("thinking", None), ("text", None), ("tool_use", "f"), ("tool_use", "g")),
    ]
    deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
    assert "".join(one.get("thinking", "") for one in deltas) == "let me"
    assert "".join(one.get("text", "") for one in deltas) == "Yes."
    assert "".join(one.get("partial_json", "") for one in deltas) == '{"x":1}{}'


def test_arguments_that_are_no_object_are_kept() -> None:
    assert _input('{"a": 1}') == {"a": 1}
    assert _input("") == {}
    assert _input("[1]") == {"arguments": [1]}
    assert _input("{oops") == {"arguments": "{oops"}


def test_a_call_that_a_stop_string_cut_is_not_to_be_run() -> None:
    """It was told as tool_use, with half of its arguments."""
    cut = Choice(index=0, finish_reason="STOP_STRING", stop_string="Os")
    assert _stop(cut, has_calls=True) == {"stop_reason": "stop_sequence", "stop_sequence": "Os"}
    whole = Choice(index=0, finish_reason="TOOL_CALLS", stop_string="Os")
    assert _stop(whole, has_calls=True) == {"stop_reason": "tool_use", "stop_sequence": None}
    assert _stop(Choice(index=0, finish_reason="STOP_EOS"), has_calls=True)["stop_reason"] == "tool_use"
