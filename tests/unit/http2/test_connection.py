"""One connection of the asyncio transport over a socket that only remembers: what a peer cannot get past."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import unquote

import grpc
import pytest
from factories.wire.http2 import LIMITS, REQUEST, Peer, Socket, message
from hpack import Decoder, Encoder
from penstock.http2 import frames
from penstock.http2 import server_call as call_module
from penstock.http2.server_call import Refused
from penstock.http2.server_connection import Connection


async def test_a_peer_that_does_not_read_is_not_read() -> None:
    peer = Peer(replace(LIMITS, idle_frames=1_000_000))
    # What is no call is answered, too.
    block = Encoder().encode([(":method", "GET"), (":path", "/")])
    ends = frames.END_HEADERS | frames.END_STREAM
    for number in range(100):
        if peer.socket.is_read:
            streams = range(1 + 2000 * number, 1 + 2000 * (number + 1), 2)
            peer.send(b"".join(frames.frame(frames.HEADERS, ends, stream, block) for stream in streams))
            await asyncio.sleep(0)
    assert not peer.socket.is_read
    assert peer.socket.unread < 4 << 20
    peer.socket.unread = 0
    peer.connection.resume_writing()
    assert peer.socket.is_read


async def test_answers_of_one_turn_are_bounded_too() -> None:
    peer = Peer()
    call = peer.open(1)
    for stream in (0, 1):
        peer.send(frames.frame(frames.WINDOW_UPDATE, 0, stream, (1 << 30).to_bytes(4, "big")))
    for _ in range(100):
        await call.write(bytes(10_000))
    assert peer.socket.unread > 700_000, "not all of it is kept for the end of the turn"


async def test_data_after_the_end_of_a_request_resets_its_stream() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.data(1, message(b"a"), end=True)
    peer.data(1, message(b"b"))
    assert call.is_over
    assert await peer.received(frames.RST_STREAM, 1) == [frames.STREAM_CLOSED.to_bytes(4, "big")]
    assert not peer.socket.is_closed


@pytest.mark.parametrize(
    "misuse",
    [
        lambda stream: frames.frame(frames.DATA, 0, stream, b"x"),
        lambda stream: frames.frame(
            frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, Encoder().encode([("a", "b")])
        ),
        lambda stream: frames.window_update(stream, 0),
        lambda stream: frames.window_update(stream, frames.MAX_WINDOW),
    ],
    ids=["data after the end", "headers after the end", "no more window", "too much window"],
)
async def test_resets_that_a_client_provokes_have_the_budget_of_its_own(misuse: Callable[[int], bytes]) -> None:
    peer = Peer()
    for stream in range(1, 2000, 2):
        peer.open(stream)
        peer.data(stream, message(b"a"), end=True)
        peer.send(misuse(stream))
    assert peer.socket.is_closed
    assert len(peer.calls) < 300


async def test_cancelled_calls_without_an_answer_are_forgiven_with_time() -> None:
    patient = replace(LIMITS, idle_frames_per_second=1e9)
    peer = Peer(patient)
    for number in range(2000):
        peer.reset(peer.open(2 * number + 1).stream)
    assert not peer.socket.is_closed


@pytest.mark.parametrize(
    ("early_reset_seconds", "header"),
    [(0.0, ("a", "b")), (60.0, ("grpc-timeout", "1n"))],
    ids=["old enough", "their time is over"],
)
async def test_cancelled_calls_that_held_their_place_for_long_are_not_counted(
    early_reset_seconds: float, header: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "_LEAST_SECONDS", 0.0)
    peer = Peer(replace(LIMITS, early_reset_seconds=early_reset_seconds))
    for number in range(2000):
        peer.reset(peer.open(2 * number + 1, header).stream)
    assert not peer.socket.is_closed


@pytest.mark.parametrize("header", [("a", "b"), ("grpc-timeout", "1n")], ids=["patient", "no time at all"])
async def test_calls_opened_and_reset_at_once_without_end_end_the_connection(header: tuple[str, str]) -> None:
    # However slow the machine is.
    peer = Peer(replace(LIMITS, early_reset_seconds=60.0))
    for number in range(LIMITS.idle_frames + 1):
        call = peer.open(2 * number + 1, header)
        call._began += 60.0
        peer.reset(call.stream)
    (goaway,) = await peer.received(frames.GOAWAY, 0)
    assert int.from_bytes(goaway[4:8], "big") == frames.ENHANCE_YOUR_CALM
    assert goaway[8:] == b"too many early resets of calls without an answer"


async def blocked_calls(peer: Peer, count: int) -> list[asyncio.Task[None]]:
    """Begin calls that wait for the connection's window, but the first, which took it."""
    writes = []
    for number in range(count):
        call = peer.open(2 * number + 1)
        peer.send(frames.window_update(call.stream, 1 << 20))
        writes.append(asyncio.ensure_future(call.write(bytes(frames.DEFAULT_WINDOW))))
    await asyncio.sleep(0)
    return writes


