"""End of an HTTP/2 connection as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from hpack import Encoder
from penstock.http2 import frames
from penstock.http2.limits import Limits
from penstock.http2.request_bytes import RequestBytes
from penstock.http2.server_call import Call
from penstock.http2.server_connection import Connection

LIMITS = Limits(
    max_message_bytes=4 << 20,
    max_header_list_bytes=16 << 10,
    max_streams=100,
    keepalive_seconds=60.0,
    keepalive_timeout_seconds=20.0,
    min_ping_interval_seconds=10.0,
    stream_window_bytes=frames.STREAM_WINDOW,
    connection_window_bytes=8 << 20,
    handshake_seconds=10.0,
    request_seconds=60.0,
    write_buffer_bytes=256 << 10,
    idle_frames=200,
    idle_frames_per_second=0.0,
    early_reset_seconds=60.0,
    max_probes=16,
)


REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")]


class Socket(asyncio.Transport):
    """Socket with another end that reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unread = 0
        self.is_read = True
        self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True


def frames_of(written: bytes | bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Return kind, flags, stream and payload of each frame."""
    data = bytes(written)
    while data:
        end = frames.FRAME_HEAD + int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[frames.FRAME_HEAD : end]
        data = data[end:]


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """Make a gRPC message with its head."""
    return bytes((compressed,)) + len(data).to_bytes(4, "big") + data


class Peer:
    """A client; the server's handlers are the test."""

    def __init__(self, limits: Limits = LIMITS, request_bytes: RequestBytes | None = None) -> None:
        self.calls: list[Call] = []
        self.socket = Socket()
        self.connection = Connection(
            limits, self.calls.append, lambda _: None, lambda _: None, request_bytes=request_bytes
        )
        self.connection.connection_made(self.socket)
        self.send(frames.PREFACE + frames.settings(()))

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def open(self, stream: int, *headers: tuple[str, str]) -> Call:
        fields = [*REQUEST, *headers]
        self.send(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, Encoder().encode(fields)))
        return self.calls[-1]

    def data(self, stream: int, payload: bytes, *, end: bool = False) -> None:
        self.send(frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream, payload))

    def reset(self, stream: int) -> None:
        self.send(frames.reset(stream, frames.CANCEL))

    async def received(self, kind: int, stream: int) -> list[bytes]:
        """Payloads of the frames of one kind so far."""
        await asyncio.sleep(0)  # the queue leaves at the end of a turn
        return [payload for *where, payload in frames_of(self.socket.written) if (where[0], where[2]) == (kind, stream)]

    async def offered(self, stream: int) -> int:
        """Return the bytes that may be sent on a stream, those that were sent included."""
        return frames.DEFAULT_WINDOW + await self.given_back(stream)

    async def given_back(self, stream: int) -> int:
        """Return the bytes of window that were given back."""
        return sum(int.from_bytes(one, "big") for one in await self.received(frames.WINDOW_UPDATE, stream))
