"""Attacker that plays tricks on a gateway's HTTP, from a process of its own.

    cd tests; python -m factories.wire.http_attacker 127.0.0.1:8000 --trick trailers --seconds 10

It takes only what is left of the processor (SCHED_IDLE), and no more than `--mib-per-second` and `--attempts-per-
second` say: what it costs others is then the work that it makes for the server. Servers on loopback alone are
attacked. In the end it prints one line of JSON: connections, bytes, statuses that it saw, and its own seconds of
processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from factories.wire.http_tricks import HTTP_TRICKS, HttpTrick, Reading, Target, Then
from factories.wire.raw_client import reset

_STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d)")
# Kept of a piece for a status line that ends in the next: too few for a whole one, which would be counted twice.
_STATUS_BYTES = 11
_SLOW_BYTES, _SLOW_SECONDS = 512, 0.5
_RETRY_SECONDS = 0.05
_FIRST_SECONDS = 30.0
# Handshakes of a crowd that are under way together.
_BEGUN_AT_ONCE = 64
# A little more than the tricks' own most.
_MOST_CONNECTIONS = 4096


@dataclass
class Done:
    """Account of an attack."""

    connections: int = 0
    # Those that the server refused or reset before they had said anything.
    refused: int = 0
    sent_bytes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0


class Pace:
    """Bound on what is done a second."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._next = 0.0

    async def take(self, count: float) -> None:
        """Wait until `count` more may be done."""
        now = time.monotonic()
        # What was not taken is not saved up.
        self._next = max(self._next, now - 0.05) + count / self._per_second
        if self._next > now:
            await asyncio.sleep(self._next - now)


