"""Kubernetes API that serves one service's EndpointSlices from a script: lists, watches, and failures on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit


def endpoint_slice(
    *addresses: str,
    name: str = "generation-a",
    port: int = 50052,
    port_name: str = "grpc",
    family: str = "IPv4",
    unready: tuple[str, ...] = (),
    **conditions: Any,
) -> dict[str, Any]:
    """Make a slice with an endpoint for each address; `conditions` are those of the ready ones."""
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "addressType": family,
        "endpoints": [
            *({"addresses": [one], "conditions": {"ready": True, **conditions}} for one in addresses),
            *({"addresses": [one], "conditions": {"ready": False, "terminating": True}} for one in unready),
        ],
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }


class ScriptedApi:
    """One service's slices. Every change has a version, and goes to the watches that are open."""

    def __init__(self, *slices: dict[str, Any]) -> None:
        self.slices = {one["metadata"]["name"]: one for one in slices}
        self.version = 1
        # Requests so far: path, query and bearer token.
        self.lists: list[tuple[str, dict[str, list[str]], str]] = []
        self.watches: list[tuple[str, dict[str, list[str]], str]] = []
        # Status and body of all answers while set.
        self.failure: tuple[int, bytes] | None = None
        # Bytes of all bodies while set, whole and as they are.
        self.body: bytes | None = None
        # What the next watches say at once, before anything else.
        self.first_events: list[dict[str, Any]] = []
        self._open: set[asyncio.Queue[bytes | None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def is_busy(self) -> bool:
        """True while a connection is served."""
        return bool(self._writers)

    @property
    def num_open(self) -> int:
        """Number of watches that are open."""
        return len(self._open)

    def put(self, one: dict[str, Any]) -> None:
        """Add a slice, or replace the one of its name."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = one
        self._publish(kind, one)

    def remove(self, name: str) -> None:
        """Remove a slice."""
        self._publish("DELETED", self.slices.pop(name))

    def say(self, event: dict[str, Any]) -> None:
        """Send any event to the watches."""
        for queue in self._open:
            queue.put_nowait(json.dumps(event).encode() + b"\n")

    def end_watches(self) -> None:
        """End all watches as the API does when their time is over."""
        for queue in self._open:
            queue.put_nowait(None)

    def break_off(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def _publish(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.say({"type": kind, "object": one})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's one request."""
        self._writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *rest = head.decode().split("\r\n")
        method, target, _ = first.split(" ")
        assert method == "GET"
        headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in rest)}
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        asked = (parts.path, query, headers.get("authorization", "").removeprefix("Bearer "))
        (self.watches if "watch" in query else self.lists).append(asked)
        if self.failure is not None or self.body is not None:
            status, body = self.failure or (200, self.body or b"")
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        elif "watch" not in query:
            found = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
            body = json.dumps(found).encode()
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        else:
            await self._stream(reader, writer)
        await writer.drain()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        gone = asyncio.ensure_future(_until_gone(reader))
        gone.add_done_callback(lambda _: queue.put_nowait(None))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        events, self.first_events = self.first_events, []
        for event in events:
            queue.put_nowait(json.dumps(event).encode() + b"\n")
        self._open.add(queue)
        try:
            while (line := await queue.get()) is not None:
                # A line in two chunks: nothing says that they end together.
                for piece in (line[:7], line[7:]):
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            gone.cancel()
            self._open.discard(queue)


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Return when the client has left."""
    with contextlib.suppress(ConnectionError):
        await reader.read()


@asynccontextmanager
async def scripted_api(*slices: dict[str, Any], tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedApi]:
    """Run one on the loopback address."""
    api = ScriptedApi(*slices)
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0, ssl=tls)
    api.port = server.sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        server.close()
        api.break_off()
        while api.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0)
