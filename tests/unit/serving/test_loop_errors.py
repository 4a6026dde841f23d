"""Log lines of errors in an event loop that nobody awaits."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest
from penstock.serving.loop_errors import LoopErrors
from structlog.testing import capture_logs


class NoDescriptors:
    """A listening socket whose accept() finds no descriptors left."""

    def __init__(self, real: object) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def accept(self) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_server_that_is_closed_before_it_accepts_again_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.01)
    loop = asyncio.get_running_loop()
    reports, both = [], asyncio.Event()
    report = LoopErrors()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        report(loop, context)
        reports.append(context["message"])
        # That of accept(), and that of the closed socket.
        if len(reports) == 2:
            both.set()

    loop.set_exception_handler(handle)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    listening = server.sockets[0]._sock  # type: ignore[attr-defined]
    with capture_logs() as logs:
        loop.remove_reader(listening)
        loop._accept_connection(  # type: ignore[attr-defined]
            asyncio.Protocol, NoDescriptors(listening), None, server, 1
        )
        server.close()
        async with asyncio.timeout(60):
            await both.wait()
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [
        ("warning", "connections wait: they cannot be accepted")
    ]


async def test_other_errors_are_told() -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    report = LoopErrors()
    loop.set_exception_handler(lambda loop, context: (report(loop, context), told.set()))
    with capture_logs() as logs:
        loop.call_soon(int, "no number")
        async with asyncio.timeout(60):
            await told.wait()
    assert [entry["event"] for entry in logs] == ["unhandled error in the event loop"]
    assert isinstance(logs[0]["exc_info"], ValueError)
