"""Tools as Codex and its like send them: custom ones, namespaces, allowed ones, and those of other servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factories.servers.scripted_gateway import ScriptedGateway, scripted_gateway

PATCH = '*** Begin Patch\n+ "é" \\ {}\n*** End Patch'
CUSTOM = {"name": "apply_patch", "description": "Patches files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = {"role": "user", "content": "Go."}


def written(name: str, arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


async def events_of(served: ScriptedGateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a streamed response."""
    status, _, text = await served.ask("/v1/responses", {**body, "stream": True})
    assert status == 200, text
    lines = [line for line in text.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_custom_tools_call_is_an_item_of_its_own_and_comes_back() -> None:
    async with scripted_gateway(written("apply_patch", {"input": PATCH})) as served:
        body = {"input": [ASKED], "tools": [{"type": "custom", **CUSTOM, "format": GRAMMAR}]}
        status, headers, text = await served.ask("/v1/responses", body)
        assert (status, headers["x-penstock-ignored-fields"]) == (200, "tools[].format")
        (item,) = json.loads(text)["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
        prompt = await served.prompt()
        assert "Patches files." in prompt
        assert "start: /.+/" in prompt

        events = await events_of(served, body)
        deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == done["input"] == PATCH
        assert events[-1]["response"]["output"][0]["input"] == PATCH
        assert not [event for event in events if "function_call" in event["type"]]

        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
        await served.json("/v1/responses", {**body, "input": [ASKED, item, output]})
        assert json.dumps(PATCH, ensure_ascii=False) in await served.prompt()
        assert "Done." in await served.prompt()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_custom_tools_call_in_a_chat(is_stream: bool) -> None:
    text = written("apply_patch", {"input": PATCH}) + "\n" + written("get_weather", {"city": "Oslo"})
    async with scripted_gateway(text) as served:
        tools = [{"type": "custom", "custom": CUSTOM}, {"type": "function", "function": WEATHER}]
        body = {"messages": [ASKED], "tools": tools}
        if is_stream:
            chunks = await served.events("/v1/chat/completions", body)
            pieces = [
                piece
                for chunk in chunks
                for choice in chunk["choices"]
                for piece in choice["delta"].get("tool_calls", ())
            ]
            calls = [piece for piece in pieces if piece.get("type") == "custom"]
            arguments = "".join(piece["function"]["arguments"] for piece in pieces if "function" in piece)
            assert json.loads(arguments) == {"city": "Oslo"}
        else:
            answer = await served.json("/v1/chat/completions", body)
            calls = answer["choices"][0]["message"]["tool_calls"]
            assert calls[1]["function"]["name"] == "get_weather"
        assert calls[0]["custom"] == {"name": "apply_patch", "input": PATCH}
        turn = {"role": "assistant", "content": None, "tool_calls": calls[:1]}
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Done."}
        await served.json("/v1/chat/completions", {**body, "messages": [ASKED, turn, result]})
        assert json.dumps(PATCH, ensure_ascii=False) in await served.prompt()


async def test_a_tool_of_a_namespace_is_called_by_both_names() -> None:
    async with scripted_gateway(written("files__read", {"path": "a"})) as served:
        space = {
            "type": "namespace",
            "name": "files",
            "tools": [{"type": "function", "name": "read", "parameters": {}}],
        }
        answer = await served.json("/v1/responses", {"input": [ASKED], "tools": [space]})
        (item,) = answer["output"]
        assert (item["name"], item["namespace"], item["type"]) == ("read", "files", "function_call")
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Done."}
        await served.json("/v1/responses", {"input": [ASKED, item, output], "tools": [space]})
        assert '"files__read"' in (await served.prompt()).rpartition("Go.")[2]


async def test_allowed_tools_leave_out_the_others() -> None:
    async with scripted_gateway("Fine.") as served:
        other = {"name": "read_mail", "parameters": {}}
        body: dict[str, Any] = {
            "input": [ASKED],
            "tools": [{"type": "function", **WEATHER}, {"type": "function", **other}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
        }
        answer = await served.json("/v1/responses", body)
        assert answer["tool_choice"] == body["tool_choice"]
        assert ("get_weather" in await served.prompt(), "read_mail" in await served.prompt()) == (True, False)
        choice = {"mode": "required", "tools": [{"type": "function", "function": {"name": "read_mail"}}]}
        chat = {
            "messages": [ASKED],
            "tools": [{"type": "function", "function": WEATHER}, {"type": "function", "function": other}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": choice},
        }
        await served.json("/v1/chat/completions", chat)
        assert ("get_weather" in await served.prompt(), "read_mail" in await served.prompt()) == (False, True)
        assert served.backend.submitted[-1].HasField("constraint"), "required"


ELSEWHERE = (
    "web_search",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
)
KEPT = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "compaction",
)


async def test_what_other_servers_run_and_kept_is_listed_as_ignored() -> None:
    async with scripted_gateway("Fine.") as served:
        body = {
            "input": [ASKED, *({"type": kind, "id": "x", "encrypted_content": "…"} for kind in KEPT), ASKED],
            "tools": [*({"type": kind} for kind in ELSEWHERE), {"type": "function", **WEATHER}],
        }
        status, headers, text = await served.ask("/v1/responses", body)
        assert status == 200, text
        listed = headers["x-penstock-ignored-fields"].split(", ")
        assert set(listed) == {*(f"tools[].{kind}" for kind in ELSEWHERE), *(f"input[].{kind}" for kind in KEPT)}
        for path, more in (
            ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}),
            ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "max_tokens": 9}),
        ):
            status, headers, text = await served.ask(path, {"messages": [ASKED], **more})
            assert (status, headers["x-penstock-ignored-fields"][:17]) == (200, "tools[].web_searc"), text
            forced = {"tool_choice": {"type": "any"} if "messages" in path else "required"}
            status, _, text = await served.ask(path, {"messages": [ASKED], **more, **forced})
            assert (status, json.loads(text)["error"]["param"]) == (400, "tool_choice")


