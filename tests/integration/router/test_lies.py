"""Backends that lie: no answer that ends with OK is false, and an honest backend goes on where the liar was caught."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.held_backend import IDS as HELD_IDS
from factories.servers.held_backend import WANT_IDS, held, status_of, stop_after
from factories.servers.lying_backend import EOS, IDS, LIES, TOKENS, Lie
from factories.servers.router import backend, collect, generate, running_router, tokenizer_fingerprint
from factories.wire.tcp_proxy import TcpProxy
from penstock.http2 import frames
from penstock.v1 import common_pb2


def test_there_are_enough_of_them() -> None:
    assert len({lie.name for lie in LIES}) == len(LIES) >= 46


def on_both_transports() -> Iterator[Any]:
    """Every lie on either transport; of those on grpc.aio, which is not the default, the ordinary run has a sixth."""
    for place, lie in enumerate(LIES):
        yield pytest.param(lie, "asyncio", id=f"{lie.name}-asyncio")
        marks = [pytest.mark.slow] if place % 6 else []
        yield pytest.param(lie, "grpc", id=f"{lie.name}-grpc", marks=marks)


@pytest.mark.parametrize(("lie", "transport"), [*on_both_transports()])
async def test_no_lie_ends_with_ok(lie: Lie, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    honest = backend(script=count_up(TOKENS), eos_token_ids=(EOS,), extra_load=100)
    async with lie.backend(fingerprint=tokenizer_fingerprint()) as liar, honest, running_router(liar, honest) as router:
        options = lie.options()
        call = router.stub.Generate(generate(**options))
        if lie.is_fatal:
            code, error = await status_of(call)
            assert (code, error.reason) == (grpc.StatusCode.INTERNAL, "BACKEND_PROTOCOL")
            return
        answer = await collect(call)
        ids = list(IDS)[: options["config"].max_new_tokens]
        assert answer.ids() == ids
        assert answer.text() == await router.decode(ids)
        for result in answer.finished.sequences:
            assert result.token_count == len(ids)
            assert result.finish_reason in (common_pb2.FINISH_REASON_STOP_EOS, common_pb2.FINISH_REASON_LENGTH)
        usage = answer.finished.usage
        assert usage.completion_tokens == len(ids) * len(answer.finished.sequences)
        assert usage.cached_tokens <= usage.prompt_tokens < 100
        assert answer.finished.attempts == 1 + (not lie.is_harmless)
        assert len(liar.submitted) == 1
        is_caught = not lie.is_harmless and lie.raw is None
        assert router.metric("backend_ejections_total", backend=liar.address, cause="protocol") == is_caught


def pair(**knobs: Any) -> tuple[EmittingBackend, EmittingBackend]:
    """Make a backend that gets the first request, and one that takes over."""
    one = held(**{"allowance": 5, **knobs})
    return one, held(allowance=None, extra_load=100)


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_trailers_that_come_early_are_no_end(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    one, two = pair()
    async with one, two, running_router(one, two) as router:
        call = router.stub.Generate(generate(output=WANT_IDS))
        answer = await collect(call, stop_after(5, one.end_sessions))
        assert (answer.ids(), answer.finished.attempts) == (HELD_IDS, 2)


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
@pytest.mark.parametrize(
    "data",
    [
        frames.frame(frames.DATA, 0, 9999, bytes(5)),
        frames.frame(frames.DATA, 0, 2, bytes(5)),
        frames.frame(frames.HEADERS, 4, 0, b"\x88"),
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
    ids=["a stream that nobody opened", "a stream of the server's", "headers of no stream", "another protocol"],
)
async def test_frames_of_other_streams_change_no_answer(
    data: bytes, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    one, two = pair()
    async with one, two, TcpProxy(one.address) as proxy:

        async def inject() -> None:
            proxy.inject(data)
            await one.allow(None)

        async with running_router(backend=(proxy.address, two.address)) as router:
            call = router.stub.Generate(generate(output=WANT_IDS))
            # A frame of a stream that is no more may be ignored; what breaks the connection moves the request.
            answer = await collect(call, stop_after(5, inject))
            assert answer.ids() == HELD_IDS


async def test_a_request_that_is_forgotten_goes_elsewhere_though_its_backend_is_busy() -> None:
    one, two = pair(allowance=None, step_seconds=0.01)
    one.script = count_up(100_000)
    async with one, two, running_router(one, two, stall_timeout_seconds=0.8) as router:
        busy = asyncio.ensure_future(collect(router.stub.Generate(generate())))
        await one.until(lambda: one.steps > 5)
        one.forgets = True
        answer = await collect(router.stub.Generate(generate("another", output=WANT_IDS)))
        assert (answer.ids(), answer.finished.attempts) == (HELD_IDS, 2)
        assert one.running == 1
        assert router.metric("backend_losses_total", backend=one.address) == 0
        busy.cancel()