async def test_of_calls_that_wait_as_many_are_woken_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Peer()
    writes = await blocked_calls(peer, 100)
    assert len(peer.connection.flow.blocked) == 100
    woken = 0

    def wake(_: object) -> None:
        nonlocal woken
        woken += 1

    monkeypatch.setattr(call_module.Call, "wake", wake)
    # The first wants the five bytes that its message is longer than the window.
    peer.send(5 * frames.window_update(0, 1))
    assert woken == 1
    peer.send(1000 * frames.window_update(0, 1))
    assert woken == 1 + 2
    peer.send(frames.window_update(0, 2 * frames.DEFAULT_WINDOW))
    assert woken == 1 + 2 + 4
    monkeypatch.undo()
    for one in writes:
        one.cancel()


async def test_whoever_is_woken_and_does_not_need_the_room_wakes_the_next() -> None:
    peer = Peer()
    writes = await blocked_calls(peer, 20)
    # Two are woken, and cancelled before they can go on.
    peer.send(frames.window_update(0, frames.DEFAULT_WINDOW + 100))
    for one in writes[:2]:
        one.cancel()
    await asyncio.wait(writes[2:3])
    for one in writes[3:]:
        assert not one.done()
        one.cancel()


async def test_all_that_wait_go_on_when_there_is_room_for_all() -> None:
    peer = Peer()
    writes = await blocked_calls(peer, 50)
    peer.send(frames.window_update(0, 50 * (frames.DEFAULT_WINDOW + 5)))
    await asyncio.gather(*writes)
    assert not peer.connection.flow.blocked


async def test_a_window_that_changes_for_many_calls_is_paid_for() -> None:
    peer = Peer(replace(LIMITS, max_streams=100, idle_frames=200))
    for stream in range(1, 200, 2):
        peer.open(stream)
    for size in range(150):
        peer.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 70_000 + size % 2),)))
    (goaway,) = await peer.received(frames.GOAWAY, 0)
    assert int.from_bytes(goaway[4:8], "big") == frames.ENHANCE_YOUR_CALM


async def test_calls_that_were_being_answered_may_all_be_cancelled() -> None:
    peer = Peer()
    for number in range(2000):
        call = peer.open(2 * number + 1)
        await call.write(b"")
        peer.reset(call.stream)
    assert not peer.socket.is_closed


async def test_calls_that_were_being_answered_may_be_cancelled_all_at_once() -> None:
    peer = Peer(replace(LIMITS, max_streams=1000))
    calls = [peer.open(2 * number + 1) for number in range(1000)]
    for call in calls:
        await call.write(b"")
    for call in calls:
        peer.reset(call.stream)
    assert not peer.socket.is_closed


async def test_nothing_is_taken_after_the_end() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.send(frames.frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(8)))
    assert peer.socket.is_closed
    assert call.is_over
    peer.open(3)
    assert len(peer.calls) == 1


@pytest.mark.parametrize("text", ["x" * 5000, "漢" * 5000, "\ud800" + "é%\n" * 3000])
def test_a_long_status_message_is_cut_to_what_clients_take(text: str) -> None:
    (_, (name, value)) = Decoder().decode(frames.trailers(3, text, ()))
    assert name == "grpc-message"
    assert len(value) <= 6144
    assert text.encode(errors="replace").startswith(unquote(str(value), errors="strict").encode())