class HttpAttacker:
    """Attacker of one server."""

    def __init__(
        self,
        address: str,
        target: Target,
        tls: ssl.SSLContext | None = None,
        *,
        bytes_per_second: float = float("inf"),
        attempts_per_second: float = float("inf"),
        source: str | None = None,
    ) -> None:
        """Make it. `source`: address on loopback that it connects from. Raises ValueError for another address."""
        host, _, port = address.rpartition(":")
        if not host.startswith("127."):
            raise ValueError(f"{address} is not on loopback")
        self._where, self._source = (host, int(port)), source
        self._target, self._tls = target, tls
        self._bytes, self._attempts = Pace(bytes_per_second), Pace(attempts_per_second)
        self.done = Done()

    async def attack(self, tricks: Sequence[HttpTrick], connections: int, seconds: float, trick_seconds: float) -> None:
        """Play for so long: each connection one trick after the other, `trick_seconds` each.

        A trick with a number of connections of its own, alone, has that.
        """
        if len(tricks) == 1 and tricks[0].connections is not None:
            connections = tricks[0].connections
        end = time.monotonic() + seconds

        async def work(place: int) -> None:
            first = place * len(tricks) // connections
            for trick in itertools.cycle((*tricks[first:], *tricks[:first])):
                until = min(end, time.monotonic() + trick_seconds)
                await self._play(trick, until)
                if time.monotonic() >= end:
                    return

        await asyncio.gather(*(work(place) for place in range(min(connections, _MOST_CONNECTIONS))))

    @contextlib.asynccontextmanager
    async def poured(self, trick: HttpTrick, most_bytes: int, held_seconds: float) -> AsyncIterator[None]:
        """Play on one connection, which is open for the block: until it is cut off, until `most_bytes` were sent, or
        until the server took nothing for so long."""
        reader, writer = await self._connect(trick)
        self.done.connections += 1
        reading = asyncio.ensure_future(self._read(reader, asyncio.Event(), is_slow=trick.reading is Reading.SLOW))
        if trick.reading is Reading.NONE:
            reading.cancel()
        try:
            with contextlib.suppress(OSError, TimeoutError):
                for piece in trick.make(self._target):
                    writer.write(piece)
                    async with asyncio.timeout(held_seconds):
                        await writer.drain()
                    self.done.sent_bytes += len(piece)
                    await asyncio.sleep(0)
                    is_cut_off = reading.done() and not reading.cancelled()
                    if is_cut_off or self.done.sent_bytes > most_bytes:
                        break
            yield
        finally:
            reset(writer)
            reading.cancel()

    @contextlib.asynccontextmanager
    async def crowd(self, trick: HttpTrick) -> AsyncIterator[None]:
        """Play on as many connections as the trick has, open for the block; a refused one is not tried again."""

        async def begin() -> asyncio.StreamWriter | None:
            async with slots:
                line = await self._begin(trick)
                if line is None:
                    return None
                _, writer = line
                with contextlib.suppress(OSError):
                    for piece in trick.make(self._target):
                        writer.write(piece)
                        await writer.drain()
                return writer

        slots = asyncio.Semaphore(_BEGUN_AT_ONCE)
        writers = await asyncio.gather(*(begin() for _ in range(trick.connections or 1)))
        try:
            yield
        finally:
            for writer in writers:
                if writer is not None:
                    reset(writer)

    async def _play(self, trick: HttpTrick, until: float) -> None:
        """Play until a time of time.monotonic(); whoever is cut off connects again meanwhile."""
        while (seconds := until - time.monotonic()) > 0:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                # On a busy machine the very first connection may take longer than the attack.
                async with asyncio.timeout(seconds if self.done.connections else max(seconds, _FIRST_SECONDS)):
                    await self._attempts.take(1)
                    line = await self._begin(trick)
                if line is not None:
                    await self._on_one_connection(trick, until, *line)

    async def _begin(self, trick: HttpTrick) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect, and count it; None where the server does not let it in."""
        try:
            line = await self._connect(trick)
        except (OSError, asyncio.IncompleteReadError):
            self.done.refused += 1
            await asyncio.sleep(_RETRY_SECONDS)
            return None
        self.done.connections += 1
        return line

    async def _on_one_connection(
        self, trick: HttpTrick, until: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answered = asyncio.Event()
        reading: asyncio.Task[None] | None = None
        if trick.reading is not Reading.NONE:
            reading = asyncio.ensure_future(self._read(reader, answered, is_slow=trick.reading is Reading.SLOW))
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._send(trick, writer, reading)
                if trick.then is not Then.LEAVE:
                    await self._wait(trick, answered, reading)
        finally:
            reset(writer)
            if reading is not None:
                reading.cancel()

    async def _wait(self, trick: HttpTrick, answered: asyncio.Event, reading: asyncio.Task[None] | None) -> None:
        """Return once it is cut off, or answered, where the trick goes no further."""
        waits: list[asyncio.Task[Any]] = []
        if reading is not None:
            waits.append(reading)
        if trick.then is Then.ANSWER:
            waits.append(asyncio.ensure_future(answered.wait()))
        if not waits:
            await asyncio.Event().wait()
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _connect(self, trick: HttpTrick) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        own = socket.socket()
        try:
            own.setblocking(False)
            if trick.reading is not Reading.ALL:
                # Before it connects: the window that the other side is told follows from it.
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            if self._source is not None:
                own.bind((self._source, 0))
            await asyncio.get_running_loop().sock_connect(own, self._where)
        except BaseException:
            own.close()
            raise
        tls = None if trick.is_below_tls else self._tls
        return await asyncio.open_connection(
            sock=own, ssl=tls, server_hostname="localhost" if tls else None, limit=4096
        )

    async def _send(self, trick: HttpTrick, writer: asyncio.StreamWriter, reading: asyncio.Task[None] | None) -> None:
        for piece in trick.make(self._target):
            await self._bytes.take(len(piece))
            writer.write(piece)
            await writer.drain()
            self.done.sent_bytes += len(piece)
            # Endless pieces must not keep the others from their turn.
            await asyncio.sleep(trick.pause_seconds)
            if reading is not None and reading.done():
                # Cut off.
                return

    async def _read(self, reader: asyncio.StreamReader, answered: asyncio.Event, *, is_slow: bool) -> None:
        left = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(_SLOW_BYTES if is_slow else 1 << 16):
                data = left + data
                for status in _STATUS.findall(data):
                    self.done.statuses[status.decode()] += 1
                    answered.set()
                left = data[-_STATUS_BYTES:]
                if is_slow:
                    await asyncio.sleep(_SLOW_SECONDS)


def client_tls(ca: str | None) -> ssl.SSLContext | None:
    """Return a client's context that trusts the CA of this file; None without one."""
    return ssl.create_default_context(cafile=ca) if ca else None


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="host:port of the gateway, on loopback")
    parser.add_argument("--trick", action="append", choices=sorted(HTTP_TRICKS), help="one of them; may be repeated")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--trick-seconds", type=float, default=2.0, help="of each trick, where there are several")
    parser.add_argument("--connections", type=int, default=10)
    parser.add_argument("--mib-per-second", type=float, default=64.0, help="sent by all connections together")
    parser.add_argument("--attempts-per-second", type=float, default=300.0, help="to connect, of all together")
    parser.add_argument("--ca", help="speak TLS, and trust this CA")
    parser.add_argument("--host", help="value of Host; the address when left out")
    parser.add_argument("--token", default="", help="for the tricks that need one")
    parser.add_argument("--source", help="address to connect from")
    arguments = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attacker = HttpAttacker(
        arguments.address,
        Target(arguments.host or arguments.address, arguments.token),
        client_tls(arguments.ca),
        bytes_per_second=arguments.mib_per_second * 2**20,
        attempts_per_second=arguments.attempts_per_second,
        source=arguments.source,
    )
    tricks = [HTTP_TRICKS[name] for name in arguments.trick or HTTP_TRICKS]
    trick_seconds = arguments.seconds if len(tricks) == 1 else arguments.trick_seconds
    print("attacking", flush=True)
    await attacker.attack(tricks, arguments.connections, arguments.seconds, trick_seconds)
    attacker.done.cpu_seconds = time.process_time()
    print(json.dumps(vars(attacker.done)))


if __name__ == "__main__":
    asyncio.run(_main())
