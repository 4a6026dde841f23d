"""The thread of a database."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest
from penstock.database.transactions import DatabaseFailed
from penstock.database.work_thread import WorkThread

_HELD = """
import asyncio, threading
from penstock.database.work_thread import WorkThread

async def main():
    thread, begun = WorkThread("held"), threading.Event()
    work = asyncio.create_task(thread.run(lambda: begun.set() or threading.Event().wait()))
    await asyncio.to_thread(begun.wait)
    thread.close()

asyncio.run(main())
"""


def test_a_process_ends_while_the_server_holds_the_thread() -> None:
    subprocess.run([sys.executable, "-c", _HELD], check=True, timeout=120)


async def test_work_runs_in_order_and_none_of_a_caller_that_left() -> None:
    thread, begun, may_end, done = WorkThread("t"), asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        done.append(1)

    one = asyncio.create_task(thread.run(first))
    await begun.wait()
    gone, three = (asyncio.create_task(thread.run(partial(done.append, number))) for number in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    thread.close()
    may_end.set()
    await asyncio.gather(one, three)
    assert done == [1, 3]
    with pytest.raises(DatabaseFailed):
        await thread.run(lambda: None)


async def test_an_error_of_the_work_is_the_callers() -> None:
    thread = WorkThread("t")

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await thread.run(fail)
    assert await thread.run(lambda: 5) == 5
    thread.close()
