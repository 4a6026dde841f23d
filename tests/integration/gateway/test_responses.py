"""/v1/responses by OpenAI's own client: its types parse every answer and event, and what is kept can be built on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from factories.servers.served import Served
from openai.types.responses import Response, ResponseFunctionToolCall

pytestmark = pytest.mark.xdist_group("gateway")
MODEL = "penstock-demo"
QUESTION = "What is Penstock?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_output_tokens": 24},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "max_output_tokens": 16, "extra_body": {"seed": 5}},
    "instructed": {"temperature": 0, "max_output_tokens": 8, "instructions": "Be brief."},
    "log-probabilities": {
        "temperature": 0,
        "max_output_tokens": 6,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "called": {"temperature": 0, "max_output_tokens": 200, "tools": [TOOL], "tool_choice": "required"},
    "named": {"temperature": 0, "tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
    "json": {
        "temperature": 0,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
    },
}


def shown(response: Response) -> Any:
    """Content of a response, without ids and times."""
    items = [{**item.model_dump(), "id": None, "call_id": None} for item in response.output]
    usage = response.usage
    assert usage is not None
    return items, response.status, response.incomplete_details, usage.input_tokens, usage.output_tokens


@pytest.mark.parametrize("case", ASKED)
def test_streams_say_what_answers_say(served: Served, case: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, **ASKED[case]}
    whole = served.client.responses.create(**asked)
    events = list(served.client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert shown(last.response) == shown(whole)
    assert events[0].response.id == last.response.id  # type: ignore[union-attr]
    texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert texts == whole.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    if last.type == "response.completed":
        # The helper knows no other end.
        with served.client.responses.stream(**asked) as stream:
            assert stream.until_done().get_final_response().output_text == whole.output_text


def test_an_answer_is_that_of_chat_completions(served: Served) -> None:
    response = served.client.responses.create(
        model=MODEL, input=QUESTION, instructions="Be brief.", max_output_tokens=16, temperature=0
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    other = served.json("/v1/chat/completions", {"messages": chat, "max_tokens": 16, "temperature": 0})
    assert response.output_text == other["choices"][0]["message"]["content"]
    assert response.usage is not None
    assert response.usage.input_tokens == other["usage"]["prompt_tokens"]
    assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


def test_turns_build_on_one_another(served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = served.client.responses.create(**asked, input=QUESTION)
    second = served.client.responses.create(**asked, input="And then?", previous_response_id=first.id)
    streamed = list(
        served.client.responses.create(**asked, input="And then?", previous_response_id=first.id, stream=True)
    )[-1]
    third = served.client.responses.create(**asked, input="Really?", previous_response_id=second.id)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    body = {"max_tokens": 12, "temperature": 0}
    other = served.json("/v1/chat/completions", {"messages": turns, **body})
    assert second.output_text == other["choices"][0]["message"]["content"]
    assert shown(streamed.response) == shown(second)  # type: ignore[union-attr]
    turns += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Really?"}]
    other = served.json("/v1/chat/completions", {"messages": turns, **body})
    assert third.output_text == other["choices"][0]["message"]["content"]
    assert third.previous_response_id == second.id


def test_a_tools_output_goes_back(served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_output_tokens": 200}
    called = served.client.responses.create(**asked, input=QUESTION, tool_choice="required")
    call = next(item for item in called.output if isinstance(item, ResponseFunctionToolCall))
    assert json.loads(call.arguments)["city"] in ("Oslo", "Paris")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    asked["max_output_tokens"] = 8
    built = served.client.responses.create(**asked, input=output, previous_response_id=called.id)
    items: list[Any] = [{"role": "user", "content": QUESTION}, *(one.model_dump() for one in called.output), *output]
    sent = served.client.responses.create(**asked, input=items)
    assert shown(built) == shown(sent)


def test_what_is_kept_can_be_read_listed_and_deleted(served: Served) -> None:
    items: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    made = served.client.responses.create(
        model=MODEL, input=items, max_output_tokens=4, metadata={"a": "b"}, temperature=0
    )
    assert made.metadata == {"a": "b"}
    assert served.client.responses.retrieve(made.id) == made
    listed = served.client.responses.input_items.list(made.id)
    assert [one.content for one in listed.data] == ["c", "b", "a"]  # type: ignore[union-attr]
    page = served.client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [one.content for one in page.data] == ["a", "b"]  # type: ignore[union-attr]
    assert [one.content for one in page] == ["a", "b", "c"]  # type: ignore[union-attr]
    served.client.responses.delete(made.id)
    for gone in (
        served.client.responses.retrieve,
        served.client.responses.input_items.list,
        served.client.responses.delete,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            gone(made.id)
        assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_other_callers_and_unkept_responses(served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "x", "max_output_tokens": 2}
    made = served.client.responses.create(**asked)
    other = served.client.with_options(api_key="another")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError):
        other.responses.create(**asked, previous_response_id=made.id)
    unkept = served.client.responses.create(**asked, store=False)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve(unkept.id)
    assert served.client.responses.retrieve(made.id).id == made.id


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "no message": ({"input": [{"type": "compaction"}]}, "input"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    "a length": ({"max_output_tokens": -1}, "max_output_tokens"),
    "a temperature": ({"temperature": "hot"}, "temperature"),
    "several": ({"n": 2}, "n"),
    "a tool that is none": ({"tools": [{"type": "picture"}]}, "tools[0].type"),
    "a forced tool of a server": ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    "an allowed tool that is none": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        "tool_choice.tools",
    ),
    "a choice": ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    "a format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "a schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "background": ({"background": True, "store": False}, "store"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "a conversation": ({"conversation": "x", "previous_response_id": "y"}, "conversation"),
    "compaction": ({"context_management": [{"type": "compaction"}]}, "context_management"),
    "a server's tools": ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    "a prompt": ({"prompt": {"id": "x"}}, "prompt"),
    "an effort": ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    "a previous": ({"previous_response_id": "resp_none"}, "previous_response_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_faults_name_the_field(served: Served, case: str) -> None:
    change, param = REFUSED[case]
    body = {"model": MODEL, "input": "x", "max_output_tokens": 2, **change}
    status, _, text = served.ask("/v1/responses", {name: value for name, value in body.items() if value is not None})
    error = json.loads(text)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize("query", [{"order": "up"}, {"limit": 0}, {"limit": "x"}, {"after": "nobody"}])
def test_a_list_that_is_none_names_what_is_wrong(served: Served, query: dict[str, Any]) -> None:
    made = served.client.responses.create(model=MODEL, input="x", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.responses.input_items.list(made.id, **query)
    assert caught.value.param == next(iter(query))


def test_the_tokens_of_a_request_are_counted_without_an_answer(served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "instructions": "Be brief.", "tools": [TOOL]}
    answered = served.client.responses.create(**asked, temperature=0, max_output_tokens=1)
    counted = served.client.responses.input_tokens.count(**asked)
    assert answered.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
    alone = served.client.responses.input_tokens.count(input="More.")
    after = served.client.responses.input_tokens.count(input="More.", previous_response_id=answered.id)
    assert after.input_tokens > alone.input_tokens
    with pytest.raises(openai.BadRequestError, match="input"):
        served.client.responses.input_tokens.count(input=[])
