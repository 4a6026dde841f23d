"""Ledger of keys: every answer once, no day over its quota, whoever dies when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from factories.full_disk import full_disk
from factories.servers.postgres import Postgres, needs_postgres, running_postgres
from penstock.common.errors import Unavailable
from penstock.database.postgres_database import PostgresDatabase
from penstock.database.sqlite_database import SqliteDatabase
from penstock.database.transactions import Database, DatabaseFailed, Rows
from penstock.router.keys.ledger import Ledger
from penstock.router.keys.ledger_tables import SCHEMA, AnswerEnd, DayUsage, Reservation, day_of

T = TypeVar("T")
NOW = 1_800_000_000.0
TODAY = day_of(NOW)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres() as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=needs_postgres)])
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Database]:
    """Make databases of one place, as several routers open it."""
    if request.param == "sqlite":
        return lambda: SqliteDatabase(str(tmp_path), "ledger.sqlite", "--ledger", SCHEMA, is_shared=True)
    url = request.getfixturevalue("server").database()
    return lambda: PostgresDatabase(url, "--ledger", SCHEMA, "penstock-router", seconds=10.0)


class Failing:
    """A database that fails on demand: before its work, or after it, as a lost connection does."""

    def __init__(self, inner: Database) -> None:
        self._inner = inner
        self.lock, self.skip_claimed, self.is_own = inner.lock, inner.skip_claimed, inner.is_own
        self.fails = ""

    async def open(self) -> None:
        await self._inner.open()

    async def close(self) -> None:
        await self._inner.close()

    async def run(self, work: Callable[[Rows], T]) -> T:
        if self.fails == "before":
            raise DatabaseFailed("gone")
        result = await self._inner.run(work)
        if self.fails == "after":
            raise DatabaseFailed("gone")
        return result


@asynccontextmanager
async def opened(
    database: Any, *, clock: Callable[[], float] = lambda: NOW, lease: float = 60.0
) -> AsyncIterator[Ledger]:
    """Run a ledger. At the end it is killed: nothing of it is closed but the database."""
    ledger = Ledger(database, lease_seconds=60.0, entry_days=35, max_waiting=64, clock=clock)
    await ledger.open(lambda _: None)
    running = asyncio.create_task(ledger.run())
    try:
        yield ledger
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await database.close()


def reservation(ledger: Ledger, tokens: int, *, limit: int | None = None, day: int = TODAY) -> Reservation:
    return Reservation(
        entry=f"entry-{next(_numbers)}", label="a", day=day, model="m", request="r", router=ledger.router,
        tokens=tokens, limit=limit, began=NOW,
    )  # fmt: skip


def ended(asked: Reservation, prompt: int, completion: int) -> AnswerEnd:
    return AnswerEnd(
        entry=asked.entry, label=asked.label, day=asked.day, prompt_tokens=prompt, completion_tokens=completion,
        status="OK", ended=NOW,
    )  # fmt: skip


async def today(ledger: Ledger) -> DayUsage:
    (found,) = await ledger.usage(TODAY, TODAY)
    return found


async def test_what_an_answer_did_not_use_is_free_again(make_database: Any) -> None:
    async with opened(make_database()) as ledger:
        asked = reservation(ledger, 60, limit=100)
        assert await ledger.reserve(asked) is None
        assert await ledger.reserve(reservation(ledger, 60, limit=100)) == 40
        await ledger.end(ended(asked, 10, 5))
        assert await ledger.reserve(reservation(ledger, 85, limit=100)) is None
        usage = await today(ledger)
        assert (usage.prompt_tokens, usage.completion_tokens, usage.answers, usage.reserved) == (10, 5, 1, 85)


async def test_no_day_is_over_whoever_asks_at_once(make_database: Any) -> None:
    async with opened(make_database()) as one, opened(make_database()) as two:
        asked = [reservation(ledger, 7, limit=100) for ledger in (one, two) for _ in range(20)]
        ledgers = {one.router: one, two.router: two}
        results = await asyncio.gather(*(ledgers[each.router].reserve(each) for each in asked))
        assert results.count(None) == 14
        assert set(results) - {None} == {2}


async def test_an_end_counts_once(make_database: Any) -> None:
    async with opened(make_database()) as ledger:
        asked = reservation(ledger, 60)
        await ledger.reserve(asked)
        await asyncio.gather(*(ledger.end(ended(asked, 10, 5)) for _ in range(3)))
        usage = await today(ledger)
        assert (usage.answers, usage.used, usage.reserved) == (1, 15, 0)


async def test_an_answer_of_a_dead_router_is_lost_and_keeps_its_reservation(make_database: Any) -> None:
    async with opened(make_database()) as dead:
        await dead.reserve(reservation(dead, 60, limit=100))
    # Within its lease nobody knows that it is dead.
    async with opened(make_database(), clock=lambda: NOW + 30) as ledger:
        usage = await today(ledger)
        assert (usage.reserved, usage.lost_answers) == (60, 0)
    async with opened(make_database(), clock=lambda: NOW + 61) as ledger:
        usage = await today(ledger)
        assert (usage.reserved, usage.lost_answers, usage.lost_tokens) == (0, 1, 60)
        assert await ledger.reserve(reservation(ledger, 41, limit=100)) == 40


async def test_an_answer_that_was_taken_for_lost_counts_when_it_ends_after_all(make_database: Any) -> None:
    async with opened(make_database()) as slow:
        asked = reservation(slow, 60)
        await slow.reserve(asked)
        async with opened(make_database(), clock=lambda: NOW + 61) as ledger:
            assert (await today(ledger)).lost_answers == 1
            await slow.end(ended(asked, 10, 5))
            usage = await today(ledger)
            assert (usage.answers, usage.used, usage.lost_answers, usage.lost_tokens) == (1, 15, 0, 0)


async def test_an_end_is_kept_until_the_database_takes_it(make_database: Any) -> None:
    database = Failing(make_database())
    async with opened(database) as ledger:
        asked = reservation(ledger, 60)
        await ledger.reserve(asked)
        database.fails = "before"
        done = ledger.end(ended(asked, 10, 5))
        with pytest.raises(Unavailable, match="ledger"):
            await ledger.reserve(reservation(ledger, 1))
        database.fails = ""
        await done
        assert (await today(ledger)).used == 15


async def test_a_commit_with_a_lost_answer_leaves_neither_more_nor_less(make_database: Any) -> None:
    database = Failing(make_database())
    async with opened(database) as ledger:
        first = reservation(ledger, 60)
        await ledger.reserve(first)
        database.fails = "after"
        done = ledger.end(ended(first, 10, 5))
        with pytest.raises(Unavailable):
            await ledger.reserve(reservation(ledger, 30))
        database.fails = ""
        await done
        while (usage := await today(ledger)).reserved:
            pass
        assert (usage.answers, usage.used) == (1, 15)


async def test_a_caller_that_leaves_while_it_reserves_holds_nothing(make_database: Any) -> None:
    async with opened(make_database()) as ledger:
        asking = asyncio.create_task(ledger.reserve(reservation(ledger, 60)))
        await asyncio.sleep(0)
        asking.cancel()
        await ledger.end(ended(reservation(ledger, 1), 0, 0))
        while (usage := await today(ledger)).reserved:
            pass
        assert (usage.answers, usage.used) == (0, 0)


async def test_a_router_that_stops_leaves_nothing_open(make_database: Any) -> None:
    database = make_database()
    ledger = Ledger(database, lease_seconds=60.0, entry_days=35, max_waiting=64, clock=lambda: NOW)
    await ledger.open(lambda _: None)
    running = asyncio.create_task(ledger.run())
    asked = reservation(ledger, 60)
    await ledger.reserve(asked)
    ledger.end(ended(asked, 10, 5))
    await ledger.close(60.0)
    running.cancel()
    async with opened(make_database()) as after:
        assert (await today(after)).used == 15


async def test_old_entries_go_and_sums_stay(make_database: Any) -> None:
    async with opened(make_database()) as ledger:
        asked = reservation(ledger, 60, day=TODAY - 40)
        await ledger.reserve(asked)
        await ledger.end(ended(asked, 10, 5))
    database = make_database()
    async with opened(database) as ledger:
        assert await database.run(lambda rows: rows.all("SELECT id FROM key_entries")) == []
        assert [one.used for one in await ledger.usage(TODAY - 40, TODAY)] == [15]


async def test_too_many_that_wait_are_refused(make_database: Any) -> None:
    database = Failing(make_database())
    async with opened(database) as ledger:
        database.fails = "before"
        results = await asyncio.gather(
            *(ledger.reserve(reservation(ledger, 1)) for _ in range(100)), return_exceptions=True
        )
        assert all(isinstance(one, Unavailable) for one in results)
        database.fails = ""
        await ledger.end(ended(reservation(ledger, 1), 0, 0))
        assert (await today(ledger)).reserved == 0


async def test_a_full_disk_refuses_what_begins_and_keeps_every_end(tmp_path: Path) -> None:
    database = SqliteDatabase(str(tmp_path), "ledger.sqlite", "--ledger", SCHEMA, is_shared=True)
    async with opened(database) as ledger:
        begun = [reservation(ledger, 60, limit=1000) for _ in range(8)]
        for asked in begun:
            assert await ledger.reserve(asked) is None
        refused = 0
        with full_disk(tmp_path / "ledger.sqlite", tmp_path / "ledger.sqlite-wal"):
            ends = [ledger.end(ended(asked, 10, 5)) for asked in begun]
            for _ in range(5):
                with pytest.raises(Unavailable, match="ledger"):
                    await ledger.reserve(reservation(ledger, 1, limit=1000))
                refused += 1
            assert not any(end.done() for end in ends)
            # What there was is read.
            assert (await today(ledger)).reserved == 8 * 60
            with pytest.raises(Unavailable, match="ledger"):
                await ledger.revoke([b"d" * 32], "a")
        await asyncio.gather(*ends)
        assert await ledger.reserve(reservation(ledger, 1000 - 8 * 15, limit=1000)) is None
        usage = await today(ledger)
        assert (usage.answers, usage.used, usage.reserved) == (8, 8 * 15, 1000 - 8 * 15)
