"""Tricks of a caller without a token on a server's HTTP/2, as data: each makes the bytes that one connection sends."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from factories.wire.conformance import HELLO, data, head, replaced, without
from hpack import Encoder
from penstock.http2 import frames

WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
_EMPTY = bytes(5)
_HUFFMAN = Encoder().encode([("x", "a" * 20_000)], huffman=True)
# A field that the table remembers, and then the same field by its number.
_BOMB = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 12_000
# Seconds between the pieces of a slow sender: far less than a server waits for the next.
_DROP_SECONDS = 0.02


@dataclass(frozen=True)
class Trick:
    """One of them. `make` gets the path of a call that needs a token, and makes the pieces; they may have no end."""

    name: str
    make: Callable[[str], Iterator[bytes]]
    # Sent before the first piece.
    hello: bytes = HELLO
    # Between two pieces.
    pause_seconds: float = 0.0


def _call(path: str, stream: int, flags: int = frames.END_HEADERS) -> bytes:
    return head(replaced(":path", path), stream=stream, flags=flags)


def _part(payload: bytes, stream: int) -> bytes:
    return data(payload, stream=stream, flags=0)


def _watch(stream: int) -> bytes:
    return _call(WATCH, stream) + data(_EMPTY, stream=stream)


def _streams(make: Callable[[int], bytes], together: int = 50) -> Iterator[bytes]:
    """Yield what `make` gives for stream after stream, some of them at a time."""
    for first in itertools.count(1, 2 * together):
        yield b"".join(make(stream) for stream in range(first, first + 2 * together, 2))


def _again(piece: bytes, count: int = 1000) -> Iterator[bytes]:
    return itertools.repeat(piece * count)


def _drops(piece: bytes) -> Iterator[bytes]:
    return (piece[at : at + 1] for at in range(len(piece)))


def _blocks(block: bytes) -> Iterator[bytes]:
    """Yield requests with this header block."""
    ends = frames.END_HEADERS | frames.END_STREAM
    return _streams(lambda stream: frames.frame(frames.HEADERS, ends, stream, block), 4)


def _blocked(_: str) -> Iterator[bytes]:
    """Yield watches that may send nothing, and then frames that make room for none of them."""
    yield frames.settings(((frames.INITIAL_WINDOW_SIZE, 0),))
    yield b"".join(_watch(stream) for stream in range(1, 8000, 2))
    for size in itertools.cycle((0, 1)):
        yield frames.settings(((frames.INITIAL_WINDOW_SIZE, size),)) + 100 * frames.window_update(0, 1)


def _continued(_: str) -> Iterator[bytes]:
    """Yield a header block that is continued by nothing, again and again."""
    yield frames.frame(frames.HEADERS, 0, 1, b"\x82")
    yield from itertools.repeat(frames.frame(frames.CONTINUATION, 0, 1) * 500)


def _body(path: str, size: int, part: int, count: int, together: int) -> Iterator[bytes]:
    """Yield calls with the head of a message of `size` bytes and some of its parts."""

    def begun(stream: int) -> bytes:
        message_head = b"\0" + size.to_bytes(4, "big")
        return _call(path, stream) + _part(message_head, stream) + count * _part(bytes(part), stream)

    return _streams(begun, together)


_ENDS = frames.END_HEADERS | frames.END_STREAM
_MALFORMED = [*without(":path"), (":path", ""), ("Connection", "x")]
_LARGE_HEAD = frames.frame(frames.DATA, 0, 1, bytes(16_384))
TRICKS = {
    trick.name: trick
    for trick in (
        Trick("watches", lambda _: _streams(_watch)),
        Trick("headers without a body", lambda _: _streams(lambda stream: _call(CHECK, stream))),
        Trick("calls without a token", lambda path: _streams(lambda stream: _call(path, stream))),
        Trick("bodies that never end", lambda path: _body(path, 0x3FFFFF, 16_000, 3, 8)),
        Trick("health with bodies that never end", lambda _: _body(CHECK, 0xFFF, 4000, 1, 50)),
        Trick("health without end", lambda _: _streams(lambda stream: _call(CHECK, stream) + _part(_EMPTY, stream))),
        Trick(
            "rapid resets",
            lambda _: _streams(lambda stream: _call(WATCH, stream) + frames.reset(stream, frames.CANCEL)),
        ),
        Trick("unknown methods", lambda _: _streams(lambda stream: _call("/a/b", stream, _ENDS))),
        Trick("malformed requests", lambda _: _streams(lambda stream: head(_MALFORMED, stream=stream, flags=_ENDS))),
        Trick("SETTINGS", lambda _: _again(frames.settings(((frames.INITIAL_WINDOW_SIZE, 1000),)))),
        Trick("PING", lambda _: _again(frames.frame(frames.PING, 0, 0, bytes(8)))),
        Trick("answers to no PING", lambda _: _again(frames.frame(frames.PING, frames.ACK, 0, bytes(8)))),
        Trick("WINDOW_UPDATE", lambda _: _again(frames.window_update(0, 1))),
        Trick("windows of calls that wait", _blocked),
        Trick("PRIORITY", lambda _: _again(frames.frame(frames.PRIORITY, 0, 1, bytes(5)))),
        Trick("empty DATA", lambda _: itertools.chain((_call(CHECK, 1),), _again(_part(b"", 1)))),
        Trick("CONTINUATION", _continued),
        Trick("a header block that never ends", lambda _: iter((frames.frame(frames.HEADERS, 0, 1, b"\x82"),))),
        Trick("headers by Huffman code", lambda _: _blocks(_HUFFMAN)),
        Trick("headers that grow", lambda _: _blocks(_BOMB)),
        Trick("many small headers", lambda _: _blocks(b"\x00\x01a\x00" * 2000)),
        Trick("half a frame", lambda _: iter((_call(CHECK, 1) + _LARGE_HEAD[:8000],))),
        Trick("headers drop by drop", lambda path: _drops(_call(path, 1)), pause_seconds=_DROP_SECONDS),
        Trick("a preface drop by drop", lambda _: _drops(HELLO), hello=b"", pause_seconds=_DROP_SECONDS),
        Trick("frames of noise", lambda _: itertools.repeat(os.urandom(4096))),
        Trick("no HTTP/2", lambda _: itertools.repeat(os.urandom(4096)), hello=b""),
        Trick("a hello and nothing", lambda _: iter(())),
        Trick("nothing", lambda _: iter(()), hello=b""),
    )
}