async def test_a_client_of_http_1_is_answered_in_its_own_protocol() -> None:
    connection, socket = Connection(LIMITS, lambda _: None, lambda _: None, lambda _: None), Socket()
    connection.connection_made(socket)
    connection.data_received(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    head, _, body = bytes(socket.written).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 ")
    assert f"content-length: {len(body)}".encode() in head
    assert socket.is_closed


MALFORMED = {
    "data of the connection": (frames.frame(frames.DATA, 0, 0, b"x"), frames.PROTOCOL_ERROR),
    "headers of the connection": (frames.frame(frames.HEADERS, frames.END_HEADERS, 0, b""), frames.PROTOCOL_ERROR),
    "a reset of no stream": (frames.frame(frames.RST_STREAM, 0, 9, bytes(4)), frames.PROTOCOL_ERROR),
    "a short reset": (frames.frame(frames.RST_STREAM, 0, 1, bytes(3)), frames.FRAME_SIZE_ERROR),
    "room for no stream": (frames.window_update(9, 1), frames.PROTOCOL_ERROR),
    "a short window": (frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), frames.FRAME_SIZE_ERROR),
    "settings of a stream": (frames.frame(frames.SETTINGS, 0, 1, b""), frames.PROTOCOL_ERROR),
    "half a setting": (frames.frame(frames.SETTINGS, 0, 0, bytes(5)), frames.FRAME_SIZE_ERROR),
    "settings in an acknowledgement": (frames.frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), frames.FRAME_SIZE_ERROR),
    "windows that overflow": (
        frames.window_update(1, 1) + frames.settings(((frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW),)),
        frames.FLOW_CONTROL_ERROR,
    ),
    "a ping of a stream": (frames.frame(frames.PING, 0, 1, bytes(8)), frames.PROTOCOL_ERROR),
    "a short ping": (frames.frame(frames.PING, 0, 0, bytes(7)), frames.FRAME_SIZE_ERROR),
    "a short priority": (frames.frame(frames.PRIORITY, 0, 1, bytes(4)), frames.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", list(MALFORMED))
async def test_what_is_malformed_ends_the_connection_with_its_code(name: str) -> None:
    sent, code = MALFORMED[name]
    peer = Peer()
    call = peer.open(1)
    peer.send(sent)
    (goaway,) = await peer.received(frames.GOAWAY, 0)
    assert int.from_bytes(goaway[4:8], "big") == code
    assert call.is_over


async def test_of_many_windows_in_one_frame_the_last_counts() -> None:
    peer = Peer()
    call = peer.open(1)
    sizes = [*range(1000), 70_000]
    peer.send(frames.settings((frames.INITIAL_WINDOW_SIZE, size) for size in sizes))
    assert call.window == 70_000
    assert peer.open(3).window == 70_000


@pytest.mark.parametrize(
    "flood",
    [
        lambda _: frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
        lambda _: frames.frame(0x42, 0, 1, b"whatever"),
        lambda _: frames.frame(frames.DATA, 0, 1),
        lambda _: frames.frame(frames.DATA, frames.PADDED, 1, b"\0"),
        lambda n: frames.frame(
            frames.HEADERS, frames.END_HEADERS, 3 + 2 * n, Encoder().encode([(":method", "GET"), (":path", "/")])
        ),
        lambda _: frames.frame(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode([("a", "b")])),
    ],
    ids=["priorities", "unknown frames", "empty data", "padding", "no calls", "headers of a call that is over"],
)
async def test_frames_that_do_no_work_are_not_taken_without_end(flood: Callable[[int], bytes]) -> None:
    peer = Peer()
    peer.reset(peer.open(1).stream)
    for number in range(1000):
        peer.send(flood(number))
    (goaway,) = await peer.received(frames.GOAWAY, 0)
    assert int.from_bytes(goaway[4:8], "big") == frames.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("kind", ["application/grpc-web", "application/grpc-web+proto", "application/json", ""])
async def test_requests_that_are_not_grpc_get_an_http_status(kind: str) -> None:
    peer = Peer()
    fields = [*REQUEST[:-1], ("content-type", kind)]
    peer.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(fields)))
    (block,) = await peer.received(frames.HEADERS, 1)
    assert dict(Decoder().decode(block)) == {":status": "415"}
    assert await peer.received(frames.RST_STREAM, 1) == [bytes(4)]
    assert not peer.calls


async def test_a_compression_that_is_not_known_is_answered_with_those_that_are() -> None:
    peer = Peer()
    call = peer.open(1, ("grpc-encoding", "snappy"))
    peer.data(1, message(b"a", compressed=True), end=True)
    with pytest.raises(Refused) as refused:
        await call.request()
    call.finish(refused.value.code, refused.value.details)
    (block,) = await peer.received(frames.HEADERS, 1)
    headers = dict(Decoder().decode(block))
    assert headers["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])
    assert headers["grpc-accept-encoding"] == "identity, gzip, deflate"


async def test_a_compressed_message_without_a_word_of_how_is_malformed() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.data(1, message(b"a", compressed=True), end=True)
    with pytest.raises(Refused) as refused:
        await call.request()
    assert refused.value.code is grpc.StatusCode.INTERNAL


async def test_a_connection_that_says_nothing_is_given_up_without_a_ping() -> None:
    given_up = asyncio.Event()

    class Told(Socket):
        def abort(self) -> None:
            given_up.set()

    connection, socket = Connection(replace(LIMITS, keepalive_seconds=0.05), *3 * (lambda _: None,)), Told()
    connection.connection_made(socket)
    await given_up.wait()
    assert not socket.written


async def test_more_headers_than_are_taken_cost_their_call_only() -> None:
    peer = Peer()
    other = peer.open(1)
    fields = [*REQUEST, ("x", "y" * (40 << 10))]
    peer.send(frames.header_frames(3, Encoder().encode(fields), end=False, limit=frames.DEFAULT_FRAME_SIZE))
    (block,) = await peer.received(frames.HEADERS, 3)
    assert dict(Decoder().decode(block))["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert len(peer.calls) == 1
    assert not other.is_over
    # The table is what the client takes it for.
    assert peer.open(5, ("z", "1")).invocation_metadata() == (("z", "1"),)


@pytest.mark.parametrize("huffman", [True, False])
async def test_a_header_that_is_not_text_costs_no_connection(huffman: bool) -> None:
    peer = Peer()
    fields = [*((name.encode(), value.encode()) for name, value in REQUEST), (b"x", b"Jos\xe9")]
    block = Encoder().encode(fields, huffman=huffman)
    peer.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block))
    assert peer.calls[0].invocation_metadata() == (("x", "Jos\ufffd"),)
