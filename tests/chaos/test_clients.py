"""Clients that cancel, come late, read slowly or flood, beside a stream that must not notice; nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from factories.chaos.streams import CANARY, TOKENS, Stream

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUNDS = max(1, int(os.environ.get("PENSTOCK_CHAOS_TRIES", "50")) // 10)
CALLS = 16
CONNECTIONS = 150
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def end(writer: asyncio.StreamWriter) -> None:
    """Reset a connection. (Whoever keeps no writer has its connection closed by the garbage collector.)"""
    writer.transport.abort()


async def cancels(chaos: Any, rng: random.Random) -> None:
    """Streams cancelled at random tokens, before the first one, too; what came is how the answer begins."""
    streams = [Stream(chaos.deployment, "seeded", place % 4) for place in range(CALLS)]
    await asyncio.gather(*(one.run(stop_after=rng.randrange(1, TOKENS)) for one in streams))
    for one in streams:
        wanted = await chaos.undisturbed.ids(chaos.deployment, "seeded", one.number)
        assert one.error is None, one.error
        assert one.ids == wanted[: len(one.ids)]


async def deadlines(chaos: Any, rng: random.Random) -> None:
    """Deadlines that some answers keep and some do not."""
    streams = [Stream(chaos.deployment, "greedy", place % 4) for place in range(CALLS)]
    await asyncio.gather(*(one.run(timeout=rng.choice((0.05, 0.3, 1.0, 60.0))) for one in streams))
    for one in streams:
        wanted = await chaos.undisturbed.ids(chaos.deployment, "greedy", one.number)
        assert one.ids == wanted[: len(one.ids)]
        if one.error is None:
            assert one.ids == wanted
        else:
            assert one.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, one.error


async def slow_readers(chaos: Any, rng: random.Random) -> None:
    """Readers that stop for a while at a random token get everything, merged."""

    async def read(place: int) -> None:
        moment = rng.randrange(TOKENS // 2)
        paused = False

        async def pause(one: Stream) -> None:
            nonlocal paused
            if not paused and len(one.ids) >= moment:
                paused = True
                await asyncio.sleep(rng.random() * 2)

        stream = await Stream(chaos.deployment, "greedy", place % 4).run(pause)
        assert stream.error is None, stream.error
        assert stream.ids == await chaos.undisturbed.ids(chaos.deployment, "greedy", place % 4)

    await asyncio.gather(*(read(place) for place in range(CALLS // 2)))


async def flood(chaos: Any, rng: random.Random) -> None:
    """Connections that say nothing, half a preface, or garbage with a prompt's words in it."""
    host, _, port = chaos.deployment.router.address.rpartition(":")
    words = (b"", PREFACE[:9], PREFACE + SETTINGS, PREFACE + SETTINGS + CANARY.encode(), b"GET / HTTP/1.1\r\n\r\n")
    async with contextlib.AsyncExitStack() as exits:
        for _ in range(CONNECTIONS):
            _, writer = await asyncio.open_connection(host, int(port))
            exits.callback(end, writer)
            writer.write(rng.choice(words))
        stream = await Stream(chaos.deployment, "greedy", 1).run()
    assert stream.error is None, stream.error
    assert stream.ids == await chaos.undisturbed.ids(chaos.deployment, "greedy", 1)


DEEDS: tuple[Callable[[Any, random.Random], Awaitable[None]], ...] = (cancels, deadlines, slow_readers, flood)


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.chaos] if number else []) for number in range(ROUNDS)]
)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: str(deed.__name__))
async def test_a_stream_does_not_notice_what_clients_do_beside_it(
    chaos: Any, deed: Callable[[Any, random.Random], Awaitable[None]], number: int
) -> None:
    rng = random.Random(f"{deed.__name__} {number}")
    beside = asyncio.ensure_future(Stream(chaos.deployment, "seeded", 3).run())
    await deed(chaos, rng)
    stream = await beside
    assert stream.error is None, stream.error
    assert stream.ids == await chaos.undisturbed.ids(chaos.deployment, "seeded", 3)
    await chaos.invariants.hold()


@pytest.mark.chaos
async def test_a_rolling_restart_under_load_fails_no_request(chaos: Any) -> None:
    """One backend after the other gets SIGTERM while streams come and go."""
    deployment, over = chaos.deployment, asyncio.Event()

    async def work(place: int) -> int:
        streams = 0
        while not over.is_set():
            stream = await Stream(deployment, "greedy", place % 4).run()
            assert stream.error is None, stream.error
            assert stream.ids == await chaos.undisturbed.ids(deployment, "greedy", place % 4)
            streams += 1
        return streams

    clients = [asyncio.ensure_future(work(place)) for place in range(4)]
    for backend in deployment.backends:
        backend.send(signal.SIGTERM)
        await backend.mend(exit_code=0)
        await deployment.until_whole()
    over.set()
    assert all(await asyncio.gather(*clients))
    await chaos.invariants.hold()


async def test_the_invariants_find_what_is_wrong(chaos: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was never counted, an answer that changed, a prompt in an error, a leak: each is found."""
    monkeypatch.setattr("factories.chaos.invariants.PATIENCE_SECONDS", 1.0)
    deployment, checker = chaos.deployment, chaos.invariants
    deployment.calls += 1
    with pytest.raises(AssertionError, match="calls the router began"):
        await checker.hold()
    deployment.calls -= 1
    deployment.told.append(f"cannot read {CANARY!r}")
    with pytest.raises(AssertionError, match="error's details tells a prompt"):
        await checker.hold()
    deployment.told.clear()
    deployment.backends[0].past_output = '{"exception": "AttributeError: no such thing", "event": "step failed"}'
    with pytest.raises(AssertionError, match="generation 0 before has an error that no fault ordered"):
        await checker.hold()
    deployment.backends[0].past_output = ""
    ids = await chaos.undisturbed.ids(deployment, "greedy")
    ids[-1] += 1
    with pytest.raises(AssertionError, match="canary's ids"):
        await checker.hold()
    ids[-1] -= 1
    host, _, port = deployment.tokenizer.address.rpartition(":")
    async with contextlib.AsyncExitStack() as exits:
        for _ in range(8):
            _, writer = await asyncio.open_connection(host, int(port))
            exits.callback(end, writer)
        with pytest.raises(AssertionError, match=r"tokenizer has .* descriptors"):
            await checker.hold()
    monkeypatch.undo()
    await checker.hold()
