"""A thought before an answer: constraints and stop strings are about the answer, in every format and by every way."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from factories.engine.grammars import EOS, compiled, compiled_around, ids_of, lark
from factories.engine.grammars import accepts as says
from factories.servers import stack
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router
from penstock.common.checkpoint import demo_folder
from penstock.generation.wire.convert import to_constraint
from penstock.router.chat.formats import REASONING, ReasoningFormat
from penstock.v1 import generation_pb2

# Ends as the request says, as templates do that let a model think.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:\n{{ end }}"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
# Names of constraints -> (value, an answer that it allows).
CONSTRAINTS: dict[str, tuple[Any, str]] = {
    "json_schema": (SCHEMA, '{"n": 12}'),
    "json_object": (True, '{"free": [1, null]}'),
    "regex": ("[a-c]{3}-[0-9]+", "abc-77"),
    "choice": (["left", "right"], "right"),
    "grammar": ('start: "x" text\ntext: /[yz]+/', "xyzzy"),
}
WAYS = ("chat", "stream", "responses", "responses stream", "messages", "messages stream")
THOUGHT = 'Perhaps {"n": 1}, or left.\nNo.'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("thinking")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    process = stack.start("tokenizer", "--model", str(folder))
    try:
        stack.wait_serving(process.address, process)
        yield process.address
    finally:
        process.kill()


class Script:
    """Ids of the text that the backend writes."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, _: generation_pb2.GenerateRequest) -> Sequence[int]:
        return self.ids


async def post(gateway: Gateway, path: str, body: dict[str, Any]) -> str:
    """Body of an answer; the request must succeed."""
    request = urllib.request.Request(f"{gateway.url}/{path}", json.dumps({"model": "", **body}).encode())

    def send() -> str:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(send)


@asynccontextmanager
async def serving(
    tokenizer: str, script: Script, reasoning: str, **settings: Any
) -> AsyncIterator[tuple[Gateway, Any]]:
    """Run a gateway before a router before a backend that writes the script."""
    tokens = settings.pop("tokens_per_step", 3)
    async with (
        backend(script=script, tokens_per_step=tokens) as served,
        running_router(served, tokenizer=tokenizer, reasoning_format=reasoning, **settings) as router,
        running_gateway(router.server.address) as gateway,
    ):
        yield gateway, served


def events(text: str) -> list[dict[str, Any]]:
    """Events of a stream with names."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def ask(gateway: Gateway, way: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Ask by one way; return the content and the reasoning of the answer."""
    user = [{"role": "user", "content": "?"}]
    if way in ("chat", "stream"):
        text = await post(gateway, "chat/completions", {"messages": user, **fields, "stream": way == "stream"})
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith(("{", "data: {"))]
        messages = [one.get("message") or one["delta"] for line in lines for one in json.loads(line)["choices"]]
        content, reasoning = ([one.get(key) or "" for one in messages] for key in ("content", "reasoning_content"))
    elif way == "messages stream":
        body = {"max_tokens": 500, "messages": user, "stream": True, **fields}
        deltas = [event.get("delta", {}) for event in events(await post(gateway, "messages", body))]
        content, reasoning = ([one.get(kind, "") for one in deltas] for kind in ("text", "thinking"))
    elif way == "responses stream":
        told = events(await post(gateway, "responses", {"input": "?", "stream": True, **fields}))
        content, reasoning = (
            [event["delta"] for event in told if event["type"] == f"response.{kind}.delta"]
            for kind in ("output_text", "reasoning_text")
        )
    elif way == "messages":
        answer = json.loads(await post(gateway, "messages", {"max_tokens": 500, "messages": user, **fields}))
        content, reasoning = ([one.get(kind, "") for one in answer["content"]] for kind in ("text", "thinking"))
    else:
        items = json.loads(await post(gateway, "responses", {"input": "?", **fields}))["output"]
        content, reasoning = (
            [part["text"] for item in items if item["type"] == kind for part in item["content"]]
            for kind in ("message", "reasoning")
        )
    return "".join(content), "".join(reasoning)


