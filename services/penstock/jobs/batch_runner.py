"""Runs the lines of batches, a few at a time, and keeps each answer; whatever it leaves is taken up by the next one.

Lines use idle capacity only: router and engine let them wait while other requests are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.common.errors import NotFound
from penstock.common.logging import get_logger
from penstock.database.transactions import DatabaseFailed
from penstock.jobs.batch_lines import MOST_PROBLEMS, LineCheck, duplicate, lines_of
from penstock.jobs.batch_store import BatchStore
from penstock.jobs.file_store import FileStore
from penstock.jobs.job_options import JobOptions
from penstock.jobs.job_records import BatchRecord, JobCounts, LineProblem, NewLine, TakenLine
from penstock.jobs.line_answer import answered_line
from penstock.jobs.start_pace import StartPace

_log = get_logger("penstock.jobs")
# Seconds before the lines go on after an answer that says "later": doubled each time, up to the second number.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 15.0
# Backends that one line may lose, and lines with remembered losses.
_MOST_LOSSES, _MOST_REMEMBERED = 5, 4096
# Renewals of a lease within its life, and polls between two searches for what is too old.
_RENEWALS, _SWEEP_POLLS = 3, 60
# Polls that a runner without batches waits at most: each look that finds none doubles its wait.
_MOST_IDLE_POLLS = 16
# Lines that one transaction adds.
_LINES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """Answer of an endpoint to one line. `body` is JSON; None: the line is to be sent again later."""

    status: int
    request_id: str
    body: bytes | None
    # A backend ended while it ran, which the line may have caused: it is sent again a few times.
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Pause:
    """Pause of one batch. `until`: a time of time.monotonic()."""

    seconds: float
    until: float


# Sends a line's bytes to its endpoint.
Answerer = Callable[[TakenLine, bytes], Awaitable[LineOutcome]]


class BatchRunner:
    """Runner of one process. Belongs to one event loop."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        options: JobOptions,
        answer: Answerer,
        *,
        max_line_bytes: int,
        count: Callable[[str], None],
        show: Callable[[JobCounts], None],
        pace: StartPace,
    ) -> None:
        """`count`: called with the outcome of each line (completed, failed, retried or dropped). `show`: called with
        what the store has, now and then. `pace`: at which lines start.
        """
        self._files, self._batches, self._options = files, batches, options
        self._answer, self._max_line_bytes = answer, max_line_bytes
        self._count, self._show, self._pace = count, show, pace
        # The last search found as many lines as were asked for: there are probably more.
        self._has_more = False
        self._holder = secrets.token_hex(8)
        self._wake = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], TakenLine] = {}
        # By batch: its last answer was "later".
        self._pauses: dict[str, _Pause] = {}
        # Backends lost by batch and line.
        self._losses: Counter[tuple[str, int]] = Counter()
        # Times of time.monotonic(); 0: at once.
        self._next_poll = self._next_renewal = self._next_sweep = 0.0
        self._is_asked = False
        # Polls until the next look, since the last looks found no batch; 0: there are some.
        self._idle_polls = 0
        self._main: asyncio.Task[None] | None = None
        self._validation: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Number of lines that are with the router now."""
        return len(self._tasks)

    def start(self) -> None:
        """Begin to run; the store is open."""
        self._main = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for work now: a batch came, or was cancelled."""
        self._is_asked = True
        self._wake.set()

    async def stop(self) -> None:
        """Give up what is in flight, so that another process takes it up at once."""
        mine = [task for task in (self._main, self._validation, *self._tasks) if task is not None]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        with contextlib.suppress(DatabaseFailed):
            await self._batches.release_all(self._holder)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._keep_house()
                if not self._idle_polls:
                    await self._take()
            except DatabaseFailed as error:
                _log.error("the store of jobs failed", error=str(error))
            except Exception:
                # The batches of all callers go on after a fault of one.
                _log.exception("the runner of batches failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_wait()):
                    await self._wake.wait()

    def _seconds_to_wait(self) -> float:
        """Seconds until the next look for work, if nothing wakes this runner before."""
        poll, is_full = self._options.job_poll_seconds, len(self._tasks) >= self._options.job_requests
        if self._idle_polls:
            return poll * self._idle_polls
        return poll if is_full or not self._has_more else min(poll, self._pace.wait_seconds())

    async def _keep_house(self) -> None:
        """Do what is due at every poll, and what an answered line alone does not call for."""
        now, options = time.monotonic(), self._options
        if now < self._next_poll and not self._is_asked:
            return
        self._is_asked, self._next_poll = False, now + options.job_poll_seconds
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_POLLS * options.job_poll_seconds
            await self._files.sweep()
            await self._batches.sweep()
        counts = await self._batches.counts()
        self._show(counts)
        if not counts.batches:
            # One that is made here wakes this runner. Of another gateway's it has its lines some polls later.
            self._idle_polls = min(max(2 * self._idle_polls, 1), _MOST_IDLE_POLLS)
            self._pauses.clear()
            return
        self._idle_polls = 0
        if now >= self._next_renewal:
            self._next_renewal = now + options.job_lease_seconds / _RENEWALS
            await self._batches.renew(self._tasks.values(), self._holder)
        self._give_up(await self._batches.end_overdue())
        await self._validate_next()

    def _give_up(self, ended: list[str]) -> None:
        for task, line in self._tasks.items():
            if line.batch_id in ended:
                task.cancel()
        # Those of batches that another gateway ended go some time after their end.
        old = time.monotonic() - _LONGEST_PAUSE_SECONDS
        self._pauses = {
            batch_id: pause for batch_id, pause in self._pauses.items() if batch_id not in ended and pause.until > old
        }

    # Validation.

    async def _validate_next(self) -> None:
        if self._validation is not None and not self._validation.done():
            return
        record = await self._batches.take_new(self._holder)
        if record is not None:
            self._validation = asyncio.create_task(self._validate(record))
            self._validation.add_done_callback(lambda _: self.wake())

    async def _validate(self, record: BatchRecord) -> None:
        try:
            total, problems = await self._read_lines(record)
            if problems:
                await self._batches.refuse(record.batch_id, problems[:MOST_PROBLEMS])
            else:
                await self._batches.start(record.batch_id, total)
        except DatabaseFailed as error:
            _log.error("a batch was not validated", batch=record.batch_id, error=str(error))

    async def _read_lines(self, record: BatchRecord) -> tuple[int, list[LineProblem]]:
        """Add the lines of a batch to the store; return their number, and what is wrong with them."""
        check, total = LineCheck(record.endpoint, self._max_line_bytes), 0
        problems: list[LineProblem] = []
        most = self._options.max_batch_lines
        try:
            file = await self._files.get(record.owner, record.input_file)
        except NotFound:
            return 0, [LineProblem("file_not_found", "the input file is gone")]
        async for raw in lines_of(self._files.content(file), self._max_line_bytes):
            # Parsing holds up other threads, too: a piece at a time.
            checked = await asyncio.to_thread(check.check_all, raw)
            good = [line for line in checked if isinstance(line, NewLine)]
            problems += [line for line in checked if isinstance(line, LineProblem)]
            total += len(good)
            if total > most:
                return 0, [LineProblem("too_many_lines", f"the file has more than {most} lines (--max-batch-lines)")]
            for first in range(0, len(good), _LINES_AT_ONCE):
                twice = await self._batches.add_lines(record.batch_id, good[first : first + _LINES_AT_ONCE])
                if twice is None:
                    # Cancelled meanwhile: what follows changes nothing.
                    return 0, []
                problems += [duplicate(line) for line in twice]
            if len(problems) >= MOST_PROBLEMS:
                break
        if not total and not problems:
            problems.append(LineProblem("empty_file", "the file has no lines"))
        return total, problems

    # Lines.

    async def _take(self) -> None:
        free = self._pace.room(self._options.job_requests - len(self._tasks))
        if free <= 0:
            # Not known, so it is looked at in the next turn: the last one may have gone by before a batch came.
            self._has_more = True
            return
        in_flight = Counter(line.owner for line in self._tasks.values())
        now = time.monotonic()
        # One at a time until an answer comes: the others of the batch would probably be refused, too.
        room = {batch_id: int(now >= pause.until) for batch_id, pause in self._pauses.items()}
        # A store that fails is asked again at the next poll, and not at once.
        self._has_more = False
        lines = await self._batches.take(self._holder, free, in_flight, room)
        self._has_more = len(lines) == free
        for line in lines:
            task = asyncio.create_task(self._run_line(line))
            self._tasks[task] = line
            task.add_done_callback(self._line_is_over)

    def _line_is_over(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._wake.set()

    async def _run_line(self, line: TakenLine) -> None:
        try:
            data = await self._files.read(line.input_file, line.place, line.num_bytes)
            outcome = await self._answer(line, data)
            if outcome.body is None or (outcome.is_lost and self._may_lose_more(line)):
                # Its model alone may be away: the batch's other lines come first.
                rest = self._pause(line.batch_id)
                self._count("retried")
                await self._batches.release(line, self._holder, rest)
                return
            self._pauses.pop(line.batch_id, None)
            self._losses.pop((line.batch_id, line.number), None)
            has_failed = outcome.status != 200
            answer = answered_line(line.custom_id, outcome.status, outcome.request_id, outcome.body)
            is_kept = await self._batches.answer(line, answer, has_failed=has_failed)
            self._count(("failed" if has_failed else "completed") if is_kept else "dropped")
        except DatabaseFailed as error:
            # Its lease ends, and it is answered again.
            _log.error("a line's answer was not kept", batch=line.batch_id, error=str(error))
            self._pause(line.batch_id)
            self._count("retried")
        except Exception:
            _log.exception("a line was not answered", batch=line.batch_id)
            self._pause(line.batch_id)
            self._count("retried")

    def _may_lose_more(self, line: TakenLine) -> bool:
        """Count a loss; False when the line has lost as many backends as it may: it probably ends them."""
        if len(self._losses) >= _MOST_REMEMBERED:
            self._losses.clear()
        self._losses[line.batch_id, line.number] += 1
        return self._losses[line.batch_id, line.number] < _MOST_LOSSES

    def _pause(self, batch_id: str) -> float:
        """Let a batch's next lines wait, longer than the last time; return the seconds."""
        now, last = time.monotonic(), self._pauses.get(batch_id, _Pause(0.0, 0.0))
        if now >= last.until:
            seconds = min(max(2 * last.seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            last = self._pauses[batch_id] = _Pause(seconds, now + seconds)
        return last.seconds
