"""Events that are kept for readers: from any number, while they come, and within bounds."""

from __future__ import annotations

import asyncio

import pytest
from factories.servers.router import until
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.gateway.event_log import EventLog, EventLogs


async def read(log: EventLog, after: int = -1) -> list[bytes]:
    return [piece async for piece in log.read(after)]


async def test_readers_get_the_events_behind_theirs_and_wait_for_further_ones() -> None:
    log = EventLogs(1024, 60.0).open()
    log.add([b"0", b"1", b"2"])
    readers = [asyncio.create_task(read(log, after)) for after in (-1, 1, 2)]
    await asyncio.sleep(0)
    log.add([b"3"])
    await asyncio.sleep(0)
    log.end()
    assert [b"".join(await one) for one in readers] == [b"0123", b"23", b"3"]
    assert await read(log) == [b"0123"]
    with pytest.raises(InvalidArgument, match="starting_after"):
        await read(log, 3)


async def test_the_oldest_log_goes_when_there_are_too_many_bytes() -> None:
    logs = EventLogs(10, 60.0)
    first, second = logs.open(), logs.open()
    first.add([b"12345"])
    waiting = asyncio.create_task(read(first, 0))
    await asyncio.sleep(0)
    second.add([b"123456"])
    assert (first.is_dropped, second.is_dropped, logs.num_bytes) == (True, False, 6)
    with pytest.raises(FailedPrecondition, match="--background-event-bytes"):
        await waiting
    first.add([b"more"])
    first.end()
    assert logs.num_bytes == 6
    second.add([b"12345"])
    assert (second.is_dropped, logs.num_bytes) == (True, 0)


async def test_an_ended_log_goes_after_its_time() -> None:
    logs = EventLogs(1024, 0.0)
    log = logs.open()
    log.add([b"1"])
    log.end()
    await until(lambda: log.is_dropped)
    assert logs.num_bytes == 0
    logs.open().add([b"2"])
    logs.close()
    assert logs.num_bytes == 0
