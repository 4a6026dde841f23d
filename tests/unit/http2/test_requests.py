"""Requests on the asyncio transport as their handler takes them: in time, late, and what is no request."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from typing import Any

import grpc
import pytest
from factories.wire.http2 import LIMITS, Peer, message
from hpack import Decoder
from penstock.http2 import frames
from penstock.http2.request_bytes import RequestBytes
from penstock.http2.server_call import Call, Refused


async def stream_of(peer: Peer, first: bytes) -> tuple[Call, Any]:
    """Begin a call whose handler takes a stream, and has taken `first`."""
    call = peer.open(1)
    requests: Any = call.requests(None)
    peer.data(1, message(first))
    assert await anext(requests) == first
    return call, requests


async def test_a_request_stream_that_is_not_taken_is_held_back_by_its_window() -> None:
    peer, sent = Peer(), message(bytes(8000))
    call, requests = await stream_of(peer, b"")
    used, many = len(message(b"")), 0
    while used + len(sent) <= await peer.offered(1):
        peer.data(1, sent)
        used, many = used + len(sent), many + 1
    assert frames.STREAM_WINDOW - 2 * len(sent) <= used <= frames.STREAM_WINDOW
    assert not call.is_over
    for _ in range(many):
        await anext(requests)
    assert await peer.offered(1) > used + frames.STREAM_WINDOW // 2
    for _ in range(300):
        peer.data(1, sent)
    assert peer.socket.is_closed, "it sent more than its window"
    assert call.is_over
    await requests.aclose()


@pytest.mark.parametrize("size", [0, 1, 60])
async def test_small_messages_that_are_not_taken_are_held_back_by_the_window_too(size: int) -> None:
    peer, sent, many = Peer(), message(b"x" * size), 0
    call, requests = await stream_of(peer, b"")
    used = len(message(b""))
    while used + 64 * len(sent) <= await peer.offered(1):
        peer.data(1, 64 * sent)
        used, many = used + 64 * len(sent), many + 64
    assert many > 15_000
    assert not call.is_over
    assert len(call._body) <= frames.STREAM_WINDOW
    assert [len(await anext(requests)) for _ in range(many)] == [size] * many
    assert await peer.offered(1) > used + frames.STREAM_WINDOW // 2
    await requests.aclose()


async def test_a_unary_request_has_the_window_that_it_needs() -> None:
    peer = Peer()
    peer.open(1)
    peer.data(1, message(bytes(3 << 20))[:1000])
    assert await peer.offered(1) == len(message(bytes(3 << 20)))
    peer.open(3)
    peer.data(3, message(b"small")[:-1])
    assert await peer.offered(3) == frames.DEFAULT_WINDOW


async def test_large_requests_of_a_connection_come_one_after_the_other() -> None:
    peer, large = Peer(), message(bytes(3 << 20))
    calls = {stream: peer.open(stream) for stream in (1, 3, 5)}
    for stream in calls:
        peer.data(stream, large[:1000])
    assert [await peer.offered(stream) > frames.DEFAULT_WINDOW for stream in calls] == [True, True, False]
    assert peer.connection.flow.request_bytes.held == 2 * len(large) + 1000
    for at in range(1000, len(large), 10_000):
        peer.data(3, large[at : at + 10_000], end=at + 10_000 >= len(large))
    assert await calls[3].request() == bytes(3 << 20)
    assert await peer.offered(5) == len(large)
    peer.reset(1)
    peer.reset(5)
    assert peer.connection.flow.request_bytes.held == 0


async def test_nothing_is_kept_of_a_request_that_waited_for_its_turn_and_was_reset() -> None:
    peer, large = Peer(), message(bytes(3 << 20))
    for stream in range(1, 63, 2):
        peer.open(stream)
        peer.data(stream, large[:1000])
        # The first two have all that there is, and the third waits in front of the others.
        if stream > 5:
            peer.reset(stream)
    assert len(peer.connection.flow.request_bytes._waiting) == 1
    assert [call.is_over for call in peer.calls].count(False) == 3


async def test_a_connection_with_too_many_unfinished_requests_is_refused_the_next() -> None:
    peer = Peer()
    for stream in range(1, 2000, 2):
        peer.open(stream)
        for _ in range(4):
            peer.data(stream, b"\0" + (1 << 20).to_bytes(4, "big") + bytes(15_000))
        if peer.calls[-1].is_over:
            break
    (block,) = await peer.received(frames.HEADERS, stream)
    assert dict(Decoder().decode(block))["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert peer.connection.flow.request_bytes.held <= LIMITS.connection_window_bytes
    assert not peer.socket.is_closed


async def test_a_process_with_too_many_unfinished_requests_refuses_the_next() -> None:
    budget, part = RequestBytes(100_000), b"\0" + (90_000).to_bytes(4, "big") + bytes(10_000)
    first, second = Peer(request_bytes=budget), Peer(request_bytes=budget)
    assert not first.open(1).is_over
    first.data(1, part)
    second.open(1)
    second.data(1, part)
    assert not first.calls[0].is_over
    assert second.calls[0].is_over
    first.reset(1)
    assert budget.held == 0


async def test_a_request_that_never_ends_is_ended() -> None:
    peer = Peer(replace(LIMITS, handshake_seconds=0.05, request_seconds=0.05))
    call = peer.open(1)
    peer.data(1, message(b"abc")[:-1])
    call.task = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.wait([call.task])
    assert call.is_over
    (block,) = await peer.received(frames.HEADERS, 1)
    status = dict(Decoder().decode(block))
    assert status["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    assert status["grpc-message"] == "the request did not arrive within 0.05 s"


async def test_a_handler_that_never_waits_leaves_their_turn_to_others() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.data(1, 1000 * message(b"a"), end=True)
    turns = []
    asyncio.get_running_loop().call_soon(lambda: turns.append(taken))
    taken = 0
    async for _ in call.requests(None):
        taken += 1
    assert taken == 1000
    assert turns
    assert turns[0] < 1000


async def test_a_message_larger_than_the_window_arrives_behind_one_that_waits() -> None:
    peer = Peer()
    _, requests = await stream_of(peer, b"")
    sent, used = message(b"first") + message(bytes(3 << 20)), len(message(b""))
    for at in range(0, len(sent), 10_000):
        if used + min(at + 10_000, len(sent)) > await peer.offered(1):
            assert await anext(requests) == b"first"
        peer.data(1, sent[at : at + 10_000])
    assert len(await anext(requests)) == 3 << 20
    await requests.aclose()


async def test_a_large_message_behind_others_is_refused_once_they_are_taken() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.data(1, message(b"first") + b"\0" + (5 << 20).to_bytes(4, "big"))
    requests: Any = call.requests(None)
    assert await anext(requests) == b"first"
    with pytest.raises(grpc.aio.AbortError):
        await anext(requests)
    (block,) = await peer.received(frames.HEADERS, 1)
    assert dict(Decoder().decode(block))["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])


async def test_a_stream_that_ends_amid_a_message_is_malformed() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.data(1, message(b"first") + message(b"second")[:-1], end=True)
    requests: Any = call.requests(None)
    assert await anext(requests) == b"first"
    with pytest.raises(grpc.aio.AbortError):
        await anext(requests)
    (block,) = await peer.received(frames.HEADERS, 1)
    assert dict(Decoder().decode(block))["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])


async def test_a_small_message_that_unpacks_to_a_large_one_waits_small() -> None:
    peer = Peer()
    call = peer.open(1, ("grpc-encoding", "gzip"))
    packed = gzip.compress(bytes(3 << 20))
    for _ in range(4):
        peer.data(1, message(packed, compressed=True))
    assert len(call._body) == 4 * len(message(packed))
    requests: Any = call.requests(None)
    assert len(await anext(requests)) == 3 << 20
    await requests.aclose()


async def test_a_second_message_of_a_unary_request_is_not_waited_for() -> None:
    peer = Peer()
    call = peer.open(1)
    peer.data(1, message(b"a") + message(b"b"))
    with pytest.raises(Refused):
        await call.request()


async def test_a_compressed_message_that_is_cut_short_is_refused() -> None:
    peer = Peer()
    call = peer.open(1, ("grpc-encoding", "gzip"))
    peer.data(1, message(gzip.compress(b"abc" * 1000)[:-10], compressed=True), end=True)
    with pytest.raises(Refused, match="cut short"):
        await call.request()


async def test_repeated_metadata_reaches_the_handler_in_its_order() -> None:
    peer = Peer()
    call = peer.open(1, ("a", "1"), ("b-bin", "AQ,Ag"), ("a", "2"))
    assert call.invocation_metadata() == (("a", "1"), ("b-bin", b"\1"), ("b-bin", b"\2"), ("a", "2"))
