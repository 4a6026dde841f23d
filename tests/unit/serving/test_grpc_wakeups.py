"""Wake-ups of the loop by grpc.aio: all that have come are taken in one turn, and only where its use begins."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from penstock.serving.grpc_wakeups import wakeups_together


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    with reader, writer:
        yield reader, writer


class Events:
    """Events as grpc.aio takes them: a thread has put each into a queue and written a byte; a call reads one byte and
    takes all events."""

    def __init__(self, pair: tuple[socket.socket, socket.socket], events: Sequence[str]) -> None:
        self._reader, writer = pair
        self._waiting = deque(events)
        writer.send(b"1" * len(events))
        self.taken: list[str] = []
        self.calls = 0

    def take(self) -> None:
        self.calls += 1
        self._reader.recv(1)
        while self._waiting:
            event = self._waiting.popleft()
            if event == "bad":
                raise RuntimeError("Event loop is closed")
            self.taken.append(event)

    async def run(self, *, together: bool) -> None:
        """Take them for more turns of the loop than there are bytes."""
        loop = asyncio.get_running_loop()
        with wakeups_together() if together else contextlib.nullcontext():
            loop.add_reader(self._reader, self.take)
        for _ in range(200):
            await asyncio.sleep(0)
        loop.remove_reader(self._reader)


@pytest.mark.parametrize("count", [1, 2, 100])
async def test_wakeups_that_came_are_one_turn(pair: tuple[socket.socket, socket.socket], count: int) -> None:
    events = Events(pair, ["good"] * count)
    await events.run(together=True)
    assert (len(events.taken), events.calls) == (count, 1)


async def test_readers_after_the_block_are_as_they_were(pair: tuple[socket.socket, socket.socket]) -> None:
    events = Events(pair, ["good"] * 5)
    with wakeups_together():
        pass
    await events.run(together=False)
    assert (len(events.taken), events.calls) == (5, 5)


async def test_an_event_of_a_closed_loop_does_not_keep_the_others(pair: tuple[socket.socket, socket.socket]) -> None:
    events = Events(pair, ["good", "bad", "good", "bad", "good", "good"])
    loop, failures = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    await events.run(together=True)
    assert events.taken == ["good"] * 4
    assert len(failures) == 2
