"""Answers of many messages on the asyncio transport: read as they come, held up for a reader that is behind."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from factories.wire.http2 import Socket, frames_of, message
from penstock.common.config import ChannelConfig
from penstock.http2 import frames
from penstock.http2.channel import Answers
from penstock.http2.client_calls import AnswerStream, CallsConnection

WINDOW = 1 << 16
OK = frames.trailers(0, "", ())
HEAD = frames.header_frames(1, frames.RESPONSE_HEADERS, end=False, limit=1 << 14)


class Peer:
    """A server, whose client has made one call of it."""

    def __init__(self) -> None:
        self.socket = Socket()
        self.connection = CallsConnection(ChannelConfig(max_message_bytes=1 << 20), stream_window=WINDOW)
        self.connection.connection_made(self.socket)
        self.connection.data_received(frames.settings(()))

    def answers(self, *, seconds: float | None = None) -> Answers[bytes]:
        """The answers of a call, as bytes."""
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

        async def begin() -> AnswerStream:
            return await self.connection.stream(b"", b"ask", deadline)

        return Answers(lambda: None, begin, bytes, deadline)

    def send(self, *parts: bytes) -> None:
        """Answer with frames, which arrive together."""
        self.connection.data_received(b"".join(parts))

    def received(self, kind: int) -> list[tuple[int, bytes]]:
        """Stream and payload of the frames of a kind."""
        found = frames_of(self.socket.written[len(frames.PREFACE) :])
        return [(stream, payload) for one, _, stream, payload in found if one == kind]

    def offered(self) -> int:
        """Bytes of the answer that were given back so far."""
        updates = self.received(frames.WINDOW_UPDATE)
        return sum(int.from_bytes(payload, "big") for stream, payload in updates if stream == 1)


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def begun(peer: Peer, answers: Answers[bytes]) -> asyncio.Future[list[bytes]]:
    """The first read, which waits for an answer."""
    reading = asyncio.ensure_future(answers.read_all())
    await turns()
    peer.send(HEAD)
    return reading


async def test_messages_that_wait_are_read_together_and_none_is_the_end() -> None:
    peer = Peer()
    answers = peer.answers()
    reading = await begun(peer, answers)
    peer.send(frames.message_frame(1, b"one"))
    assert await reading == [b"one"]
    # Frames and messages do not begin together.
    both = message(b"two") + message(b"three")
    peer.send(frames.frame(frames.DATA, 0, 1, both[:6]), frames.frame(frames.DATA, 0, 1, both[6:]))
    peer.send(frames.message_frame(1, b"four"), frames.header_frames(1, OK, end=True, limit=1 << 14))
    assert await answers.read_all() == [b"two", b"three", b"four"]
    assert await answers.read_all() == []


async def test_iteration_is_one_message_at_a_time() -> None:
    peer = Peer()
    answers = peer.answers()
    first = asyncio.ensure_future(anext(answers))
    await turns()
    peer.send(HEAD, frames.message_frame(1, b"one"), frames.message_frame(1, b"two"))
    peer.send(frames.header_frames(1, frames.trailers(9, "broken", ()), end=True, limit=1 << 14))
    assert [await first, await anext(answers)] == [b"one", b"two"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(answers)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_peer_is_held_up_while_its_reader_is_behind() -> None:
    peer = Peer()
    answers = peer.answers()
    reading = await begun(peer, answers)
    part = frames.message_frame(1, b"x" * 1000)
    peer.send(part)
    assert await reading == [b"x" * 1000]
    for _ in range(WINDOW // 1005 - 1):
        peer.send(part)
    await turns()
    behind = peer.offered()
    assert behind <= WINDOW // 2 + 1005
    assert len(await answers.read_all()) == WINDOW // 1005 - 1
    await turns()
    assert behind < peer.offered() <= WINDOW


async def test_a_small_message_that_waits_counts_with_the_memory_it_takes() -> None:
    peer = Peer()
    answers = peer.answers()
    reading = await begun(peer, answers)
    part, count = frames.message_frame(1, b"x"), WINDOW // 60
    peer.send(part * count)
    assert len(await reading) == count
    peer.send(part * count)
    await turns()
    assert peer.offered() == 0
    assert len(await answers.read_all()) == count


async def test_more_than_the_window_ends_the_connection() -> None:
    peer = Peer()
    answers = peer.answers()
    reading = await begun(peer, answers)
    peer.send(frames.message_frame(1, b"x" * 1000) * (2 * WINDOW // 1005))
    assert await reading
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers.read_all()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert peer.socket.is_closed


async def test_a_message_larger_than_the_window_comes_through() -> None:
    peer = Peer()
    answers = peer.answers()
    reading = await begun(peer, answers)
    whole = message(b"y" * (5 * WINDOW))
    for at in range(0, len(whole), 16_000):
        peer.send(frames.frame(frames.DATA, 0, 1, whole[at : at + 16_000]))
        await turns()
    assert await reading == [b"y" * (5 * WINDOW)]


async def test_a_deadline_ends_the_call_at_the_peer_after_what_has_come() -> None:
    peer = Peer()
    answers = peer.answers(seconds=0.05)
    reading = await begun(peer, answers)
    peer.send(frames.message_frame(1, b"one"))
    assert await reading == [b"one"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers.read_all()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await turns()
    assert peer.received(frames.RST_STREAM) == [(1, frames.CANCEL.to_bytes(4, "big"))]


async def test_a_reader_that_is_cancelled_cancels_the_call() -> None:
    peer = Peer()
    reading = await begun(peer, peer.answers())
    reading.cancel()
    await turns()
    assert peer.received(frames.RST_STREAM) == [(1, frames.CANCEL.to_bytes(4, "big"))]


async def test_messages_are_handed_on_in_the_turn_they_come_in_until_the_end() -> None:
    peer, taken = Peer(), list[list[bytes]]()
    answers = peer.answers()

    def take(messages: list[bytes]) -> bool:
        taken.append(messages)
        return True

    running = asyncio.ensure_future(answers.run(take))
    await turns()
    peer.send(HEAD, frames.message_frame(1, b"one"), frames.message_frame(1, b"two"))
    assert taken == [[b"one", b"two"]]
    peer.send(frames.message_frame(1, b"three"))
    assert taken[1:] == [[b"three"]]
    peer.send(frames.message_frame(1, b"four"), frames.header_frames(1, OK, end=True, limit=1 << 14))
    assert taken[2:] == [[b"four"]]
    assert await running


async def test_a_receiver_that_takes_no_more_is_handed_the_rest_when_it_runs_again() -> None:
    peer, taken = Peer(), list[list[bytes]]()
    answers = peer.answers()

    def take(messages: list[bytes]) -> bool:
        taken.append(messages)
        return len(taken) != 1

    running = asyncio.ensure_future(answers.run(take))
    await turns()
    peer.send(HEAD, frames.message_frame(1, b"one"))
    peer.send(frames.message_frame(1, b"two"))
    assert not await running
    peer.send(frames.message_frame(1, b"three"), frames.header_frames(1, OK, end=True, limit=1 << 14))
    assert taken == [[b"one"]]
    assert await answers.run(take)
    assert taken == [[b"one"], [b"two", b"three"]]


async def test_errors_of_the_receiver_and_of_the_call_end_the_run() -> None:
    peer = Peer()
    answers = peer.answers()

    def fail(messages: list[bytes]) -> bool:
        raise LookupError

    running = asyncio.ensure_future(answers.run(fail))
    await turns()
    peer.send(HEAD, frames.message_frame(1, b"one"))
    with pytest.raises(LookupError):
        await running
    running = asyncio.ensure_future(answers.run(lambda messages: True))
    await turns()
    peer.send(frames.header_frames(1, frames.trailers(9, "broken", ()), end=True, limit=1 << 14))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_run_that_is_cancelled_cancels_the_call() -> None:
    peer, taken = Peer(), list[list[bytes]]()
    answers = peer.answers()
    running = asyncio.ensure_future(answers.run(lambda messages: bool(taken.append(messages)) or True))
    await turns()
    peer.send(HEAD)
    running.cancel()
    await turns()
    peer.send(frames.message_frame(1, b"late"))
    assert not taken
    assert peer.received(frames.RST_STREAM) == [(1, frames.CANCEL.to_bytes(4, "big"))]