async def test_calls_that_a_client_ran_without_a_function_are_history() -> None:
    async with scripted_gateway("Fine.") as served:
        action = {"type": "exec", "command": ["ls", "-l"]}
        items = [
            ASKED,
            {"type": "local_shell_call", "call_id": "1", "action": action},
            {"type": "local_shell_call_output", "id": "1", "output": "a.txt"},
            {"type": "apply_patch_call", "call_id": "2", "operation": {"type": "delete_file", "path": "a.txt"}},
            {"type": "apply_patch_call_output", "call_id": "2", "status": "completed", "output": "gone"},
        ]
        await served.json("/v1/responses", {"input": items})
        prompt = await served.prompt()
        assert all(text in prompt for text in ('"local_shell"', '["ls", "-l"]', "a.txt", "delete_file", "gone"))


FUNCTION = {"type": "function", "function": WEATHER}
# Only the client, which has the tools that are left, finds that it is out of range.
NOT_TAKEN = {"type": "object", "maxProperties": 10**400}
ITEM = {"type": "function", **WEATHER}
SPACE = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}
HTTP_TOOL = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
# What is wrong with a request, and the field of it that an answer names.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a name behind a tool that is left out": (
        "chat/completions",
        {"tools": [{"type": "web_search"}, FUNCTION, {"type": "function", "function": {"name": 3}}]},
        "tools[2].function.name",
    ),
    "a schema behind one": (
        "chat/completions",
        {
            "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f", "parameters": NOT_TAKEN}}],
            "tool_choice": "required",
        },
        "tools[1].function.parameters.maxProperties",
    ),
    "a schema in a namespace": (
        "responses",
        {
            "tools": [ITEM, {**SPACE, "tools": [ITEM, {**ITEM, "name": "b", "parameters": NOT_TAKEN}]}],
            "tool_choice": "required",
        },
        "tools[1].tools[1].parameters.maxProperties",
    ),
    "a schema of the only one that is allowed": (
        "chat/completions",
        {
            "tools": [FUNCTION, {"type": "function", "function": {"name": "f", "parameters": NOT_TAKEN}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "f"}}]},
            },
        },
        "tools[1].function.parameters.maxProperties",
    ),
    "a kind that is none": (
        "chat/completions",
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": ["x"]}]}}},
        "tool_choice.tools[0].type",
    ),
    "a forced tool that is left out": (
        "messages",
        {"tools": [SEARCH, HTTP_TOOL], "tool_choice": {"type": "tool", "name": "web_search"}, "max_tokens": 9},
        "tool_choice.name",
    ),
    "a forced tool that there is not": (
        "responses",
        {"tools": [ITEM], "tool_choice": {"type": "function", "name": "other"}},
        "tool_choice.name",
    ),
    "a name that a namespace has": ("responses", {"tools": [SPACE, {**ITEM, "name": "a__b"}]}, "tools[1].name"),
    "a namespace's name that is taken": (
        "responses",
        {"tools": [{**ITEM, "name": "a__b"}, SPACE]},
        "tools[1].tools[0].name",
    ),
    "answers in letters": ("completions", {"n": "x", "best_of": 3}, "n"),
    "half an answer": ("completions", {"n": 2.5, "best_of": 3}, "n"),
    "answers of truth": ("completions", {"n": True, "best_of": 3}, "n"),
}


async def test_a_wrong_request_is_told_in_its_own_places() -> None:
    told = {}
    async with scripted_gateway("Fine.") as served:
        for case, (route, body, _) in WRONG.items():
            asked = {"responses": "input", "completions": "prompt"}.get(route, "messages")
            status, _, text = await served.ask(
                f"/v1/{route}", {asked: "x" if route == "completions" else [ASKED], **body}
            )
            told[case] = (status, json.loads(text)["error"].get("param"))
    assert told == {case: (400, field) for case, (_, _, field) in WRONG.items()}
