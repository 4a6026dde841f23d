"""openai, unmodified: chats, streams, tools, parsed answers, responses, completions, embeddings, errors."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from plays import PERSON, THOUGHT, WEATHER
from pydantic import BaseModel
from trial import IS_SCRIPTED, MESSAGES, MODEL, PLACE, QUESTION, URL, asked, city_of, holds, step

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}]
PLAIN: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 48, "temperature": 0}


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


def is_person(found: Any) -> str:
    assert isinstance(found, Person), found
    assert not IS_SCRIPTED or found.model_dump() == PERSON
    return repr(found)


@step("models.list")
def _() -> Any:
    names = [one.id for one in client.models.list()]
    assert MODEL in names, names
    return names


@step("chat.completions.create")
def _() -> Any:
    answer = client.chat.completions.create(**PLAIN)
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return holds(answer.choices[0].message.content)


@step("chat.completions.create, stream: the same text")
def _() -> Any:
    whole = client.chat.completions.create(**PLAIN).choices[0].message.content
    chunks = list(client.chat.completions.create(**PLAIN, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole, pieces
    assert chunks[-1].usage
    return f"{len(pieces)} pieces"


@step("chat.completions.stream: events and the final answer")
def _() -> Any:
    with client.chat.completions.stream(**PLAIN) as stream:
        kinds = {event.type for event in stream}
        holds(stream.get_final_completion().choices[0].message.content)
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    return sorted(kinds)


@step("a thought before the answer: reasoning_content", only="scripted")
def _() -> Any:
    message: Any = client.chat.completions.create(model=MODEL, messages=asked("thought", "Think.")).choices[0].message
    assert message.reasoning_content.strip() == THOUGHT, message
    return holds(message.content)


@step("a tool's turn: call, result, answer", only="scripted")
def _() -> Any:
    turns = asked("weather", "Weather in Oslo?")
    first = client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    calls: Any = first.message.tool_calls
    city_of(calls[0].function.arguments)
    turns += [first.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
    return holds(
        client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS).choices[0].message.content, WEATHER
    )


@step("two calls in a stream, put together by stream()", only="scripted")
def _() -> Any:
    turns = asked("two-cities", "Weather in Oslo and Paris?")
    with client.chat.completions.stream(model=MODEL, messages=turns, tools=TOOLS) as stream:
        calls: Any = stream.get_final_completion().choices[0].message.tool_calls
    cities = [json.loads(one.function.arguments)["city"] for one in calls]
    assert cities == ["Oslo", "Paris"], cities
    return cities


@step("tool_choice required: a call whose arguments obey the schema")
def _() -> Any:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=asked("weather", "Weather in Oslo?"),
        tools=TOOLS,
        tool_choice="required",
        temperature=0,
        max_tokens=100,
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert {one.function.name for one in calls} == {"get_weather"}
    return city_of(calls[0].function.arguments)


@step("chat.completions.parse into a pydantic model")
def _() -> Any:
    turns = asked("person", "Tell of one person: a name and an age.")
    found = client.chat.completions.parse(
        model=MODEL, messages=turns, response_format=Person, temperature=0, max_tokens=200
    )
    return is_person(found.choices[0].message.parsed)


@step("log-probabilities")
def _() -> Any:
    answer = client.chat.completions.create(**PLAIN, logprobs=True, top_logprobs=2)
    rows: Any = answer.choices[0].logprobs
    assert "".join(row.token for row in rows.content)
    assert all(row.logprob <= 0 for row in rows.content)
    return f"{len(rows.content)} tokens"


@step("completions.create")
def _() -> Any:
    answer = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=24, temperature=0)
    assert answer.choices[0].text is not None
    return answer.choices[0].text


@step("responses.create, and one that builds on it")
def _() -> Any:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=48, temperature=0)
    holds(first.output_text)
    second = client.responses.create(
        model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=16, temperature=0
    )
    assert second.output_text
    return second.output_text


@step("responses.stream: events and the final answer")
def _() -> Any:
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=512, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text
    return holds(text)


@step("responses: a function's turn", only="scripted")
def _() -> Any:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PLACE, "strict": False}]
    turns = asked("weather", "Weather in Oslo?")
    first = client.responses.create(model=MODEL, input=turns, tools=tools)
    call: Any = next(one for one in first.output if one.type == "function_call")
    city_of(call.arguments)
    turns += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    return holds(client.responses.create(model=MODEL, input=turns, tools=tools).output_text, WEATHER)


@step("responses.parse into a pydantic model")
def _() -> Any:
    turns = asked("person", "Tell of one person: a name and an age.")
    found = client.responses.parse(model=MODEL, input=turns, text_format=Person, temperature=0, max_output_tokens=200)
    return is_person(found.output_parsed)


@step("responses: background, polled to its end")
def _() -> Any:
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=48, temperature=0, background=True)
    assert made.status == "queued", made.status
    seen = [made.status]
    while made.status in ("queued", "in_progress"):
        time.sleep(0.01)
        made = client.responses.retrieve(made.id)
        seen.append(made.status or "")
    whole = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=48, temperature=0)
    assert made.output_text == whole.output_text, made.output_text
    return " ".join(dict.fromkeys(seen))


@step("responses: background and stream, read again from an event on, and cancel")
def _() -> Any:
    asked_for: Any = {"model": MODEL, "input": QUESTION, "max_output_tokens": 48, "background": True, "stream": True}
    seen = list(client.responses.create(**asked_for, temperature=0))
    first: Any = seen[0]
    again = list(client.responses.retrieve(first.response.id, stream=True, starting_after=2))
    assert again == seen[3:], again
    ended = client.responses.cancel(first.response.id)
    assert ended.status in ("completed", "incomplete"), ended.status
    return f"{len(seen)} events, {len(again)} again"


@step("conversations: made, two turns, its items, deleted")
def _() -> Any:
    made = client.conversations.create(metadata={"topic": "trial"}, items=[{"role": "system", "content": "Be brief."}])
    for text in (QUESTION, "And then?"):
        client.responses.create(model=MODEL, input=text, conversation=made.id, max_output_tokens=16, temperature=0)
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [getattr(item, "role", "") for item in items] == ["system", "user", "assistant", "user", "assistant"], items
    client.conversations.items.delete(items[-1].id or "", conversation_id=made.id)
    assert client.conversations.update(made.id, metadata={"topic": "over"}).metadata == {"topic": "over"}
    assert client.conversations.delete(made.id).deleted
    return f"{len(items)} items"


@step("embeddings.create", only="real")
def _() -> Any:
    found = client.embeddings.create(model=MODEL, input=["water", "turbine"])
    assert len(found.data) == 2
    assert len(found.data[0].embedding) > 8
    return f"2 of {len(found.data[0].embedding)} numbers"


@step("errors: BadRequestError, NotFoundError")
def _() -> Any:
    try:
        client.chat.completions.create(**{**PLAIN, "max_tokens": -1})
        raise AssertionError("taken")
    except openai.BadRequestError as error:
        seen = str(error)
    try:
        client.chat.completions.create(**{**PLAIN, "model": "another"})
        raise AssertionError("taken")
    except openai.NotFoundError:
        return seen


@step("AsyncOpenAI: 8 streams at once")
async def _() -> Any:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300) as other:

        async def one() -> str:
            stream = await other.chat.completions.create(**PLAIN, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        texts = await asyncio.gather(*(one() for _ in range(8)))
    assert len(set(texts)) == 1, texts
    return holds(texts[0])
