"""Silence of a peer, and a pause of the process that listens to it."""

from __future__ import annotations

import asyncio
import socket
import time

from factories.servers.router import until
from penstock.http2.keepalive import KeepAlive

TIMEOUT = 0.05


async def test_a_pause_of_the_process_is_not_taken_for_silence() -> None:
    """The answer that came during it is read first, although the timer is due before that."""
    loop, asked, gone = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    alive = KeepAlive(0.01, TIMEOUT, asked.set, gone.set)
    work, worker = socket.socketpair()
    answer, peer = socket.socketpair()
    with work, worker, answer, peer:

        def stand_still() -> None:
            work.recv(1)
            time.sleep(4 * TIMEOUT)
            peer.send(b"x")

        def take() -> None:
            answer.recv(1)
            alive.note_activity()
            heard.set()

        heard = asyncio.Event()
        loop.add_reader(work, stand_still)
        loop.add_reader(answer, take)
        alive.start()
        await asked.wait()
        worker.send(b"x")
        await heard.wait()
        assert not gone.is_set()
        alive.stop()
        loop.remove_reader(work)
        loop.remove_reader(answer)


async def test_silence_ends_it() -> None:
    """The peer was asked before."""
    asked, gone = asyncio.Event(), asyncio.Event()
    alive = KeepAlive(0.01, TIMEOUT, asked.set, gone.set)
    alive.start()
    await until(gone.is_set)
    assert asked.is_set()
