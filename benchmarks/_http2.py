"""Just enough HTTP/2 for a load client that costs little: requests on one plaintext connection, raw messages back.

A grpc.aio client takes about as much processor time for a message as the server that it measures; this one takes a
fraction of that. It trusts its peer, never pushes back, and reads trailers only as the end of a stream.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
MAX_WINDOW = 2**31 - 1
_GRPC_PREFIX = 5


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman code (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


def _header_block(authority: str, path: str, content_type: str) -> bytes:
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("content-type", content_type),
        ("te", "trailers"),
    )
    return b"".join(_literal(name, value) for name, value in fields)


class Connection(asyncio.Protocol):
    """One connection; `on_message(stream, bytes)` for each message, `on_end(stream)` when the stream is over."""

    content_type = "application/grpc"

    def __init__(self, authority: str, on_message: Callable[[int, bytes], None], on_end: Callable[[int], None]) -> None:
        self._authority = authority
        self._on_message = on_message
        self._on_end = on_end
        self._next_stream = 1
        self._received = b""
        # Data of a stream that is no whole message yet.
        self._partial: dict[int, bytes] = {}
        self._transport: asyncio.Transport | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Done with what ended the connection.
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._goodbye = ""
        # The header block that ended a stream last, as it came.
        self.trailers = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HIHI", INITIAL_WINDOW_SIZE, MAX_WINDOW, MAX_FRAME_SIZE, 1 << 20)
        window = struct.pack(">I", MAX_WINDOW - 65535)
        transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window))

    def connection_lost(self, error: Exception | None) -> None:
        reason = error or ConnectionError(self._goodbye or "the server hung up")
        if not self.settled.done():
            self.settled.set_exception(reason)
        self.lost.set_result(reason)

    def request(self, path: str, message: bytes) -> int:
        """Send a unary request (of less than 16 KiB); returns the number of its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        assert self._transport is not None
        head = frame(HEADERS, END_HEADERS, stream, _header_block(self._authority, path, self.content_type))
        self._transport.write(head + frame(DATA, END_STREAM, stream, self._body(message)))
        return stream

    def _body(self, message: bytes) -> bytes:
        return b"\x00" + struct.pack(">I", len(message)) + message

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        data = self._received + data if self._received else data
        at, size = 0, len(data)
        while at + 9 <= size:
            length = (data[at] << 16) | (data[at + 1] << 8) | data[at + 2]
            end = at + 9 + length
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = ((data[at + 5] & 0x7F) << 24) | (data[at + 6] << 16) | (data[at + 7] << 8) | data[at + 8]
            if kind == DATA:
                self._take_data(stream, data[at + 9 : end])
                if flags & END_STREAM:
                    self._on_end(stream)
            else:
                self._take_control(kind, flags, stream, data[at + 9 : end])
            at = end
        self._received = data[at:]

    def _take_data(self, stream: int, payload: bytes) -> None:
        partial = self._partial.pop(stream, None)
        if partial is not None:
            payload = partial + payload
        at, size = 0, len(payload)
        while at + _GRPC_PREFIX <= size:
            end = at + _GRPC_PREFIX + int.from_bytes(payload[at + 1 : at + 5], "big")
            if end > size:
                break
            self._on_message(stream, payload[at + _GRPC_PREFIX : end])
            at = end
        if at < size:
            self._partial[stream] = payload[at:]

    def _take_control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0))
            if not self.settled.done():
                self.settled.set_result(None)
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.trailers = payload
            self._on_end(stream)
        elif kind == GOAWAY:
            self._goodbye = f"the server said GOAWAY: {payload[8:].decode(errors='replace')}"


async def connect(
    address: str,
    on_message: Callable[[int, bytes], None],
    on_end: Callable[[int], None],
    kind: type[Connection] = Connection,
) -> Connection:
    """A connection to `host:port` that has exchanged settings."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: kind(address, on_message, on_end), host, int(port))
    await connection.settled
    return connection
