"""Requests on the asyncio transport as their handler takes them: in time, late, and what is no request."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import grpc
import pytest
from factories.http2 import Peer, message
from hpack import Decoder
from penstock.http2 import frames
from penstock.http2.server_call import Refused


async def test_a_request_stream_that_is_not_taken_is_held_back_by_its_window() -> None:
    peer = Peer()
    call, sent = peer.open(1), message(bytes(8000))
    for _ in range(200):
        peer.data(1, sent)
    assert frames.STREAM_WINDOW * 3 // 4 <= await peer.given_back(1) < 150 * len(sent)
    requests: Any = call.requests(None)
    for _ in range(200):
        await anext(requests)
    assert 200 * len(sent) - frames.STREAM_WINDOW // 4 < await peer.given_back(1) <= 200 * len(sent)
    for _ in range(300):
        peer.data(1, sent)
    assert peer.socket.is_closed, "it sent more than its window"
    assert call.is_over
    await requests.aclose()


@pytest.mark.parametrize("size", [0, 1, 60])
async def test_small_messages_that_are_not_taken_are_held_back_by_the_window_too(size: int) -> None:
    peer = Peer()
    call, sent, many = peer.open(1), message(b"x" * size), 0
    used = 0
    while used + 64 * len(sent) <= frames.STREAM_WINDOW + await peer.given_back(1):
        peer.data(1, 64 * sent)
        used, many = used + 64 * len(sent), many + 64
    assert many > 20_000
    assert not call.is_over
    assert len(call._body) <= 2 * frames.STREAM_WINDOW
    requests: Any = call.requests(None)
    assert [len(await anext(requests)) for _ in range(many)] == [size] * many
    assert await peer.given_back(1) > used - frames.STREAM_WINDOW // 4
    await requests.aclose()


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
    call, large = peer.open(1), message(bytes(3 << 20))
    sent = message(b"first") + large
    requests: Any = call.requests(None)
    for at in range(0, len(sent), 10_000):
        if at + 10_000 > frames.STREAM_WINDOW + await peer.given_back(1):
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
