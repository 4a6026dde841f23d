"""Text of Generate with byte tokens: nothing of the prompt comes back as answer, wherever ids become text."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from factories.models.tokenizer_folders import byte_fallback_tokenizer, write_folder
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.router import Answer, Router, backend, collect, generate, running_router
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.v1 import common_pb2, config_pb2, text_pb2

TOKENIZER = byte_fallback_tokenizer()
PLACES = ["auto", "tokenizer"]
ECHO = config_pb2.OutputConfig(echo=True)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def run_of(data: bytes) -> list[int]:
    return [int(TOKENIZER.token_to_id(f"<0x{byte:02X}>")) for byte in data]


def from_ids(ids: Sequence[int], output: config_pb2.OutputConfig | None = None) -> text_pb2.GenerateTextRequest:
    return text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=ids), output=output)


@functools.cache
def byte_tokenizer() -> tuple[str, str]:
    """A tokenizer process with byte tokens, shared by the tests of this file: its address and fingerprint."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-byte-tokens-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_folder(folder, TOKENIZER, {"bos_token": "<s>", "eos_token": "</s>"})
    process = stack.start("tokenizer", "--model", str(folder))
    atexit.register(process.kill)
    process.wait_ready()
    return process.address, tokenizer_fingerprint(folder)


@asynccontextmanager
async def running(
    detokenize: str, script: Sequence[int], count: int = 1
) -> AsyncIterator[tuple[Router, list[EmittingBackend], TcpProxy]]:
    """Run a router before `count` backends and that tokenizer, behind a proxy."""
    address, fingerprint = byte_tokenizer()
    async with contextlib.AsyncExitStack() as exits:
        backends = [
            await exits.enter_async_context(backend(script=lambda _: script, fingerprint=fingerprint))
            for _ in range(count)
        ]
        proxy = await exits.enter_async_context(TcpProxy(address))
        settings = {"tokenizer": proxy.address, "detokenize": detokenize, "fingerprint": fingerprint}
        yield await exits.enter_async_context(running_router(*backends, **settings)), backends, proxy


@pytest.mark.parametrize("detokenize", PLACES)
async def test_the_end_of_the_prompt_is_no_answer(detokenize: str) -> None:
    async with running(detokenize, ids_of("x wor\n")) as (router, _, _):
        for prompt in ("def f(x):\n", "鎽龥", "x", "x\n\n", "w wor", "</s>" * 70):
            answer = await collect(router.stub.Generate(generate(prompt)))
            assert answer.text() == " x wor\n"
            echoed = await collect(router.stub.Generate(generate(prompt, output=ECHO)))
            assert echoed.text() == prompt + " x wor\n"


@pytest.mark.parametrize("detokenize", PLACES)
async def test_a_stop_string_at_the_prompts_end_leaves_the_answer(detokenize: str) -> None:
    async with running(detokenize, ids_of("hello")) as (router, backends, _):
        backends[0].finish_reason = common_pb2.FINISH_REASON_LENGTH
        request = generate("world:\n", stop=config_pb2.StopConfig(stop_strings=["\n"]))
        answer = await collect(router.stub.Generate(request))
        assert answer.text() == " hello"
        assert not backends[0].submitted[0].begins_text


@pytest.mark.parametrize("detokenize", PLACES)
async def test_a_character_that_the_answer_completes_is_the_answers(detokenize: str) -> None:
    prompt = [*ids_of("hello"), *run_of("é好".encode()[:-1])]
    async with running(detokenize, [*run_of("好".encode()[-1:]), *ids_of("hello")]) as (router, backends, _):
        assert (await collect(router.stub.Generate(from_ids(prompt)))).text() == "好 hello"
        assert (await collect(router.stub.Generate(from_ids(prompt, ECHO)))).text() == "helloé好 hello"
        backends[0].script = lambda _: ids_of("hello")
        assert (await collect(router.stub.Generate(from_ids(prompt)))).text() == " hello"
        assert (await collect(router.stub.Generate(from_ids(prompt, ECHO)))).text() == "helloé\ufffd\ufffd hello"


async def test_the_prompt_stays_context_when_the_tokenizer_comes_back() -> None:
    script = [*run_of("好好".encode()), *ids_of("hello")]
    async with running("tokenizer", script) as (router, (one,), proxy):
        one.allowance = 1

        async def cut(_: Answer) -> None:
            if one.allowance == 0:
                await proxy.cut()
                await proxy.restore()
                await one.allow(1)

        wanted = config_pb2.OutputConfig(return_token_ids=True)
        answer = await collect(router.stub.Generate(generate("def f(x):\n", output=wanted)), cut)
        assert (answer.text(), answer.ids()) == ("好好 hello", script)
        assert router.metric("tokenizer_reconnects_total") >= len(script) - 1


@pytest.mark.parametrize("detokenize", PLACES)
async def test_the_prompt_stays_context_when_the_backend_dies(detokenize: str) -> None:
    script = [*run_of("好好".encode()), *ids_of("hello")]
    async with running(detokenize, script, count=2) as (router, backends, _):
        for one in backends:
            one.allowance = 2

        async def kill(answer: Answer) -> None:
            if len(answer.ids()) == 2:
                dead = next(one for one in backends if one.running)
                await dead.stop()
                await next(one for one in backends if one is not dead).allow(None)

        wanted = config_pb2.OutputConfig(return_token_ids=True)
        answer = await collect(router.stub.Generate(generate("def f(x):\n", output=wanted)), kill)
        assert (answer.text(), answer.ids()) == ("好好 hello", script)
        assert router.metric("moves_total") == 1
