"""TCP relay that can be cut, reset, frozen, delayed and slowed, like a service on a machine that goes away."""

from __future__ import annotations

import asyncio
import contextlib

from factories.wire.raw_client import reset

# Bytes of a client in which a connection's purpose is looked for.
_FIRST_BYTES = 4096


class TcpProxy:
    """Relay; `async with TcpProxy(address) as proxy`, then connect to `proxy.address`."""

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        # The ends at those who connected.
        self._callers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        # What the client of a frozen connection has said at its begin.
        self._frozen = b""
        self._delay_seconds = 0.0
        self._bytes_per_second = float("inf")
        self._bytes_left = float("inf")

    def lead_to(self, target: str) -> None:
        """Relay connections from now on to another host:port."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> TcpProxy:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def restore(self) -> None:
        """Accept connections (again, on the same port) and let bytes flow."""
        self._flowing.set()
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Drop every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def freeze(self, said: bytes = b"") -> None:
        """Keep connections open and let nothing through; only those whose client began with `said` in its words."""
        self._frozen = said
        self._flowing.clear()

    def thaw(self) -> None:
        """Let bytes flow again."""
        self._flowing.set()

    def reset(self) -> None:
        """Reset every connection (RST, what is under way is lost) and accept new ones."""
        for writer in list(self._writers):
            reset(writer)

    def reset_after(self, count: int) -> None:
        """Reset every connection once, after `count` bytes more from the target, at any place of a frame."""
        self._bytes_left = count

    def slow_down(self, *, delay_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        """Let each piece come later, or so many bytes a second through each way. No argument: as fast as it can."""
        self._delay_seconds, self._bytes_per_second = delay_seconds, bytes_per_second

    def inject(self, data: bytes) -> None:
        """Send bytes of nobody's to those who connected; between frames, if the target is silent."""
        for writer in self._callers & self._writers:
            writer.write(data)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepting = self._server
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        if self._server is not accepting:
            # The connection was cut meanwhile.
            for half in (writer, far_writer):
                half.transport.abort()
            return
        self._callers = (self._callers & self._writers) | {writer}
        words = bytearray()
        for one_reader, one_writer, heard in ((reader, far_writer, words), (far_reader, writer, None)):
            self._writers.add(one_writer)
            pump = asyncio.ensure_future(self._pump(one_reader, one_writer, words, heard))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytearray, heard: bytearray | None
    ) -> None:
        """Copy bytes. `words`: the client's first ones; `heard`: the same, to add to, for bytes of the client."""
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if heard is not None and len(heard) < _FIRST_BYTES:
                    heard += data
                while self._frozen in words and not self._flowing.is_set():
                    await self._flowing.wait()
                if heard is None and len(data) >= self._bytes_left:
                    writer.write(data[: int(self._bytes_left)])
                    self._bytes_left = float("inf")
                    self.reset()
                    break
                if heard is None:
                    self._bytes_left -= len(data)
                pause = self._delay_seconds + len(data) / self._bytes_per_second
                if pause:
                    await asyncio.sleep(pause)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)
