"""Wake-ups of the loop by grpc.aio: all that have come are taken in one turn, and only where its use begins."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from penstock.serving.grpc_wakeups import wakeups_together


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    with reader, writer:
        yield reader, writer


async def turns_of(reader: socket.socket, writer: socket.socket, wakeups: int, *, together: bool) -> list[bytes]:
    """Return what a callback that reads a byte has read, until nothing is left."""
    loop, read = asyncio.get_running_loop(), []
    done = loop.create_future()

    def take(source: socket.socket) -> None:
        read.append(source.recv(1))
        try:
            source.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            done.set_result(None)

    writer.send(b"1" * wakeups)
    if together:
        with wakeups_together():
            loop.add_reader(reader, take, reader)
    else:
        loop.add_reader(reader, take, reader)
    await done
    loop.remove_reader(reader)
    return read


@pytest.mark.parametrize("wakeups", [1, 2, 100])
async def test_wakeups_that_came_are_one_turn(pair: tuple[socket.socket, socket.socket], wakeups: int) -> None:
    assert await turns_of(*pair, wakeups, together=True) == [b"1"]


async def test_readers_after_the_block_are_as_they_were(pair: tuple[socket.socket, socket.socket]) -> None:
    with wakeups_together():
        pass
    assert len(await turns_of(*pair, 5, together=False)) == 5
