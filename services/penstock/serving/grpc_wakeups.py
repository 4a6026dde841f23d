"""Wake-ups of the event loop by grpc.aio, taken together: by itself it takes a turn of the loop for each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

# Wake-ups that are taken at a time.
_MOST = 4096


@contextlib.contextmanager
def wakeups_together() -> Iterator[None]:
    """Have grpc.aio, where the block begins its use on the running loop, take all wake-ups that have come in one turn.

    A thread of grpc writes a byte to a socket for each event. The loop reads one byte a turn, but takes all events.
    The bytes that are left make turns without events: under load most turns, and each asks the kernel about all
    sockets. A loop on which grpc.aio is in use already stays as it is.
    """
    loop: Any = asyncio.get_running_loop()
    watch = loop.add_reader

    def add_reader(source: Any, callback: Callable[..., object], *arguments: Any) -> Any:
        if isinstance(source, socket.socket):
            return watch(source, _take_all, source, callback, *arguments)
        return watch(source, callback, *arguments)

    loop.add_reader = add_reader
    try:
        yield
    finally:
        del loop.add_reader


def _take_all(source: socket.socket, callback: Callable[..., object], *arguments: Any) -> None:
    waiting = 0
    with contextlib.suppress(BlockingIOError):
        waiting = len(source.recv(_MOST, socket.MSG_PEEK))
    # It takes one byte, and all events. An event is there before its byte, so it finds the events of all these bytes.
    # Where it fails at one (that of a loop that is closed), the bytes of the others bring it back.
    callback(*arguments)
    if waiting > 1:
        source.recv(waiting - 1)