def template_ends(end: str, **more: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": {"end": end}, **more}


def accepts(request: generation_pb2.GenerateRequest, ids: Sequence[int]) -> bool:
    """True when the grammar that the backend gets allows these ids, and the output may end behind them."""
    state = compiled_around(to_constraint(request.constraint), request.thought.grammar).start(EOS)
    return all(state.advance(token_id) for token_id in ids) and state.matcher.is_accepting()


def by_every_way() -> Iterator[Any]:
    """Every format by every way; the ordinary run has each format once, and each way."""
    for number, row in enumerate(REASONING):
        for place, way in enumerate(WAYS):
            marks = [] if number % len(WAYS) == place else [pytest.mark.slow]
            yield pytest.param(row, way, id=f"{row.name}-{way}", marks=marks)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("row", "way"), [*by_every_way()])
async def test_a_constraint_is_about_the_answer(tokenizer: str, row: ReasoningFormat, way: str) -> None:
    script = Script()
    async with serving(tokenizer, script, row.name) as (gateway, served):
        for name, (value, answer) in CONSTRAINTS.items():
            closed = f"{THOUGHT}\n{row.closes}\n\n"
            for end, text in ((row.opens, closed + answer), ("", f"{row.opens}\n{closed}{answer}")):
                script.ids = ids_of(text)
                content, reasoning = await ask(gateway, way, template_ends(f"{end}\n", **{name: value}))
                assert (content, reasoning.strip()) == (answer, THOUGHT), name
                request = served.submitted[-1]
                assert accepts(request, script.ids), name
                assert accepts(request, ids_of(answer)) == (end == ""), name
                assert not accepts(request, ids_of(text.removesuffix(answer) + "Well.")), name
            # A thought that the template has closed is over.
            script.ids = ids_of(answer)
            ended = template_ends(f"{row.opens}\n\n{row.closes}\n\n", **{name: value})
            assert await ask(gateway, way, ended) == (answer, "")
            assert not served.submitted[-1].HasField("thought")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("decode", ["auto", "tokenizer"])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("row", REASONING, ids=lambda row: row.name)
async def test_a_stop_string_is_about_the_answer(
    tokenizer: str, row: ReasoningFormat, tokens: int, decode: str
) -> None:
    script = Script()
    settings = {"detokenize": decode, "tokens_per_step": tokens}
    async with serving(tokenizer, script, row.name, **settings) as (gateway, _):
        for way in WAYS:
            name = "stop_sequences" if way.startswith("messages") else "stop"
            for end, opens in ((row.opens, ""), ("", row.opens)):
                script.ids = ids_of(f"{opens}I may STOP.\n\n{row.closes}\n\nYes. STOP. No.")
                fields = template_ends(f"{end}\n", **{name: ["STOP"]})
                assert await ask(gateway, way, fields) == ("Yes. ", "I may STOP.")
            script.ids = ids_of("Yes. STOP. No.")
            assert await ask(gateway, way, template_ends("", **{name: ["STOP"]})) == ("Yes. ", "")


async def test_a_model_that_names_no_thought_answers_at_once(tokenizer: str) -> None:
    script = Script()
    async with serving(tokenizer, script, "auto") as (gateway, served):
        script.ids = ids_of("left")
        assert await ask(gateway, "chat", template_ends("", choice=["left", "right"])) == ("left", "")
        assert not served.submitted[-1].HasField("thought")


@pytest.mark.parametrize(
    ("reasoning", "end", "may_think"),
    [("auto", "", False), ("think", "", True), ("think", "<think>\n\n</think>\n\n", False), ("none", "", False)],
    ids=["a template without thoughts", "one that lets the model think", "a closed thought", "no format"],
)
async def test_a_forced_call_has_a_thought_only_where_one_may_come(
    tokenizer: str, reasoning: str, end: str, may_think: bool
) -> None:
    """A model without thoughts began one all the same, and its call came late or never."""
    script = Script()
    tool = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    async with serving(tokenizer, script, reasoning) as (gateway, served):
        script.ids = ids_of(call)
        await ask(gateway, "chat", template_ends(end, tools=[tool], tool_choice="required"))
        grammar = compiled(lark(served.submitted[-1].constraint.grammar))
        assert says(grammar, call)
        assert says(grammar, f"<think>\nHm.\n</think>\n\n{call}") is may_think
