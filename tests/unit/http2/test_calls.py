"""Calls of one request of the asyncio transport before a server that is only bytes."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest
from factories.wire.http2 import Socket, frames_of, message
from penstock.common.config import ChannelConfig
from penstock.http2 import frames
from penstock.http2.client_calls import CallsConnection

OK = frames.trailers(0, "", ())


class Peer:
    """A server; the test says what it answers."""

    def __init__(self) -> None:
        self.socket = Socket()
        self.connection = CallsConnection(ChannelConfig(max_message_bytes=1 << 16))
        self.connection.connection_made(self.socket)
        self._is_new = True

    async def call(self, request: bytes = b"ask") -> asyncio.Task[bytes]:
        task = asyncio.ensure_future(self.connection.call(frames.request_headers([(":path", "/a/b")]), request))
        await self.turns()
        return task

    async def turns(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    def send(self, data: bytes) -> None:
        if self._is_new and data[3] != frames.SETTINGS:
            data = frames.settings(()) + data
        self._is_new = False
        self.connection.data_received(data)

    def answer(self, stream: int, body: bytes, trailers: bytes = OK) -> None:
        self.send(
            frames.header_frames(stream, frames.RESPONSE_HEADERS, end=False, limit=1 << 14)
            + frames.frame(frames.DATA, 0, stream, body)
            + frames.header_frames(stream, trailers, end=True, limit=1 << 14)
        )

    def received(self, kind: int) -> list[tuple[int, bytes]]:
        found = frames_of(self.socket.written[len(frames.PREFACE) :])
        return [(stream, payload) for one, _, stream, payload in found if one == kind]


async def status_of(task: asyncio.Task[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await task
    return caught.value.code()


async def test_calls_beyond_what_the_peer_takes_wait_for_their_turn() -> None:
    peer = Peer()
    peer.send(frames.settings(((frames.MAX_CONCURRENT_STREAMS, 2),)))
    tasks = [await peer.call() for _ in range(5)]
    assert [stream for stream, _ in peer.received(frames.HEADERS)] == [1, 3]
    tasks[2].cancel()
    peer.answer(1, message(b"one"))
    await peer.turns()
    assert [stream for stream, _ in peer.received(frames.HEADERS)] == [1, 3, 5]
    peer.answer(3, message(b"two"))
    peer.answer(5, message(b"three"))
    await peer.turns()
    peer.answer(7, message(b"four"))
    assert [await tasks[place] for place in (0, 1, 3, 4)] == [b"one", b"two", b"three", b"four"]


async def test_a_peer_that_takes_more_calls_is_given_all_that_wait() -> None:
    peer = Peer()
    peer.send(frames.settings(((frames.MAX_CONCURRENT_STREAMS, 1),)))
    tasks = [await peer.call() for _ in range(6)]
    peer.send(frames.settings(((frames.MAX_CONCURRENT_STREAMS, 4),)))
    await peer.turns()
    assert [stream for stream, _ in peer.received(frames.HEADERS)] == [1, 3, 5, 7]
    peer.connection.close()
    assert {await status_of(task) for task in tasks} == {grpc.StatusCode.UNAVAILABLE}


async def test_settings_that_say_nothing_of_it_allow_any_number_of_calls() -> None:
    peer = Peer()
    tasks = [await peer.call() for _ in range(150)]
    assert len(peer.received(frames.HEADERS)) == 100
    peer.send(frames.settings(()))
    await peer.turns()
    assert len(peer.received(frames.HEADERS)) == 150
    peer.connection.close()
    assert {await status_of(task) for task in tasks} == {grpc.StatusCode.UNAVAILABLE}


async def test_trailers_that_are_too_large_end_their_call_only() -> None:
    peer = Peer()
    first, second = await peer.call(), await peer.call()
    peer.answer(1, message(b"one"), frames.trailers(0, "", (("x", "y" * 20_000),)))
    assert await status_of(first) is grpc.StatusCode.RESOURCE_EXHAUSTED
    peer.answer(3, message(b"two"))
    assert await second == b"two"


async def test_calls_that_leave_in_one_turn_are_one_write() -> None:
    peer = Peer()
    writes: list[Any] = []
    peer.socket.write = writes.append  # type: ignore[method-assign]
    tasks = [asyncio.ensure_future(peer.connection.call(b"", b"ask")) for _ in range(8)]
    await peer.turns()
    assert len(writes) == 1
    peer.connection.close()
    assert {await status_of(task) for task in tasks} == {grpc.StatusCode.UNAVAILABLE}


async def test_a_peer_that_leaves_answers_what_it_has_taken() -> None:
    peer = Peer()
    taken, refused = await peer.call(), await peer.call()
    peer.send(frames.frame(frames.GOAWAY, 0, 0, struct.pack(">II", 1, frames.NO_ERROR)))
    assert await status_of(refused) is grpc.StatusCode.UNAVAILABLE
    assert not peer.connection.is_usable
    peer.answer(1, message(b"last"))
    assert await taken == b"last"
    await peer.turns()
    assert peer.socket.is_closed


async def test_a_request_goes_on_as_the_windows_allow() -> None:
    peer = Peer()
    peer.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 1000),)))
    task = await peer.call(b"x" * 100_000)
    assert sum(len(part) for _, part in peer.received(frames.DATA)) == 1000
    peer.send(frames.window_update(1, 1 << 20))
    await peer.turns()
    assert sum(len(part) for _, part in peer.received(frames.DATA)) == frames.DEFAULT_WINDOW
    peer.send(frames.window_update(0, 1 << 20))
    await peer.turns()
    assert b"".join(part for _, part in peer.received(frames.DATA)) == message(b"x" * 100_000)
    peer.answer(1, message(b"done"))
    assert await task == b"done"


@pytest.mark.parametrize(
    "body", [b"", message(b"one") + message(b"two"), message(b"cut")[:-1], message(b"small", compressed=True)]
)
async def test_an_answer_is_exactly_one_message(body: bytes) -> None:
    peer = Peer()
    task = await peer.call()
    peer.answer(1, body)
    assert await status_of(task) is grpc.StatusCode.INTERNAL
    assert peer.connection.is_usable


async def test_frames_of_a_cancelled_call_are_dropped() -> None:
    peer = Peer()
    task = await peer.call()
    task.cancel()
    await peer.turns()
    assert peer.received(frames.RST_STREAM) == [(1, frames.CANCEL.to_bytes(4, "big"))]
    peer.answer(1, message(b"late"))
    again = await peer.call()
    peer.answer(3, message(b"fresh"))
    assert await again == b"fresh"


async def test_no_more_is_taken_than_was_offered() -> None:
    peer = Peer()
    task = await peer.call()
    part = frames.frame(frames.DATA, 0, 1, b"\0" + (1 << 30).to_bytes(4, "big"))
    peer.send(part)
    assert await status_of(task) is grpc.StatusCode.RESOURCE_EXHAUSTED
    task = await peer.call()
    peer.send(frames.frame(frames.DATA, frames.END_STREAM, 3, message(b"x")))
    assert await status_of(task) is grpc.StatusCode.INTERNAL
    assert peer.socket.is_closed


@pytest.mark.parametrize(
    ("seconds", "text"), [(1e-9, "1u"), (0.25, "250000u"), (120.5, "120500m"), (1e6, "1000000S"), (1e12, "99999999H")]
)
def test_a_timeout_has_at_most_eight_digits(seconds: float, text: str) -> None:
    assert frames.timeout(seconds) == text
