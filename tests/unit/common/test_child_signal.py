"""Signals to children of an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from penstock.common.child_signal import signal_child

ASLEEP = "import signal; signal.pause()"


@asynccontextmanager
async def ended_unseen(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    """A child that was killed, of which the loop hears only afterwards."""
    may_look, waitpid = threading.Event(), os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        may_look.wait()
        return waitpid(pid, options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "waitpid", late)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ASLEEP)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 (the loop must not run)
        yield process
        may_look.set()
        await process.wait()


async def test_a_child_that_has_just_ended_keeps_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ended_unseen(monkeypatch) as process:
        signal_child(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGKILL


async def test_one_that_runs_gets_the_signal_and_one_that_was_waited_for_gets_none() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ASLEEP)
    signal_child(process, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
    signal_child(process, signal.SIGKILL)
    assert process.returncode == -signal.SIGTERM
