"""Ledger of what keys used: reservations before answers, and ends after them, in groups of one transaction each.

What comes while a transaction runs is in the next one, so that a busy router writes once for many requests. An end is
kept until it is written, however long the database fails; a reservation fails with it, so that ends stay few.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.common.errors import StartupError, Unavailable
from penstock.common.logging import get_logger
from penstock.database.transactions import Database, DatabaseFailed, Rows
from penstock.router.keys import ledger_tables as tables
from penstock.router.keys.ledger_tables import AnswerEnd, DayUsage, Reservation

# Operations of one transaction.
_MOST_TOGETHER = 512
# Seconds before ends are tried again.
_RETRY_SECONDS = 0.2
# Renewals of a lease in its length, and looks for revoked keys.
RENEWALS = 3.0
_log = get_logger("penstock.router")


@dataclass(slots=True, eq=False)
class _WaitingEntry:
    """An operation that is not written yet; `done` has None, or the tokens that a refused reservation found left."""

    operation: Reservation | AnswerEnd
    done: asyncio.Future[int | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def order(self) -> tuple[str, int]:
        """Order in which all routers hold the sums of days."""
        return self.operation.label, self.operation.day


class Ledger:
    """Ledger of one router process. Belongs to one event loop; the database has a thread of its own."""

    def __init__(
        self,
        database: Database,
        *,
        lease_seconds: float,
        entry_days: int,
        max_waiting: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make it; `open` opens the database. `lease_seconds`: time after which a silent router counts as dead."""
        self.router = uuid.uuid4().hex
        self._database, self._clock = database, clock
        self._lease_seconds, self._entry_days, self._max_waiting = lease_seconds, entry_days, max_waiting
        self._waiting: deque[_WaitingEntry] = deque()
        self._has_work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_failing = self._is_open = False
        self._on_revoked: Callable[[Sequence[bytes]], None] = lambda _: None

    @property
    def waiting(self) -> int:
        """Number of operations that no transaction has yet."""
        return len(self._waiting)

    @property
    def now(self) -> float:
        """Present time, in seconds since 1970."""
        return self._clock()

    async def open(self, on_revoked: Callable[[Sequence[bytes]], None]) -> None:
        """Open the database. `on_revoked` is called with all revoked digests, now and later.

        Raises StartupError naming --ledger.
        """
        self._on_revoked = on_revoked
        await self._database.open()
        try:
            await self._beat()
        except DatabaseFailed as error:
            raise StartupError(f"--ledger: {error}", flag="--ledger") from error
        self._is_open = True

    async def run(self) -> None:
        """Write, and show that this router lives, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_all())
            tasks.create_task(self._keep_alive())

    async def close(self, patience_seconds: float) -> None:
        """Write what waits, for at most this long, and close the database. `run` is cancelled after this."""
        if self._is_open:
            with contextlib.suppress(TimeoutError, DatabaseFailed):
                async with asyncio.timeout(patience_seconds):
                    await self._idle.wait()
                    await self._database.run(lambda rows: tables.forget_router(rows, self.router))
        await self._database.close()

    async def reserve(self, asked: Reservation) -> int | None:
        """Write a reservation. Return None, or the tokens left of the day's quota where they are too few.

        Raises Unavailable LEDGER_DOWN.
        """
        if len(self._waiting) >= self._max_waiting:
            raise _down()
        try:
            return await self._put(asked).done
        except BaseException:
            # It may stand nevertheless: the caller left, or the database's answer was lost.
            self.end(
                AnswerEnd(
                    entry=asked.entry,
                    label=asked.label,
                    day=asked.day,
                    prompt_tokens=0,
                    completion_tokens=0,
                    status="NOT_BEGUN",
                    ended=self.now,
                )
            )
            raise

    def end(self, ended: AnswerEnd) -> asyncio.Future[int | None]:
        """Begin to write an end; return a future that is done when it is written."""
        return self._put(ended).done

    async def usage(self, first_day: int, last_day: int) -> list[DayUsage]:
        """Return sums of all keys between two days. Raises Unavailable LEDGER_DOWN."""
        try:
            return await self._database.run(lambda rows: tables.usage(rows, first_day, last_day))
        except DatabaseFailed:
            raise _down() from None

    async def revoke(self, digests: Sequence[bytes], label: str) -> None:
        """Write down that secrets are revoked, for all routers. Raises Unavailable LEDGER_DOWN."""
        try:
            await self._database.run(lambda rows: tables.revoke(rows, digests, label))
        except DatabaseFailed:
            raise _down() from None
        self._on_revoked(digests)

    def _put(self, operation: Reservation | AnswerEnd) -> _WaitingEntry:
        waiting = _WaitingEntry(operation)
        self._waiting.append(waiting)
        self._idle.clear()
        self._has_work.set()
        return waiting

    async def _write_all(self) -> None:
        while True:
            await self._has_work.wait()
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_TOGETHER))]
            if not group:
                self._has_work.clear()
                self._idle.set()
                continue
            # Of one entry the reservation stays before its end: sorting is stable.
            group.sort(key=lambda one: one.order)
            try:
                results = await self._database.run(partial(self._write, group))
            except DatabaseFailed as error:
                self._note_failure(error)
                self._give_up(group)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            except BaseException:
                self._waiting.extendleft(reversed(group))
                raise
            self._is_failing = False
            for one, result in zip(group, results, strict=True):
                if not one.done.done():
                    one.done.set_result(result)

    def _write(self, group: Sequence[_WaitingEntry], rows: Rows) -> list[int | None]:
        lock = self._database.lock
        results: list[int | None] = []
        for one in group:
            if isinstance(one.operation, Reservation):
                results.append(tables.reserve(rows, lock, one.operation))
            else:
                tables.end(rows, lock, one.operation)
                results.append(None)
        return results

    def _give_up(self, group: Sequence[_WaitingEntry]) -> None:
        """Refuse the reservations of a group that was not written, and keep its ends."""
        kept = []
        for one in group:
            if isinstance(one.operation, Reservation):
                if not one.done.done():
                    one.done.set_exception(_down())
            else:
                kept.append(one)
        self._waiting.extendleft(reversed(kept))

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / RENEWALS)
            try:
                await self._beat()
            except DatabaseFailed as error:
                self._note_failure(error)

    async def _beat(self) -> None:
        """Show that this router lives, take entries of dead ones for lost, and look for revoked keys."""
        now = self._clock()

        def look(rows: Rows) -> tuple[list[tuple[str, int]], list[bytes]]:
            tables.show_alive(rows, self.router, now + self._lease_seconds)
            tables.forget_old(rows, now, self._entry_days)
            return tables.days_with_dead(rows, now), tables.revoked(rows)

        dead, revoked = await self._database.run(look)
        self._on_revoked(revoked)
        lock = self._database.lock
        for label, day in dead:
            lost = await self._database.run(partial(tables.lose, lock=lock, label=label, day=day, now=now))
            if lost:
                _log.warning("answers lost with their router", key=label, answers=lost)

    def _note_failure(self, error: DatabaseFailed) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.error("the ledger does not answer: requests with keys are refused", cause=str(error))


def _down() -> Unavailable:
    return Unavailable("the ledger of keys does not answer", reason="LEDGER_DOWN", retry_after_seconds=1.0)
