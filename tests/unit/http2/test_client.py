"""The stream client of the asyncio transport before a server that is only bytes: what it sends, and what it takes."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest
from factories.wire.http2 import Peer as Reader
from factories.wire.http2 import Socket, frames_of, message
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.config import ChannelConfig
from penstock.http2 import frames, server_connection
from penstock.http2.client_stream import END, ClientStreamCall
from penstock.http2.one_write import flushed_together
from penstock.v1 import generation_pb2
from penstock.v1.generation_pb2 import SessionEvent, SessionRequest, SessionResponse

LIMIT = 1 << 16


class Peer:
    """A server; the test says what it answers."""

    def __init__(self, *, joins: bool = False) -> None:
        self.socket = Socket()
        config = ChannelConfig(max_message_bytes=LIMIT)
        self.call: ClientStreamCall[SessionResponse] = ClientStreamCall(
            frames.request_headers([(":path", "/a/b")]), SessionResponse.FromString, config, joins=joins
        )
        self.call.connection_made(self.socket)
        self.send(frames.settings(()))

    def send(self, data: bytes) -> None:
        self.call.data_received(data)

    def data(self, payload: bytes) -> None:
        for at in range(0, len(payload), frames.DEFAULT_FRAME_SIZE):
            self.send(frames.frame(frames.DATA, 0, 1, payload[at : at + frames.DEFAULT_FRAME_SIZE]))

    def headers(self, *fields: tuple[str, str], end: bool = True, parts: int = 1) -> None:
        block = Encoder().encode(list(fields))
        size = -(-len(block) // parts)
        self.send(frames.header_frames(1, block, end=end, limit=size))

    def window(self, more: int) -> None:
        self.send(frames.window_update(0, more) + frames.window_update(1, more))

    def received(self, kind: int) -> list[bytes]:
        return [
            payload for found, _, _, payload in frames_of(self.socket.written[len(frames.PREFACE) :]) if found == kind
        ]


def step(number: int, size: int = 0) -> SessionResponse:
    return SessionResponse(step=number, events=[SessionEvent(request_id="x" * size)])


def events_of(message: Any) -> list[str]:
    return [event.request_id for event in message.events]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=12), st.lists(st.integers(1, 9000), min_size=1), st.booleans())
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    sizes: list[int], cuts: list[int], joins: bool
) -> None:
    async def run() -> None:
        peer = Peer(joins=joins)
        sent = b"".join(message(step(place, size).SerializeToString()) for place, size in enumerate(sizes))
        framed = b""
        for place, cut in enumerate(cuts):
            framed += frames.frame(frames.DATA, 0, 1, sent[:cut])
            sent = sent[cut:]
            if place % 2:
                peer.send(framed[: cut // 2])
                framed = framed[cut // 2 :]
        framed += b"".join(
            frames.frame(frames.DATA, 0, 1, sent[at : at + 16_384]) for at in range(0, len(sent), 16_384)
        )
        peer.send(framed)
        peer.headers(("grpc-status", "0"))
        found: list[str] = []
        while (read := await peer.call.read()) is not END:
            found += events_of(read)
        assert [len(one) for one in found] == sizes

    asyncio.run(run())


async def test_messages_that_wait_are_read_as_one_where_they_may_be() -> None:
    peer = Peer(joins=True)
    peer.data(b"".join(message(step(place, place).SerializeToString()) for place in range(5)))
    read: Any = await peer.call.read()
    assert ([len(one) for one in events_of(read)], read.step) == ([0, 1, 2, 3, 4], 4)


async def test_the_status_of_the_call_is_raised_after_what_came_before_it() -> None:
    peer = Peer()
    peer.data(message(step(1).SerializeToString()))
    peer.headers((":status", "200"), end=False)
    peer.headers(("grpc-status", "14"), ("grpc-message", "gone%20away"), ("x-bin", "AAE"), parts=3)
    assert events_of(await peer.call.read()) == [""]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "gone away")
    assert dict(caught.value.trailing_metadata())["x-bin"] == b"\x00\x01"
    with pytest.raises(asyncio.InvalidStateError):
        await peer.call.write(SessionRequest())


async def test_a_write_waits_for_the_window_and_goes_on_in_parts() -> None:
    peer = Peer()
    request = SessionRequest(abort=generation_pb2.SessionAbort(request_id="x" * 100_000))
    writing = asyncio.ensure_future(peer.call.write(request))
    await asyncio.sleep(0)
    assert sum(map(len, peer.received(frames.DATA))) == frames.DEFAULT_WINDOW
    assert not writing.done()
    peer.window(1 << 20)
    await writing
    whole = b"".join(peer.received(frames.DATA))
    assert SessionRequest.FromString(whole[frames.MESSAGE_HEAD :]) == request


async def test_a_smaller_initial_window_counts_against_what_was_sent() -> None:
    peer = Peer()
    await peer.call.write(SessionRequest(abort=generation_pb2.SessionAbort(request_id="x" * 1000)))
    peer.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 100),)))
    writing = asyncio.ensure_future(peer.call.write(SessionRequest()))
    await asyncio.sleep(0)
    assert not writing.done()
    peer.window(2000)
    await writing


async def test_windows_are_given_back_only_while_the_reader_keeps_up() -> None:
    peer = Peer()
    sent = message(step(1, 10_000).SerializeToString())
    for _ in range(80):
        peer.data(sent)
    held = [int.from_bytes(one, "big") for one in peer.received(frames.WINDOW_UPDATE)[1:]]
    assert sum(held) < 2 * 80 * len(sent)
    for _ in range(80):
        await peer.call.read()
    given = [int.from_bytes(one, "big") for one in peer.received(frames.WINDOW_UPDATE)[1:]]
    assert sum(given) > sum(held)
    for _ in range(300):
        peer.data(sent)
    assert peer.socket.is_closed, "it sent more than its window"


@pytest.mark.parametrize(
    ("misbehaviour", "code"),
    [
        (frames.frame(frames.DATA, 0, 1, bytes(20_000)), grpc.StatusCode.INTERNAL),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), grpc.StatusCode.INTERNAL),
        (
            frames.frame(frames.HEADERS, 0, 1, b"\x83") + frames.frame(frames.PING, 0, 0, bytes(8)),
            grpc.StatusCode.INTERNAL,
        ),
        (frames.frame(frames.CONTINUATION, 0, 1, b"\x83"), grpc.StatusCode.INTERNAL),
        (frames.frame(frames.DATA, frames.PADDED, 1, b"\x09x"), grpc.StatusCode.INTERNAL),
        (frames.frame(frames.DATA, 0, 1, message(b"x", compressed=True)), grpc.StatusCode.INTERNAL),
        (frames.frame(frames.DATA, frames.END_STREAM, 1, b""), grpc.StatusCode.INTERNAL),
        (frames.frame(frames.DATA, 0, 1, message(bytes(LIMIT + 1))[:100]), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (frames.frame(frames.RST_STREAM, 0, 1, b"\x00\x00\x00\x07"), grpc.StatusCode.UNAVAILABLE),
        (frames.frame(frames.GOAWAY, 0, 0, bytes(8)), grpc.StatusCode.UNAVAILABLE),
        (frames.frame(frames.PUSH_PROMISE, 0, 1, bytes(8)), grpc.StatusCode.INTERNAL),
        (frames.window_update(0, frames.MAX_WINDOW), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_server_that_breaks_off_ends_the_call(misbehaviour: bytes, code: grpc.StatusCode) -> None:
    peer = Peer()
    reading = asyncio.ensure_future(peer.call.read())
    await asyncio.sleep(0)
    peer.send(misbehaviour)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() is code
    assert peer.socket.is_closed


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("503", grpc.StatusCode.UNAVAILABLE),
        ("404", grpc.StatusCode.UNIMPLEMENTED),
        ("401", grpc.StatusCode.UNAUTHENTICATED),
        ("500", grpc.StatusCode.UNKNOWN),
    ],
)
@pytest.mark.parametrize("end", [True, False])
async def test_an_answer_that_is_none_of_grpcs_has_its_status(status: str, code: grpc.StatusCode, end: bool) -> None:
    peer = Peer()
    peer.headers((":status", "103"), end=False)
    assert not peer.socket.is_closed
    peer.headers((":status", status), end=end)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.call.read()
    assert caught.value.code() is code


async def test_half_a_message_is_followed_by_nothing() -> None:
    peer = Peer()
    large = SessionRequest(abort=generation_pb2.SessionAbort(request_id="x" * 100_000))
    writing = asyncio.ensure_future(peer.call.write(large))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    peer.window(1 << 20)
    with pytest.raises(asyncio.InvalidStateError):
        await peer.call.write(SessionRequest())


@pytest.mark.parametrize("unread", [0, 1])
async def test_the_end_of_a_call_does_not_wait_for_a_peer_that_does_not_read(unread: int) -> None:
    peer = Peer()
    peer.socket.unread = unread - len(frames.frame(frames.RST_STREAM, 0, 1, bytes(4)))
    peer.call.cancel()
    assert (peer.socket.is_closed, peer.socket.is_aborted) == (True, bool(unread))


async def test_a_goaway_after_this_call_leaves_it_alone() -> None:
    peer = Peer()
    peer.send(frames.frame(frames.GOAWAY, 0, 0, b"\x00\x00\x00\x01" + bytes(4)))
    peer.data(message(step(1).SerializeToString()))
    assert events_of(await peer.call.read()) == [""]


async def test_a_lost_connection_ends_reads_and_writes_that_wait() -> None:
    peer = Peer()
    reading = asyncio.ensure_future(peer.call.read())
    large = SessionRequest(abort=generation_pb2.SessionAbort(request_id="x" * 100_000))
    writing = asyncio.ensure_future(peer.call.write(large))
    await asyncio.sleep(0)
    peer.call.connection_lost(None)
    with pytest.raises(grpc.aio.AioRpcError):
        await reading
    with pytest.raises(asyncio.InvalidStateError):
        await writing


async def test_a_message_that_is_none_is_read_as_none() -> None:
    peer = Peer()
    peer.data(message(b"\xff\xff"))
    assert await peer.call.read() is None


async def test_pings_and_settings_are_acknowledged_and_cancelling_resets() -> None:
    peer = Peer()
    peer.send(frames.frame(frames.PING, 0, 0, b"12345678"))
    assert peer.received(frames.PING) == [b"12345678"]
    assert peer.received(frames.SETTINGS)[1:] == [b""]
    peer.call.cancel()
    assert peer.received(frames.RST_STREAM) == [frames.CANCEL.to_bytes(4, "big")]
    assert peer.socket.is_closed


async def test_messages_are_handed_on_as_they_arrive_and_the_status_behind_them() -> None:
    peer, taken = Peer(), []
    peer.data(message(step(0, 1).SerializeToString()))
    running = asyncio.ensure_future(peer.call.run(lambda one: taken.append(len(one.events[0].request_id))))
    await asyncio.sleep(0)
    assert taken == [1]
    peer.data(message(step(1, 2).SerializeToString()) + message(step(2, 3).SerializeToString()))
    assert taken == [1, 2, 3], "in the turn that they arrived in"
    peer.data(b"".join(message(step(place, 60_000).SerializeToString()) for place in range(4)))
    peer.headers(("grpc-status", "14"))
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    assert taken == [1, 2, 3, *[60_000] * 4], "large ones take several turns"


def heard(reader: Reader) -> list[bytes]:
    """Return what is written to a reader from now on."""
    writes: list[bytes] = []
    reader.socket.write = writes.append  # type: ignore[method-assign]
    return writes


async def test_what_a_taker_sends_to_others_leaves_in_one_write_each_before_the_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection, "_SAME_TURN_SECONDS", 0.0)
    peer, readers = Peer(), [Reader() for _ in range(2)]
    await asyncio.sleep(0)
    writes = [heard(reader) for reader in readers]

    def take(one: SessionResponse) -> None:
        for reader in readers:
            reader.connection.give_back(1, 1 + one.step)
        if one.step == 2:
            raise ValueError("no")

    running = asyncio.ensure_future(peer.call.run(take))
    await asyncio.sleep(0)
    peer.data(b"".join(message(step(number).SerializeToString()) for number in range(2)))
    both = [frames.window_update(1, 1) + frames.window_update(1, 2)]
    assert writes == [both, both], "before another turn begins"
    peer.data(message(step(2).SerializeToString()))
    assert [own[1:] for own in writes] == [[frames.window_update(1, 3)]] * 2, "also where the taker fails"
    with pytest.raises(ValueError, match="no"):
        await running
    readers[0].connection.give_back(1, 9)
    assert len(writes[0]) == 2, "elsewhere at the end of the turn"
    await asyncio.sleep(0)
    assert writes[0][2:] == [frames.window_update(1, 9)]


async def test_of_many_peers_messages_in_one_turn_all_but_the_first_leave_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection, "_SAME_TURN_SECONDS", 60.0)
    reader = Reader()
    await asyncio.sleep(0)
    writes = heard(reader)
    reader.connection._left_early = -math.inf
    for number in range(8):
        flushed_together(lambda more=1 + number: reader.connection.give_back(1, more))  # type: ignore[misc]
    await asyncio.sleep(0)
    rest = b"".join(frames.window_update(1, 1 + number) for number in range(1, 8))
    assert writes == [frames.window_update(1, 1), rest]


async def test_a_write_that_fails_is_told_and_keeps_no_other_from_leaving() -> None:
    bad, good = Reader(), Reader()
    await asyncio.sleep(0)
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fail(_: bytes) -> None:
        raise OSError("no")

    def send() -> None:
        for reader in (bad, good):
            reader.connection.give_back(1, 1)

    writes = heard(good)
    bad.socket.write = fail  # type: ignore[method-assign]
    flushed_together(send)
    assert writes == [frames.window_update(1, 1)]
    assert [str(one["exception"]) for one in told] == ["no"]


async def test_an_error_of_the_taker_ends_the_run_as_does_a_bad_message() -> None:
    def refuse(_: SessionResponse) -> None:
        raise ValueError("no")

    peer = Peer()
    running = asyncio.ensure_future(peer.call.run(refuse))
    await asyncio.sleep(0)
    peer.data(message(step(0).SerializeToString()) * 2)
    with pytest.raises(ValueError, match="no"):
        await running
    assert not running.cancelled()
    peer = Peer()
    running = asyncio.ensure_future(peer.call.run(refuse))
    await asyncio.sleep(0)
    peer.data(message(b"\xff"))
    assert await running is None


async def test_several_messages_leave_together() -> None:
    peer = Peer()
    writes: list[Any] = []
    peer.socket.write = writes.append  # type: ignore[method-assign]
    await peer.call.write_all([SessionRequest()] * 5)
    assert len(writes) == 1
    assert [payload for _, _, _, payload in frames_of(writes[0])] == [message(b"")] * 5
