"""pydantic-ai, unmodified: agents with tools and typed answers, over chats, responses and Anthropic's messages."""

from __future__ import annotations

from typing import Any

from plays import PERSON, WEATHER
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from trial import IS_SCRIPTED, MODEL, QUESTION, URL, holds, step

openai_provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS: dict[str, Any] = {
    "OpenAIChatModel": lambda: OpenAIChatModel(MODEL, provider=openai_provider),
    "OpenAIResponsesModel": lambda: OpenAIResponsesModel(MODEL, provider=openai_provider),
    "AnthropicModel": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}
SETTINGS: Any = {"temperature": 0, "max_tokens": 200}


class Weather(BaseModel):
    """Weather of a city."""

    city: str
    is_wet: bool


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


def trials(name: str) -> None:
    """All steps over one model."""
    model = MODELS[name]()

    @step(f"{name}: an agent's answer")
    async def _() -> Any:
        agent = Agent(model, instructions="Be brief.", model_settings=SETTINGS)
        return holds((await agent.run(QUESTION)).output)

    @step(f"{name}: run_stream")
    async def _() -> Any:
        async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        return holds(text)

    def with_weather(seen: list[str], **options: Any) -> Any:
        agent: Any = Agent(model, model_settings=SETTINGS, **options)

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Tell the weather of a city."""
            seen.append(city)
            return "rain"

        return agent

    @step(f"{name}: the tool is called, its result answered", only="scripted")
    async def _() -> Any:
        seen: list[str] = []
        answer = await with_weather(seen).run("[play:weather] Weather in Oslo?")
        assert seen == ["Oslo"], seen
        return holds(answer.output, WEATHER)

    @step(f"{name}: a tool, then a typed answer by pydantic-ai's own tool", only="scripted")
    async def _() -> Any:
        seen: list[str] = []
        answer = await with_weather(seen, output_type=Weather).run("[play:weather-report] Weather in Oslo?")
        assert answer.output == Weather(city="Oslo", is_wet=True)
        assert seen == ["Oslo"], seen
        return repr(answer.output)

    @step(f"{name}: a typed answer by its own tool, which is forced", only="real")
    async def _() -> Any:
        agent = Agent(model, output_type=Person, model_settings=SETTINGS)
        answer = await agent.run("Tell of one person.", usage_limits=UsageLimits(request_limit=4))
        return repr(answer.output)

    if name == "AnthropicModel":
        # It asks for typed answers of models by their names alone that it knows.
        return

    @step(f"{name}: a typed answer by the server (NativeOutput)")
    async def _() -> Any:
        agent = Agent(model, output_type=NativeOutput(Person), model_settings=SETTINGS)
        answer = await agent.run("[play:person] Tell of one person: a name and an age.")
        assert not IS_SCRIPTED or answer.output.model_dump() == PERSON
        return repr(answer.output)


for chosen in MODELS:
    trials(chosen)
