"""Whatever the server answers can be sent back: whole and cut answers, with thoughts and calls, on each route."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factories.servers.scripted_gateway import ScriptedGateway, scripted_gateway

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWERS = {
    "text": "Fine.",
    "nothing": "<|im_end|>",
    "a thought": "<think>\nHm.\n</think>\nFine.",
    "a call": f"I look.{CALL}",
    "two calls": f"{CALL}\n{CALL}",
    "a cut call": CALL[:-22],
    "a broken call": '<tool_call>\n{"name": "get_weather", "arguments": "Oslo"}\n</tool_call>',
    "a thought and a call": f"<think>\nHm.\n</think>\n{CALL}",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ASKED = {"role": "user", "content": "Weather?"}


async def chat(served: ScriptedGateway) -> int:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    answer = await served.json("/v1/chat/completions", {"messages": [ASKED], "tools": tools})
    message = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": None} for call in message.get("tool_calls", ())]
    status, _, text = await served.ask(
        "/v1/chat/completions", {"messages": [ASKED, message, *results, ASKED], "tools": tools}
    )
    assert status == 200, text
    return len(results)


async def responses(served: ScriptedGateway) -> int:
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    answer = await served.json("/v1/responses", {"input": [ASKED], "tools": tools})
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results: list[Any] = [{"type": "function_call_output", "call_id": call["call_id"], "output": "2"} for call in calls]
    history = [ASKED, *answer["output"], *results, ASKED]
    for body in ({"input": history}, {"input": [*results, ASKED], "previous_response_id": answer["id"]}):
        status, _, text = await served.ask("/v1/responses", {**body, "tools": tools})
        assert status == 200, text
    return len(results)


async def messages(served: ScriptedGateway) -> int:
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    body = {"max_tokens": 999, "tools": tools}
    answer = await served.json("/v1/messages", {**body, "messages": [ASKED]})
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"]} for call in calls]
    turn = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    history = [ASKED, {"role": "assistant", "content": answer["content"]}, turn]
    status, _, text = await served.ask("/v1/messages", {**body, "messages": history})
    assert status == 200, text
    return len(results)


@pytest.mark.parametrize("route", [chat, responses, messages], ids=lambda route: route.__name__)
async def test_what_the_server_gives_it_takes(route: Any) -> None:
    async with scripted_gateway() as served:
        calls = {}
        for name, text in ANSWERS.items():
            await served.writes(text)
            calls[name] = await route(served)
        assert calls["a call"] == 1
        assert calls["two calls"] == 2


async def test_the_model_reads_the_text_of_a_cut_call() -> None:
    async with scripted_gateway("Fine.") as served:
        function = {"name": "get_weather", "arguments": '{"city": "Os'}
        turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
        await served.json("/v1/chat/completions", {"messages": [ASKED, turn, ASKED]})
        assert json.dumps({"arguments": '{"city": "Os'}) in await served.prompt()
