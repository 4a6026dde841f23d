"""Client of HTTP/2 that sends any bytes, and notes the answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

from factories.wire.conformance import HELLO
from hpack import Decoder, HPACKError
from penstock.http2 import frames


class Seen:
    """Answers of a server on one connection, so far."""

    def __init__(self) -> None:
        self.goaway: int | None = None
        self.is_closed = False
        self.resets: dict[int, int] = {}
        self.status: dict[int, tuple[str, int]] = {}
        self._decoder = Decoder()
        self._fields: dict[int, dict[str, str]] = {}

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.GOAWAY:
            code = int.from_bytes(payload[4:8], "big")
            if self.goaway is None or code:
                self.goaway = code
        elif kind == frames.RST_STREAM:
            self.resets.setdefault(stream, int.from_bytes(payload, "big"))
        elif kind == frames.HEADERS:
            with contextlib.suppress(HPACKError):
                fields = self._fields.setdefault(stream, {})
                fields.update({str(name): str(value) for name, value in self._decoder.decode(payload)})
            if flags & frames.END_STREAM and stream not in self.status:
                fields = self._fields[stream]
                grpc_status = fields.get("grpc-status")
                http = int(fields.get(":status", "0"))
                self.status[stream] = ("grpc", int(grpc_status)) if grpc_status is not None else ("http", http)

    def outcome(self, stream: int) -> tuple[str, int] | None:
        """Return what became of the connection, or of `stream`; None while nothing has."""
        if self.is_closed:
            return ("connection", -1 if self.goaway is None else self.goaway)
        if stream in self.status:
            return self.status[stream]
        if stream in self.resets:
            return ("stream", self.resets[stream])
        return None


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection (RST): nothing that was written is sent any more."""
    # One over TLS that has ended has none any more.
    if (end := writer.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def frames_from(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int, bytes]]:
    """Yield kind, flags, stream and payload of each frame until the connection ends."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            begin = await reader.readexactly(frames.FRAME_HEAD)
            payload = await reader.readexactly(int.from_bytes(begin[:3], "big"))
            yield begin[3], begin[4], int.from_bytes(begin[5:], "big"), payload


class RawClient:
    """A connection that follows no rules. `opened` makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen = Seen()
        self._frames = frames_from(reader)
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, address: str, hello: bytes = HELLO) -> AsyncIterator[RawClient]:
        """Connect to `address` (host:port) for the block, and send `hello`.

        Both are done before the event loop goes on: a server of this process that soon hangs up has the bytes by then.
        """
        host, _, port = address.rpartition(":")
        end = socket.create_connection((host, int(port)))
        end.sendall(hello)
        reader, writer = await asyncio.open_connection(sock=end)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    def hang_up(self) -> None:
        """Reset the connection, as the end of a process that is killed does: what is under way is lost."""
        reset(self._writer)

    async def outcome(self, stream: int) -> tuple[str, int]:
        """Return what became of `stream`, or of the connection, once something has."""
        while (found := self.seen.outcome(stream)) is None:
            with contextlib.suppress(EOFError):
                await self._next()
        return found

    async def first_data(self, stream: int) -> bytes:
        """Return the payload of the next DATA frame of `stream`. Raises EOFError when there is none."""
        while True:
            kind, _, where, payload = await self._next()
            if (kind, where) == (frames.DATA, stream):
                return payload

    async def until(self, kind: int) -> list[tuple[int, int, int, bytes]]:
        """Return kind, flags, stream and payload of the next frames, up to one of this kind. Raises EOFError."""
        seen = [await self._next()]
        while seen[-1][0] != kind:
            seen.append(await self._next())
        return seen

    async def _next(self) -> tuple[int, int, int, bytes]:
        frame = await anext(self._frames, None)
        if frame is None:
            self.seen.is_closed = True
            raise EOFError
        self.seen.take(*frame)
        return frame
