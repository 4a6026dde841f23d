"""The runner of batches: what it does with a line that has no answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from factories.servers.router import until
from penstock.database.transactions import DatabaseFailed
from penstock.jobs.batch_runner import Answerer, BatchRunner, LineOutcome
from penstock.jobs.batch_store import BatchStore
from penstock.jobs.file_store import FileStore
from penstock.jobs.job_database import open_job_database
from penstock.jobs.job_options import JobOptions
from penstock.jobs.job_records import BatchRecord, BatchState, JobCounts, TakenLine
from penstock.jobs.start_pace import StartPace

URL = "/v1/completions"
LOST = LineOutcome(503, "r", b'{"error": {"code": "backend_lost"}}', is_lost=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.jobs.batch_runner._FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("penstock.jobs.batch_runner._LONGEST_PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def ended_batch(
    answer: Answerer, pace: StartPace | None = None, *, poll_seconds: float = 0.01, is_late: bool = False
) -> AsyncIterator[tuple[BatchRecord, Counter[str]]]:
    """Run a batch of three lines to its end; yield it with the outcomes of its lines.

    `is_late`: the batch comes when the runner has looked, and found none.
    """
    options = JobOptions(job_poll_seconds=60.0 if pace else poll_seconds, job_requests=3 if pace else 1)
    database = open_job_database("temporary")
    await database.open()
    files = FileStore(database, options)
    batches = BatchStore(database, files, options)
    data = "".join(
        f'{{"custom_id": "{number}", "method": "POST", "url": "{URL}", "body": {{}}}}\n' for number in range(3)
    ).encode()
    file = await files.begin("a")
    await files.append(file, 0, data)
    await files.finish(file, name="n", purpose="batch", seconds=None)
    outcomes: Counter[str] = Counter()

    def count(outcome: str) -> None:
        outcomes[outcome] += 1

    pace, looks = pace or StartPace(0.0, 0.0), list[JobCounts]()
    runner = BatchRunner(
        files, batches, options, answer, max_line_bytes=1000, count=count, show=looks.append, pace=pace
    )
    if is_late:
        runner.start()
        await until(lambda: bool(looks))
    made = await batches.create("a", input_file=file.file_id, endpoint=URL, window="1h", seconds=3600.0, metadata={})
    runner.wake() if is_late else runner.start()
    await until(lambda: outcomes["completed"] + outcomes["failed"] == 3)
    yield await batches.get("a", made.batch_id), outcomes
    await runner.stop()
    await database.close()


async def test_a_line_that_loses_backend_after_backend_ends_as_an_error() -> None:
    async def answer(line: TakenLine, _: bytes) -> LineOutcome:
        return LOST if line.number == 1 else LineOutcome(200, "r", b"{}")

    async with ended_batch(answer) as (batch, outcomes):
        assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 2, 1)
        assert outcomes["retried"] == 4


async def test_a_line_that_loses_a_backend_now_and_then_is_answered() -> None:
    losses = iter([LOST] * 4)

    async def answer(_line: TakenLine, _: bytes) -> LineOutcome:
        return next(losses, LineOutcome(200, "r", b"{}"))

    async with ended_batch(answer) as (batch, _):
        assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 3, 0)


async def test_beside_a_caller_the_next_line_starts_in_its_turn_without_a_poll() -> None:
    async def answer(_line: TakenLine, _: bytes) -> LineOutcome:
        return LineOutcome(200, "r", b"{}")

    pace = StartPace(200.0, 60.0)
    with pace.caller():
        async with ended_batch(answer, pace) as (batch, _):
            assert batch.completed == 3
            assert 0.0 <= pace.wait_seconds() <= 0.005


async def test_a_store_that_fails_is_asked_again_at_the_next_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Counter[str]()

    async def answer(_line: TakenLine, _: bytes) -> LineOutcome:
        async def fail(*_: object) -> list[TakenLine]:
            failures["take"] += 1
            raise DatabaseFailed("down")

        monkeypatch.setattr(BatchStore, "take", fail)
        return LineOutcome(200, "r", b"{}")

    async with ended_batch(answer, StartPace(0.0, 0.0)):
        await until(lambda: failures["take"] > 0)
        for _ in range(1000):
            await asyncio.sleep(0)
        # One for each line that ended, and some for what else there was.
        assert failures["take"] < 10


async def test_a_runner_without_batches_looks_ever_less_often_and_asks_one_thing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a slow machine the next search for what is too old would come in between.
    monkeypatch.setattr("penstock.jobs.batch_runner._SWEEP_POLLS", 1e9)
    options = JobOptions(job_poll_seconds=0.02, job_requests=1)
    database = open_job_database("temporary")
    await database.open()
    files, asked, looks = FileStore(database, options), list[int](), list[tuple[float, int]]()
    answered: list[str] = []
    batches, run = BatchStore(database, files, options), database.run

    async def counted(work: Any) -> Any:
        asked.append(1)
        return await run(work)

    async def answer(line: TakenLine, _: bytes) -> LineOutcome:
        answered.append(line.batch_id)
        return LineOutcome(200, "r", b"{}")

    def look(_: JobCounts) -> None:
        looks.append((time.monotonic(), len(asked)))

    database.run = counted  # type: ignore[method-assign]
    runner = BatchRunner(
        files,
        batches,
        options,
        answer,
        max_line_bytes=1000,
        count=lambda _: None,
        show=look,
        pace=StartPace(0.0, 0.0),
    )
    runner.start()
    await until(lambda: len(looks) > 6)
    for number, (before, after) in enumerate(pairwise(looks[:7])):
        assert after[0] - before[0] >= 0.9 * 0.02 * min(2**number, 16)
        assert after[1] - before[1] == 1
    # What another process makes is found, too.
    file = await files.begin("a")
    await files.append(file, 0, b'{"custom_id": "1", "method": "POST", "url": "%b", "body": {}}' % URL.encode())
    await files.finish(file, name="n", purpose="batch", seconds=None)
    made = await batches.create("a", input_file=file.file_id, endpoint=URL, window="1h", seconds=3600.0, metadata={})
    await until(lambda: answered == [made.batch_id])
    await runner.stop()
    await database.close()


async def test_a_runner_at_rest_is_woken_by_a_batch() -> None:
    async def answer(_line: TakenLine, _: bytes) -> LineOutcome:
        return LineOutcome(200, "r", b"{}")

    # The next look is an hour away.
    async with ended_batch(answer, poll_seconds=3600.0, is_late=True) as (batch, _):
        assert batch.completed == 3
