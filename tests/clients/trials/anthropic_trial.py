"""anthropic, unmodified: messages, streams, tools, thoughts, typed answers, count_tokens, errors."""

from __future__ import annotations

from typing import Any

import anthropic
from plays import THOUGHT, WEATHER
from trial import MESSAGES, MODEL, PLACE, URL, asked, city_of, holds, step

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300)
TOOLS: Any = [{"name": "get_weather", "description": "Tell the weather.", "input_schema": PLACE}]
PLAIN: dict[str, Any] = {"model": MODEL, "max_tokens": 48, "messages": MESSAGES, "extra_body": {"temperature": 0}}


@step("models.list")
def _() -> Any:
    names = [one.id for one in client.models.list()]
    assert MODEL in names, names
    return names


@step("messages.create with a system prompt")
def _() -> Any:
    answer: Any = client.messages.create(**PLAIN, system="Be brief.")
    assert answer.usage.input_tokens > 0
    assert answer.stop_reason in ("end_turn", "max_tokens")
    return holds(answer.content[0].text)


@step("messages.stream: the same text")
def _() -> Any:
    whole: Any = client.messages.create(**PLAIN)
    with client.messages.stream(**PLAIN) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    return holds(text)


@step("thinking: a block of its own", only="scripted")
def _() -> Any:
    answer: Any = client.messages.create(
        model=MODEL,
        max_tokens=2000,
        messages=asked("thought", "Think."),
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [one.type for one in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking.strip() == THOUGHT
    return holds(answer.content[1].text)


@step("a tool's turn: tool_use, tool_result, answer", only="scripted")
def _() -> Any:
    turns = asked("weather", "Weather in Oslo?")
    first: Any = client.messages.create(model=MODEL, max_tokens=200, messages=turns, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    use = first.content[-1]
    city_of(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second: Any = client.messages.create(model=MODEL, max_tokens=200, messages=turns, tools=TOOLS)
    return holds(second.content[0].text, WEATHER)


@step("two tool_use blocks in a stream", only="scripted")
def _() -> Any:
    turns = asked("two-cities", "Weather in Oslo and Paris?")
    with client.messages.stream(model=MODEL, max_tokens=200, messages=turns, tools=TOOLS) as stream:
        content: Any = stream.get_final_message().content
    cities = [one.input["city"] for one in content if one.type == "tool_use"]
    assert cities == ["Oslo", "Paris"], cities
    return cities


@step("tool_choice any: a call whose arguments obey the schema")
def _() -> Any:
    answer: Any = client.messages.create(
        model=MODEL,
        max_tokens=100,
        # It has no word for it any more.
        extra_body={"temperature": 0},
        messages=asked("weather", "Weather in Oslo?"),
        tools=TOOLS,
        tool_choice={"type": "any"},
    )
    # Others may follow, of which the last may be cut.
    return city_of(next(one for one in answer.content if one.type == "tool_use").input)


@step("messages.count_tokens: what the answer's usage says")
def _() -> Any:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(**PLAIN).usage
    used = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted == used, (counted, used)
    return counted


@step("errors: BadRequestError, NotFoundError")
def _() -> Any:
    try:
        client.messages.create(**{**PLAIN, "max_tokens": -1})
        raise AssertionError("taken")
    except anthropic.BadRequestError as error:
        seen = str(error)
    try:
        client.messages.create(**{**PLAIN, "model": "another"})
        raise AssertionError("taken")
    except anthropic.NotFoundError:
        return seen


@step("a prompt of cached blocks, documents and images in results", only="scripted")
def _() -> Any:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]},
                {"type": "text", "text": "[play:plain] And?"},
            ],
        },
    ]
    answer: Any = client.messages.create(model=MODEL, max_tokens=100, messages=turns)
    return holds(answer.content[0].text)
