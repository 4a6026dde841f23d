"""langchain, unmodified: chat models of langchain-openai and langchain-anthropic, and agents made of them."""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from plays import PERSON, WEATHER
from pydantic import BaseModel, SecretStr
from trial import IS_SCRIPTED, MODEL, QUESTION, URL, asked, city_of, holds, step

CHATS: dict[str, Any] = {
    "ChatOpenAI": lambda: ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        max_completion_tokens=200,
    ),
    "ChatOpenAI by responses": lambda: ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        max_completion_tokens=200,
        use_responses_api=True,
    ),
    "ChatAnthropic": lambda: ChatAnthropic(
        model_name=MODEL,
        base_url=URL,
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        max_tokens_to_sample=200,
        timeout=300,
        stop=None,
    ),
}
seen_cities: list[str] = []


@tool
def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Tell the weather of a city."""
    seen_cities.append(city)
    return "rain"


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


def text_of(message: Any) -> str:
    """Text of a message, whatever its blocks are."""
    return (
        message.content
        if isinstance(message.content, str)
        else "".join(one.get("text", "") for one in message.content if isinstance(one, dict))
    )


def trials(name: str) -> None:
    """All steps of one chat model."""
    chat = CHATS[name]()

    @step(f"{name}.invoke and .stream: the same text")
    def _() -> Any:
        whole = chat.invoke(QUESTION)
        pieces = [text_of(chunk) for chunk in chat.stream(QUESTION)]
        assert "".join(pieces) == text_of(whole)
        assert whole.usage_metadata["output_tokens"] > 0
        return holds(text_of(whole))

    @step(f"{name}.bind_tools, a call that is forced")
    def _() -> Any:
        bound = chat.bind_tools([get_weather], tool_choice="any")
        return city_of(bound.invoke(asked("weather", "Weather in Oslo?")).tool_calls[0]["args"])

    @step(f"create_agent on {name}: the tool is called, its result answered", only="scripted")
    def _() -> Any:
        seen_cities.clear()
        agent: Any = create_agent(chat, [get_weather], system_prompt="Help.")
        answer = agent.invoke({"messages": asked("weather", "Weather in Oslo?")})
        assert seen_cities == ["Oslo"], seen_cities
        return holds(text_of(answer["messages"][-1]), WEATHER)

    @step(f"create_agent on {name}, streamed")
    def _() -> Any:
        agent: Any = create_agent(chat, [get_weather])
        kinds = [
            type(message).__name__
            for message, _ in agent.stream({"messages": asked("weather", "Weather?")}, stream_mode="messages")
        ]
        assert "AIMessageChunk" in kinds, kinds
        assert not IS_SCRIPTED or "ToolMessage" in kinds, kinds
        return f"{len(kinds)} messages"

    @step(f"{name}.with_structured_output")
    def _() -> Any:
        play = "person-call" if name == "ChatAnthropic" else "person"
        found: Any = chat.with_structured_output(Person).invoke(asked(play, "Tell of one person: a name and an age."))
        assert isinstance(found, Person), found
        assert not IS_SCRIPTED or found.model_dump() == PERSON
        return repr(found)


for chosen in CHATS:
    trials(chosen)


@step("OpenAIEmbeddings", only="real")
def _() -> Any:
    # Else it would count tokens by a list that it gets from the internet, and send ids of another model's tokenizer.
    made = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    found = made.embed_documents(["water", "turbine"])
    assert len(found) == 2
    return f"2 of {len(found[0])} numbers"
