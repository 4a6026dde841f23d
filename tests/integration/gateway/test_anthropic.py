"""Anthropic's own client against `penstock serve`: its types parse every answer, and streams say what answers say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from factories.servers.served import Served
from factories.wire.conversation import user
from penstock_client import Client, InvalidArgument

if TYPE_CHECKING:
    # It takes seconds to load, in every worker that collects tests.
    import anthropic
    from anthropic.types import Message

pytestmark = pytest.mark.xdist_group("gateway")
QUESTION: list[Any] = [{"role": "user", "content": "What is Penstock?"}]
MODEL = "penstock-demo"
GREEDY = {"temperature": 0}
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "drawn": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_tokens": 16, "extra_body": {"seed": 5}},
    "stopped": {"temperature": 0, "max_tokens": 64, "stop_sequences": ["zz", " "]},
    "with a system": {"temperature": 0, "max_tokens": 8, "system": [{"type": "text", "text": "Be brief."}]},
    "called": {"temperature": 0, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}},
    "named": {
        "temperature": 0,
        "max_tokens": 200,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    },
    "json": {
        "temperature": 0,
        "max_tokens": 200,
        "extra_body": {"output_config": {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}},
    },
}  # fmt: skip


def asked_as(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the client, which knows no options of sampling: they go into `extra_body`."""
    known = ("max_tokens", "messages", "stop_sequences", "system", "thinking", "tool_choice", "tools")
    extra = {name: value for name, value in case.items() if name not in (*known, "extra_body")}
    given = {name: value for name, value in case.items() if name in known}
    return {"model": MODEL, "messages": QUESTION, **given, "extra_body": {**extra, **case.get("extra_body", {})}}


@pytest.fixture(scope="module")
def client(served: Served) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("case", ASKED)
def test_streams_say_what_answers_say(client: anthropic.Anthropic, case: str) -> None:
    asked = asked_as(ASKED[case])
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    assert shown(streamed) == shown(whole)
    assert whole.usage.output_tokens == streamed.usage.output_tokens > 0
    # What comes from the cache is told apart.
    assert all_input(whole) == all_input(streamed)


def shown(message: Message) -> Any:
    """Content and end of a message, without its ids."""
    content = [(block.type, {**block.model_dump(), "id": None}) for block in message.content]
    return content, message.stop_reason, message.stop_sequence, message.role, message.model


