"""The tokenizer goes away and comes back: live streams finish, nothing is lost or said twice."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.plain_server import starting_service
from factories.servers.router import Answer, backend, chat, collect, generate, running_router, tokenizer_address, until
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.errors import from_rpc_error
from penstock.router.tokenizer.tokenizer_link import MAX_TRIES
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig
from penstock.v1 import common_pb2, config_pb2, generation_pb2, text_pb2
from prometheus_client import CollectorRegistry

TOKENS = 40
IDS = list(count_up(TOKENS)(None))  # type: ignore[arg-type]
WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)


async def test_stream_survives_a_tokenizer_that_comes_back() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=proxy.address, detokenize="tokenizer") as router,
    ):

        async def cut(answer: Answer) -> None:
            if one.allowance == 0:
                await proxy.cut()
                await one.allow(None)
                await one.until(lambda: one.running == 0)
                await proxy.restore()

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), cut)
        assert answer.ids() == IDS
        assert answer.text() == await router.decode(IDS)
        assert router.metric("tokenizer_reconnects_total") >= 1


async def test_half_a_character_survives_the_tokenizers_death() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(allowance=1) as one,
        running_router(one, tokenizer=proxy.address, detokenize="tokenizer") as router,
    ):
        pieces = await router.encode("a🦜🦜")
        one.script = lambda _: pieces

        async def cut(answer: Answer) -> None:
            if len(answer.ids()) < len(pieces) and one.allowance == 0:
                await proxy.cut()
                await proxy.restore()
                await one.allow(1)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), cut)
        assert (answer.text(), answer.ids()) == ("a🦜🦜", pieces)


async def test_frozen_tokenizer_is_reconnected() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=proxy.address, detokenize="tokenizer", tokenizer_stall_seconds=0.2) as router,
    ):
        frozen = False

        async def freeze(answer: Answer) -> None:
            nonlocal frozen
            if not frozen:
                frozen = True
                proxy.freeze()
                await one.allow(None)
                await one.until(lambda: one.running == 0)
                await until(lambda: router.metric("tokenizer_reconnects_total") > 0)
                proxy.thaw()

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), freeze)
        assert answer.ids() == IDS


async def test_standby_tokenizer_takes_over() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=(proxy.address, tokenizer_address()), detokenize="tokenizer") as router,
    ):

        async def cut(answer: Answer) -> None:
            if one.allowance == 0:
                await proxy.cut()
                await one.allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), cut)
        assert answer.ids() == IDS


async def test_tokenizer_that_never_returns_ends_begun_streams_aborted_and_new_ones_unavailable() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=proxy.address, detokenize="tokenizer", tokenizer_wait_seconds=0.2) as router,
    ):

        async def cut(_: Answer) -> None:
            await proxy.cut()
            await one.allow(None)

        with pytest.raises(grpc.aio.AioRpcError) as begun:
            await collect(router.stub.Generate(generate()), cut)
        assert begun.value.code() is grpc.StatusCode.ABORTED
        assert "last_seq" in from_rpc_error(begun.value).metadata
        with pytest.raises(grpc.aio.AioRpcError) as fresh:
            await collect(router.stub.Chat(chat()))
        assert fresh.value.code() is grpc.StatusCode.UNAVAILABLE
        await proxy.restore()
        await router.until("tokenizer_up", 1)
        assert (await collect(router.stub.Chat(chat()))).finished


async def test_a_tokenizer_that_starts_is_waited_for_by_streams_and_calls_beyond_the_limit() -> None:
    """The limit is for one that is not there: a start takes as long as it takes."""
    # One connection to it is given up before the limit; that it is asked again tells that the limit has passed.
    times = {"tokenizer_wait_seconds": 3.0, "connect_timeout_seconds": 4.0}
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        starting_service() as starting,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=proxy.address, detokenize="tokenizer", **times) as router,
    ):
        calls: list[asyncio.Future[Answer]] = []

        async def restart(_: Answer) -> None:
            if one.allowance == 0:
                await proxy.cut()
                proxy.lead_to(starting.address)
                await proxy.restore()
                await one.allow(None)
                await router.until("tokenizer_up", 0)
                calls.append(asyncio.ensure_future(collect(router.stub.Chat(chat()))))
                await until(lambda: starting.watches >= 2)
                await proxy.cut()
                proxy.lead_to(tokenizer_address())
                await proxy.restore()

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), restart)
        assert answer.ids() == IDS
        assert (await calls[0]).finished


async def test_calls_wait_for_a_tokenizer_that_drains_until_another_is_there() -> None:
    config, registry = TokenizerConfig(template_processes=1), CollectorRegistry()
    app = TokenizerApp(config, registry)

    def refused() -> float:
        name, labels = "grpc_server_handled_total", {"grpc_method": "ApplyChatTemplate", "grpc_code": "UNAVAILABLE"}
        samples = (sample for family in registry.collect() for sample in family.samples)
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    async with (
        serve_in_process(app, config, registry) as old,
        TcpProxy(old.address) as proxy,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=proxy.address, detokenize="tokenizer") as router,
    ):
        calls: list[asyncio.Future[Any]] = []

        async def replace(_: Answer) -> None:
            if one.allowance == 0 and not calls:
                # The stream keeps it from its end.
                calls.append(asyncio.ensure_future(app.drain()))
                calls.append(asyncio.ensure_future(collect(router.stub.Chat(chat()))))
                await until(lambda: refused() > 2 * MAX_TRIES or calls[1].done())
                await proxy.cut()
                proxy.lead_to(tokenizer_address())
                await proxy.restore()
                await one.allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), replace)
        assert answer.ids() == IDS
        assert (await calls[1]).finished
        await calls[0]


async def test_stream_decoded_by_the_router_ends_without_the_tokenizer() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(script=count_up(TOKENS), allowance=5) as one,
        running_router(one, tokenizer=proxy.address) as router,
    ):

        async def cut(_: Answer) -> None:
            await proxy.cut()
            await router.until("tokenizer_up", 0)
            await one.allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), cut)
        assert answer.ids() == IDS
        await proxy.restore()
        await router.until("tokenizer_up", 1)
        assert answer.text() == await router.decode(IDS)


async def test_id_outside_the_vocabulary_ends_its_stream_alone() -> None:
    def script(request: generation_pb2.GenerateRequest) -> list[int]:
        return [300] if request.config.seed == 1 else [300, 1 << 30, 301]

    # A backend may know more ids than the tokenizer: padded rows of its embedding.
    async with backend(script=script, vocab_size=0) as one, running_router(one) as router:
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await collect(router.stub.Generate(generate()))
        assert broken.value.code() is grpc.StatusCode.INTERNAL
        assert from_rpc_error(broken.value).reason == "DETOKENIZE_FAILED"
        config = config_pb2.GenerationConfig(seed=1)
        assert (await collect(router.stub.Generate(generate(config=config, output=WANT_IDS)))).ids() == [300]


@pytest.mark.parametrize("detokenize", ["auto", "tokenizer"])
async def test_prompt_with_an_id_outside_the_vocabulary_ends_its_stream_alone(detokenize: str) -> None:
    # A backend may know more ids than the tokenizer: padded rows of its embedding.
    broken = text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=[300, 1 << 30]))
    async with (
        backend(script=lambda _: [300], vocab_size=0) as one,
        running_router(one, detokenize=detokenize) as router,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(broken))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert from_rpc_error(caught.value).reason == "DETOKENIZE_FAILED"
        assert (await collect(router.stub.Generate(generate(output=WANT_IDS)))).ids() == [300]
