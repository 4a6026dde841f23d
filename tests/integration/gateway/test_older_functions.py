"""`functions` and `function_call` of a chat, as OpenAI's clients sent tools before `tools`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factories.servers.scripted_gateway import scripted_gateway

pytestmark = pytest.mark.xdist_group("gateway")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tells the weather.", "parameters": CITY}
ASKED = {"role": "user", "content": "Oslo?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PATH = "/v1/chat/completions"


async def test_a_call_comes_in_the_field_and_with_the_reason_of_that_form() -> None:
    async with scripted_gateway(f"{CALL}\n{CALL}") as served:
        answer = await served.json(PATH, {"messages": [ASKED], "functions": [WEATHER]})
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "function_call"
        assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert "tool_calls" not in choice["message"]
        assert "Tells the weather." in await served.prompt()
        result = {"role": "function", "name": "get_weather", "content": "rain"}
        await served.json(PATH, {"messages": [ASKED, choice["message"], result], "functions": [WEATHER]})
        assert "rain" in await served.prompt()


async def test_a_stream_has_the_pieces_of_the_call() -> None:
    async with scripted_gateway(CALL) as served:
        body = {"messages": [ASKED], "functions": [WEATHER], "function_call": "auto", "stream": True}
        status, _, text = await served.ask(PATH, body)
        assert status == 200
        lines = [line.removeprefix("data: ") for line in text.decode().split("\n") if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        pieces = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
        assert [piece["name"] for piece in pieces if "name" in piece] == ["get_weather"]
        assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Oslo"}
        assert choices[-1]["finish_reason"] == "function_call"
        assert not any("tool_calls" in one["delta"] for one in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": {"name": "get_weather"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call.name"),
        ({"functions": [WEATHER], "function_call": "required"}, "function_call"),
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"functions": [WEATHER, {"name": 5}]}, "functions[1].name"),
        ({"functions": "x"}, "functions"),
        # By the router, which knows them as tools.
        ({"functions": [WEATHER, {"name": ""}]}, "functions[1].name"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async with scripted_gateway(CALL) as served:
        status, _, text = await served.ask(PATH, {"messages": [ASKED], **fields})
        assert (status, json.loads(text)["error"]["param"]) == (400, param)


async def test_nothing_is_asked_for_without_functions() -> None:
    async with scripted_gateway("Hello") as served:
        answer = await served.json(PATH, {"messages": [ASKED], "functions": [], "function_call": "none"})
        assert answer["choices"][0]["message"]["content"] == "Hello"
