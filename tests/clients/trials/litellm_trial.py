"""litellm, unmodified, by its providers openai and anthropic: completions, streams, tools, types, errors."""

from __future__ import annotations

from typing import Any

import litellm
from plays import PERSON, WEATHER
from pydantic import BaseModel
from trial import IS_SCRIPTED, MESSAGES, MODEL, PLACE, URL, asked, city_of, holds, step

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}]
PROVIDERS: dict[str, dict[str, Any]] = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
}


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


def trials(provider: str) -> None:
    """All steps by one provider."""
    common = {**PROVIDERS[provider], "api_key": "none", "num_retries": 0, "timeout": 300}
    plain = {**common, "messages": MESSAGES, "max_tokens": 48, "temperature": 0}

    @step(f"completion, {provider}")
    def _() -> Any:
        answer: Any = litellm.completion(**plain)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return holds(answer.choices[0].message.content)

    @step(f"completion, stream, {provider}: the same text")
    def _() -> Any:
        whole: Any = litellm.completion(**plain)
        chunks: Any = litellm.completion(**plain, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content, text
        return holds(text)

    @step(f"acompletion, {provider}")
    async def _() -> Any:
        answer: Any = await litellm.acompletion(**plain)
        return holds(answer.choices[0].message.content)

    @step(f"a tool's turn, {provider}: call, result, answer", only="scripted")
    def _() -> Any:
        turns = asked("weather", "Weather in Oslo?")
        first: Any = litellm.completion(**common, messages=turns, tools=TOOLS, max_tokens=200)
        assert first.choices[0].finish_reason == "tool_calls"
        call = first.choices[0].message.tool_calls[0]
        city_of(call.function.arguments)
        turns += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        second: Any = litellm.completion(**common, messages=turns, tools=TOOLS, max_tokens=200)
        return holds(second.choices[0].message.content, WEATHER)

    @step(f"two calls of a stream put together by stream_chunk_builder, {provider}", only="scripted")
    def _() -> Any:
        turns = asked("two-cities", "Weather in Oslo and Paris?")
        chunks: Any = litellm.completion(**common, messages=turns, tools=TOOLS, max_tokens=200, stream=True)
        built: Any = litellm.stream_chunk_builder(list(chunks), messages=turns)
        calls = [one.function.arguments for one in built.choices[0].message.tool_calls]
        assert [one.replace(" ", "") for one in calls] == ['{"city":"Oslo"}', '{"city":"Paris"}'], calls
        return calls

    @step(f"tool_choice required, {provider}: a call whose arguments obey the schema")
    def _() -> Any:
        turns = asked("weather", "Weather in Oslo?")
        answer: Any = litellm.completion(
            **common, messages=turns, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100
        )
        return city_of(answer.choices[0].message.tool_calls[0].function.arguments)

    @step(f"response_format of a pydantic model, {provider}")
    def _() -> Any:
        # By the provider anthropic litellm makes a tool of the type for models that it does not know.
        play = "person" if provider == "openai" else "json-tool-call"
        turns = asked(play, "Tell of one person: a name and an age.")
        answer: Any = litellm.completion(
            **common, messages=turns, response_format=Person, temperature=0, max_tokens=200
        )
        found = Person.model_validate_json(answer.choices[0].message.content)
        assert not IS_SCRIPTED or found.model_dump() == PERSON
        return repr(found)

    @step(f"errors, {provider}: BadRequestError, NotFoundError")
    def _() -> Any:
        try:
            litellm.completion(**{**plain, "max_tokens": -1})
            raise AssertionError("taken")
        except litellm.BadRequestError as error:
            seen = str(error)
        try:
            litellm.completion(**{**plain, "model": f"{provider}/another"})
            raise AssertionError("taken")
        except litellm.NotFoundError:
            return seen


for name in PROVIDERS:
    trials(name)


@step("responses")
def _() -> Any:
    answer: Any = litellm.responses(
        **PROVIDERS["openai"], api_key="none", input=MESSAGES[0]["content"], max_output_tokens=48, temperature=0
    )
    return holds(answer.output[-1].content[0].text)


@step("embedding", only="real")
def _() -> Any:
    answer: Any = litellm.embedding(**PROVIDERS["openai"], api_key="none", input=["water", "turbine"])
    assert len(answer.data) == 2
    return f"2 of {len(answer.data[0]['embedding'])} numbers"