def all_input(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def test_reasons_to_stop(client: anthropic.Anthropic) -> None:
    reasons = {}
    for case in ("greedy", "stopped", "called", "json"):
        message = client.messages.create(**asked_as(ASKED[case]))
        reasons[case] = (message.stop_reason, message.stop_sequence)
    assert reasons == {
        "greedy": ("max_tokens", None),
        "stopped": ("stop_sequence", " "),
        "called": ("tool_use", None),
        "json": ("end_turn", None),
    }


def test_an_answer_is_that_of_chat_completions(client: anthropic.Anthropic, served: Served) -> None:
    message = client.messages.create(
        model=MODEL, messages=QUESTION, max_tokens=16, system="Be brief.", extra_body=GREEDY
    )
    chat = [{"role": "system", "content": "Be brief."}, *QUESTION]
    other = served.json("/v1/chat/completions", {"messages": chat, "max_tokens": 16, "temperature": 0})
    assert message.content[0].type == "text"
    assert message.content[0].text == other["choices"][0]["message"]["content"]
    assert all_input(message) == other["usage"]["prompt_tokens"]


def test_a_tools_result_goes_back(client: anthropic.Anthropic, served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "extra_body": GREEDY, "max_tokens": 200}
    called = client.messages.create(**asked, messages=QUESTION, tool_choice={"type": "any"})
    call = next(block for block in called.content if block.type == "tool_use")
    assert call.input in ({"city": "Oslo"}, {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    answer = client.messages.create(**{**asked, "max_tokens": 8}, messages=turns)
    counted = client.messages.count_tokens(model=MODEL, tools=[TOOL], messages=turns)
    assert counted.input_tokens == all_input(answer)
    called_function = {"name": call.name, "arguments": json.dumps(call.input)}
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    chat = [
        *QUESTION,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.id, "type": "function", "function": called_function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    body = {"messages": chat, "tools": [{"type": "function", "function": function}], "max_tokens": 8, "temperature": 0}
    other = served.json("/v1/chat/completions", body)
    assert other["usage"]["prompt_tokens"] == all_input(answer)
    assert other["choices"][0]["message"]["content"] == "".join(
        block.text for block in answer.content if block.type == "text"
    )


def test_a_last_message_of_the_models_own_is_gone_on_with(client: anthropic.Anthropic, served: Served) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "Penstock is"}]
    answer = client.messages.create(model=MODEL, messages=turns, max_tokens=8, extra_body=GREEDY)
    other = served.json(
        "/v1/chat/completions",
        {
            "messages": turns,
            "max_tokens": 8,
            "temperature": 0,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == other["choices"][0]["message"]["content"]
    counted = client.messages.count_tokens(model=MODEL, messages=turns)
    assert counted.input_tokens == all_input(answer)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens: must be given"),
    "no messages": ({"messages": []}, "messages: "),
    "messages that are none": ({"messages": [3]}, "messages[0]: must be an object"),
    "another role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]: image blocks are not supported",
    ),
    "a result of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id: ",
    ),
    "a content that is none": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: "),
    "a call without a name": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
        "messages[0].content[0].name: ",
    ),
    "a system that is none": ({"system": [{"type": "image"}]}, "system[0]: "),
    "a temperature": ({"temperature": "hot"}, "temperature: "),
    "a length": ({"max_tokens": -1}, "max_tokens: "),
    "stops": ({"stop_sequences": "x"}, "stop_sequences: must be a list"),
    "a stop": ({"stop_sequences": [3]}, "stop_sequences"),
    "several answers": ({"n": 2}, "n: must be 1"),
    "thinking": ({"thinking": {"type": "hard"}}, "thinking.type: "),
    "a tool that is none": ({"tools": [{"type": "picture", "name": "x"}]}, "tools[0].type: must be custom"),
    "a forced tool of the server": (
        {"tools": [{"type": "web_search_20250305", "name": "x"}], "tool_choice": {"type": "any"}},
        "tool_choice: ",
    ),
    "a tool without a name": ({"tools": [{}]}, "tools[0].name: "),
    "a choice": ({"tool_choice": {"type": "some"}}, "tool_choice.type: "),
    "a choice without a name": ({"tool_choice": {"type": "tool"}}, "tool_choice.name: "),
    "servers": ({"mcp_servers": [{}]}, "mcp_servers: "),
    "a format": ({"output_config": {"format": {"type": "xml"}}}, "output_config: "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_faults_have_anthropics_form_and_name_the_field(served: Served, case: str) -> None:
    change, message = REFUSED[case]
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, **change}
    status, _, text = served.ask("/v1/messages", {name: value for name, value in body.items() if value is not None})
    found = json.loads(text)
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert found["error"]["message"].startswith(message)


def test_the_clients_own_errors(client: anthropic.Anthropic, served: Served) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="nobody", messages=QUESTION, max_tokens=4)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, messages=QUESTION, max_tokens=4, extra_body={"temperature": -1})
    status, headers, _ = served.ask(
        "/v1/messages", {"messages": QUESTION, "max_tokens": 1, "service_tier": "auto", "container": "x"}
    )
    assert (status, headers["x-penstock-ignored-fields"]) == (200, "container")


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity"])
def test_numbers_that_json_has_not_are_no_fault_of_ours(served: Served, number: bytes) -> None:
    tools = b'[{"name": "f", "input_schema": {"type": "object", "minimum": ' + number + b"}}]"
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": ' + tools + b"}"
    status, _, text = served.ask("/v1/messages", raw=body)
    assert (status, json.loads(text)["error"]["reason"]) == (400, "MALFORMED_MESSAGE")
    wrong = {"name": "g", "parameters": {"type": "object", "minimum": float(number)}}
    with Client(served.grpc) as client, pytest.raises(InvalidArgument) as caught:
        client.generate(user("x"), tools=[{"name": "f", "parameters": {}}, wrong])
    assert caught.value.field == "tools[1].parameters"


def test_models_have_anthropics_form_for_its_client(client: anthropic.Anthropic, served: Served) -> None:
    import anthropic

    page = client.models.list(limit=1)
    (model,) = page.data
    assert (model.id, model.type, page.has_more, page.first_id) == (MODEL, "model", False, MODEL)
    assert model.created_at.year >= 2026
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("other")
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.models.list(limit=0)
