"""Plain connection to a gateway, for what no HTTP client would do."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from factories.servers.gateway import Gateway


class Connection:
    """A plain connection, for what no HTTP client would do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def to(gateway: Gateway) -> Connection:
        """Open one that buffers little."""
        own = socket.socket()
        # Before it connects: the window that the other side is told follows from it.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, gateway.host_port)
        return Connection(*await asyncio.open_connection(sock=own, limit=4096))

    def post(self, path: str, body: Any, *headers: str) -> None:
        """Send a request."""
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}", *headers, "", ""]
        self.writer.write("\r\n".join(head).encode() + data)

    async def status(self) -> int:
        """Read the status line."""
        return int((await self.reader.readline()).split()[1])

    async def until_closed(self) -> bytes:
        """Read all that comes until the other side closes."""
        try:
            return await self.reader.read(-1)
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Hang up."""
        self.writer.transport.abort()
