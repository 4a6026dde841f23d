"""Attacker that plays the tricks of a caller without a token on a server, from a process of its own.

    cd tests; python -m factories.wire.attacker 127.0.0.1:50050 --path /penstock.v1.TextService/Chat --rounds 1

It takes only what is left of the processor: what it costs others is the work that it makes for the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator

from factories.wire.raw_client import reset
from factories.wire.tricks import TRICKS, Trick

# One trick, and whether its player reads the answers.
Play = tuple[Trick, bool]
_RETRY_SECONDS = 0.05


def plays(rounds: int | None, first: int = 0) -> Iterator[Play]:
    """Yield each trick with and without reading, `rounds` times (None: without end), from the `first` on."""
    once = list(itertools.product(TRICKS.values(), (True, False)))
    turned = once[first % len(once) :] + once[: first % len(once)]
    return itertools.cycle(turned) if rounds is None else iter(turned * rounds)


class Attacker:
    """Attacker of one server. `began` counts the connections on which each trick was begun, by its name."""

    def __init__(self, address: str, path: str) -> None:
        """Make it. `path`: method of the server that needs a token."""
        host, _, port = address.rpartition(":")
        self._where = (host, int(port))
        self._path = path
        self.began: Counter[str] = Counter()

    async def attack(self, todo: Iterator[Play], connections: int, trick_seconds: float) -> None:
        """Play on so many connections at a time, `trick_seconds` each; whoever is cut off connects again meanwhile."""

        async def work() -> None:
            for trick, reads in todo:
                await self._play(trick, time.monotonic() + trick_seconds, reads=reads)

        await asyncio.gather(*(work() for _ in range(connections)))

    async def _play(self, trick: Trick, until: float, *, reads: bool) -> None:
        """Play until a time of time.monotonic(), and in any case on one connection that was made."""
        is_begun = False
        while not is_begun or time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_connection(*self._where)
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            is_begun = True
            self.began[trick.name] += 1
            reading = asyncio.ensure_future(_read(reader)) if reads else None
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(max(0.0, until - time.monotonic())):
                        await self._send(trick, writer, reading)
            finally:
                reset(writer)
                if reading is not None:
                    reading.cancel()

    async def _send(self, trick: Trick, writer: asyncio.StreamWriter, reading: asyncio.Task[None] | None) -> None:
        writer.write(trick.hello)
        for piece in trick.make(self._path):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(trick.pause_seconds)
            if reading is not None and reading.done():
                # Cut off.
                return
        # Until the time is over.
        await asyncio.Event().wait()


async def _read(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="host:port of the server")
    parser.add_argument("--path", required=True, help="a method of the server that needs a token")
    parser.add_argument("--connections", type=int, default=10)
    parser.add_argument("--trick-seconds", type=float, default=2.0, help="seconds of each trick on a connection")
    parser.add_argument("--rounds", type=int, help="rounds of all tricks; without end where it is not given")
    parser.add_argument("--first", type=int, default=0, help="place of the trick to begin with")
    arguments = parser.parse_args()
    os.nice(19)
    attacker = Attacker(arguments.address, arguments.path)
    print("attacking", flush=True)
    todo = plays(arguments.rounds, arguments.first)
    await attacker.attack(todo, arguments.connections, arguments.trick_seconds)
    print(json.dumps(attacker.began))


if __name__ == "__main__":
    asyncio.run(_main())
