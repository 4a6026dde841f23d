"""Client of HTTP/1.1 that sends any bytes and keeps its connection, for many requests one after the other."""

from __future__ import annotations

import asyncio
from types import TracebackType


class PlainHttp:
    """One connection at a time; a new one where the server has closed the last."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> PlainHttp:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def ask(self, method: str, target: bytes, body: bytes = b"", *headers: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body, of events the bytes of the chunks."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 24)
        reader, writer = self._streams
        head = (b"%b %b HTTP/1.1" % (method.encode(), target), b"host: localhost", b"content-length: %d" % len(body))
        writer.write(b"\r\n".join((*head, *headers, b"", body)))
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:] if line)
        if b"content-length" in fields:
            answer = await reader.readexactly(int(fields[b"content-length"]))
        else:
            parts = []
            while size := int(await reader.readline(), 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
            await reader.readline()
            answer = b"".join(parts)
        if fields.get(b"connection") == b"close":
            self._close()
        return int(lines[0].split()[1]), answer
