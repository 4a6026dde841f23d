"""The engine's thread: calls from other threads, sleep when idle, and its end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from factories.engine.fake_engine import Answer, FakeRunner, collect, engine_config, request
from penstock.common.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.common.idle_only import IDLE_TENANT
from penstock.common.pace import Pace
from penstock.generation.core.request import FinishReason, Request, RequestOutput
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.loop import EngineLoop


class GatedRunner(FakeRunner):
    """Runner that waits before each step until the test lets it pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.entered.release()
        assert self.gate.acquire(timeout=120)
        return super().execute(output)

    def open(self) -> None:
        for _ in range(10_000):
            self.gate.release()


class Bench:
    """A loop under test and everything it delivered."""

    def __init__(self, runner: FakeRunner, nice: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.runner = runner
        self.engine = Engine(runner.config, runner, None, clock=clock)
        self.answers: dict[str, Answer] = {}
        self.deliveries = 0
        self.failures: list[BaseException] = []
        self.changed = asyncio.Condition()
        self.pauses_over: list[int] = []
        self.loop = EngineLoop(
            self.engine,
            asyncio.get_running_loop(),
            self._deliver,
            self._fail,
            nice=nice,
            on_pause_over=self._note_pause_over,
        )

    def _deliver(self, step: int, outputs: list[RequestOutput]) -> None:
        self.deliveries += 1
        collect(self.answers, outputs)
        self._notification = asyncio.ensure_future(self._notify())

    def _fail(self, failure: BaseException) -> None:
        self.failures.append(failure)
        self._notification = asyncio.ensure_future(self._notify())

    def _note_pause_over(self, number: int) -> None:
        self.pauses_over.append(number)
        self._notification = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(condition)

    async def end_of(self, item: Request) -> Answer:
        await self.until(lambda: item.request_id in self.answers and self.answers[item.request_id].finished is not None)
        return self.answers[item.request_id]


@asynccontextmanager
async def running(runner: FakeRunner | None = None, **config: Any) -> AsyncIterator[Bench]:
    bench = Bench(runner or FakeRunner(engine_config(**config)))
    bench.loop.start()
    try:
        yield bench
    finally:
        if isinstance(bench.runner, GatedRunner):
            bench.runner.open()
        await asyncio.to_thread(bench.loop.stop)


async def test_a_submitted_request_is_answered_with_one_delivery_a_step() -> None:
    async with running() as bench:
        bench.loop.submit(item := request([1], max_new_tokens=5))
        answer = await bench.end_of(item)
        assert len(answer.ids[0]) == 5
        assert bench.deliveries == 5


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is of a process")
async def test_the_thread_is_as_nice_as_it_is_told_and_no_other() -> None:
    def niceness(_: object = None) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    ours = niceness()
    bench = Bench(FakeRunner(engine_config()), nice=3)
    bench.loop.start()
    assert await asyncio.wrap_future(bench.loop.run_on_engine(niceness)) == min(19, ours + 3)
    assert niceness() == ours
    await asyncio.to_thread(bench.loop.stop)


async def test_a_sandbox_that_forbids_niceness_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    bench = Bench(FakeRunner(engine_config()), nice=3)
    bench.loop.start()
    assert await asyncio.wrap_future(bench.loop.run_on_engine(lambda _: 7)) == 7
    await asyncio.to_thread(bench.loop.stop)


async def test_an_idle_engine_takes_no_step() -> None:
    async with running() as bench:
        bench.loop.submit(item := request([1], max_new_tokens=2))
        await bench.end_of(item)
        # The control channel proves that the thread has gone through its loop since.
        for _ in range(3):
            await asyncio.wrap_future(bench.loop.run_on_engine(lambda engine: engine.stats.steps))
        assert len(bench.runner.steps) == 2


async def test_a_request_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = Engine.check

    def counting(engine: Engine, item: Request) -> None:
        checked.append(item.request_id)
        check(engine, item)

    monkeypatch.setattr(Engine, "check", counting)
    async with running() as bench:
        bench.loop.submit(item := request([1], max_new_tokens=2))
        await bench.end_of(item)
    assert checked == [item.request_id]


async def test_the_id_of_a_live_request_is_refused_and_free_again_after_its_end() -> None:
    runner = GatedRunner(engine_config())
    async with running(runner) as bench:
        bench.loop.submit(item := request([1], request_id="same", max_new_tokens=2))
        with pytest.raises(InvalidArgument) as caught:
            bench.loop.submit(request([1], request_id="same"))
        assert (caught.value.field, caught.value.reason) == ("request_id", "DUPLICATE_REQUEST_ID")
        runner.open()
        await bench.end_of(item)
        bench.answers.clear()
        bench.loop.submit(again := request([1], request_id="same", max_new_tokens=2))
        await bench.end_of(again)


def test_an_id_is_free_when_its_last_word_is_delivered() -> None:
    class ImmediateLoop:
        """Event loop that is faster than the engine's thread: it runs a callback before the thread goes on."""

        def call_soon_threadsafe(self, call: Callable[..., None], *arguments: Any) -> None:
            call(*arguments)

    refusals: list[PenstockError] = []
    ends: list[str] = []
    over = threading.Event()

    def deliver(_: int, outputs: list[RequestOutput]) -> None:
        ends.extend(output.request.request_id for output in outputs if output.finished is not None)
        if len(ends) == 2:
            over.set()
        elif ends:
            try:
                loop.submit(request([1], request_id="same", max_new_tokens=1))
            except PenstockError as error:
                refusals.append(error)
                over.set()

    config = engine_config()
    event_loop: Any = ImmediateLoop()
    loop = EngineLoop(Engine(config, FakeRunner(config), None), event_loop, deliver, lambda _: over.set())
    loop.start()
    loop.submit(request([1], request_id="same", max_new_tokens=1))
    assert over.wait(60)
    loop.stop()
    assert (refusals, ends) == ([], ["same", "same"])


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    runner = GatedRunner(engine_config(max_running_sequences=1, max_queued_requests=2))
    async with running(runner) as bench:
        bench.loop.submit(request([1], max_new_tokens=2))
        assert runner.entered.acquire(timeout=60)
        bench.loop.submit(request([2]))
        bench.loop.submit(request([3]))
        with pytest.raises(ResourceExhausted) as caught:
            bench.loop.submit(request([4]))
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after_seconds == 1.0


async def test_the_load_counts_every_accepted_request_while_a_step_runs() -> None:
    runner = GatedRunner(engine_config())
    async with running(runner) as bench:
        bench.loop.submit(first := request([1], max_new_tokens=2))
        assert runner.entered.acquire(timeout=60)
        bench.loop.submit(second := request([2], max_new_tokens=2))
        assert (bench.loop.load.running_requests, bench.loop.load.waiting_requests) == (0, 2)
        runner.gate.release()
        assert runner.entered.acquire(timeout=60)
        assert (bench.loop.load.running_requests, bench.loop.load.waiting_requests) == (1, 1)
        runner.open()
        for item in (first, second):
            await bench.end_of(item)
        assert (bench.loop.load.running_requests, bench.loop.load.waiting_requests) == (0, 0)


async def test_an_abort_costs_at_most_the_step_in_progress() -> None:
    runner = GatedRunner(engine_config())
    async with running(runner) as bench:
        bench.loop.submit(item := request([1], max_new_tokens=100))
        assert runner.entered.acquire(timeout=60)
        bench.loop.abort([item.request_id, "unknown"], Cancelled("gone", reason="CLIENT_GONE"))
        runner.gate.release()
        answer = await bench.end_of(item)
        assert answer.finished is not None
        assert answer.finished.sequences[0].reason is FinishReason.ABORTED
        assert isinstance(answer.finished.error, Cancelled)
        assert len(runner.steps) == 1
        used = await asyncio.wrap_future(bench.loop.run_on_engine(lambda engine: engine.load().kv_blocks_used))
        assert used == 0


async def test_stopping_ends_every_request_and_joins_the_thread() -> None:
    runner = GatedRunner(engine_config(max_running_sequences=1))
    async with running(runner) as bench:
        bench.loop.submit(started := request([1], max_new_tokens=100))
        bench.loop.submit(queued := request([2], max_new_tokens=100))
        assert runner.entered.acquire(timeout=60)
        stopping = asyncio.ensure_future(asyncio.to_thread(bench.loop.stop))
        # The thread is held in a step: only a loop that is stopping answers at once.
        await asyncio.to_thread(lambda: any(iter(lambda: bench.loop.run_on_engine(lambda _: None).done(), True)))
        runner.open()
        await stopping
        for item in (started, queued):
            last = (await bench.end_of(item)).finished
            assert last is not None
            assert last.error is not None
            assert last.error.reason == "ENGINE_STOPPED"
        with pytest.raises(Unavailable):
            bench.loop.submit(request([3]))
        with pytest.raises(Unavailable):
            await asyncio.wrap_future(bench.loop.run_on_engine(lambda engine: 0))
        assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


async def test_a_broken_step_ends_every_stream_tells_who_was_in_it_and_reports_the_failure() -> None:
    runner = GatedRunner(engine_config(max_running_sequences=1))
    runner.fail_at_step = 1
    async with running(runner) as bench:
        items = [request([number], max_new_tokens=9) for number in (1, 2)]
        for item in items:
            bench.loop.submit(item)
        assert runner.entered.acquire(timeout=60)
        bench.loop.submit(late := request([3]))
        runner.open()
        for item, reason in zip((*items, late), ("STEP_FAILED", "ENGINE_FAILED", "ENGINE_FAILED"), strict=True):
            last = (await bench.end_of(item)).finished
            assert last is not None
            assert last.error is not None
            assert (last.error.reason, "device" in last.error.message) == (reason, False)
        await bench.until(lambda: bool(bench.failures))
        assert [str(failure) for failure in bench.failures] == ["device lost"]


async def test_an_exit_on_the_thread_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GatedRunner(engine_config())
    monkeypatch.setattr(runner, "execute", Mock(side_effect=SystemExit(3)))
    async with running(runner) as bench:
        bench.loop.submit(item := request([1]))
        last = (await bench.end_of(item)).finished
        assert last is not None
        assert last.error is not None
        await bench.until(lambda: bool(bench.failures))
        assert isinstance(bench.failures[0], SystemExit)


async def test_a_request_that_turns_out_impossible_on_the_thread_still_gets_its_end() -> None:
    async with running() as bench:
        bench.loop.submit(item := request([1], eos_token_ids=(2,), resumed_token_ids=[[2, 2]]))
        answer = await bench.end_of(item)
        assert answer.finished is not None
        assert isinstance(answer.finished.error, InvalidArgument)


async def test_work_on_the_engine_thread_returns_or_raises_to_its_caller() -> None:
    async with running() as bench:
        assert (
            await asyncio.wrap_future(bench.loop.run_on_engine(lambda _: threading.current_thread().name)) == "engine"
        )
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(bench.loop.run_on_engine(lambda _: 1 // 0))


async def test_many_requests_from_many_threads_each_get_exactly_one_end() -> None:
    async with running(max_running_sequences=8, num_blocks=40) as bench:
        items = [request([number % 5] * (1 + number % 7), max_new_tokens=1 + number % 9) for number in range(120)]

        def submit(part: list[Request]) -> None:
            for position, item in enumerate(part):
                bench.loop.submit(item)
                if position % 3 == 0:
                    bench.loop.abort([item.request_id])

        await asyncio.gather(*(asyncio.to_thread(submit, items[first::4]) for first in range(4)))
        for item in items:
            await bench.end_of(item)
        assert len(bench.answers) == len(items)
        assert bench.loop.load.kv_blocks_used == 0


async def test_one_tenant_leaves_a_part_of_the_queue_to_others() -> None:
    runner = GatedRunner(engine_config(max_running_sequences=1, max_queued_requests=4))
    async with running(runner) as bench:
        bench.loop.submit(request([1], max_new_tokens=2, fair_share_key="a"))
        assert runner.entered.acquire(timeout=60)
        for number in range(3):
            bench.loop.submit(request([number + 2], fair_share_key="a"))
        with pytest.raises(ResourceExhausted) as caught:
            bench.loop.submit(request([9], fair_share_key="a"))
        assert caught.value.reason == "QUEUE_FULL"
        bench.loop.submit(request([9], fair_share_key="b"))
        runner.open()


async def test_requests_that_no_step_has_seen_yet_count_in_the_forecast() -> None:
    """Many that come while one step runs are not all let in: each knows of those before it."""
    runner = GatedRunner(engine_config(max_running_sequences=1))
    async with running(runner) as bench:
        pace = Pace(tokens_per_second=10.0, step_seconds=0.01, full_step_seconds=0.01, is_busy=True)
        bench.loop.submit(request([1], max_new_tokens=2))
        assert runner.entered.acquire(timeout=60)
        bench.loop._load = bench.loop._load._replace(pace=pace)
        soon = time.monotonic() + 10.0
        # 20 tokens each, at 10 a second, and the 3 of the first request.
        for number in range(4):
            bench.loop.submit(request([number + 2] * 10, max_new_tokens=10, deadline=soon))
        with pytest.raises(ResourceExhausted) as caught:
            bench.loop.submit(request([9] * 10, max_new_tokens=10, deadline=soon))
        assert caught.value.reason == "OVERLOADED"
        # One that another backend began goes on.
        resumed = request([1] * 10, max_new_tokens=10, deadline=soon, resumed_token_ids=[[3]])
        bench.loop.submit(resumed)
        with pytest.raises(DeadlineExceeded):
            bench.loop.submit(request([1], deadline=time.monotonic() - 1.0))
        runner.open()


class TimedRunner(FakeRunner):
    """Runner whose steps take a tenth of a second, by a clock that nothing else moves."""

    now = 0.0

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.now += 0.1
        return super().execute(output)


def has_no_step(loop: EngineLoop) -> bool:
    """Wait until no step is in progress; False after a minute."""
    until = time.monotonic() + 60.0
    while loop.step_in_progress.seconds and time.monotonic() < until:
        time.sleep(0.001)
    return loop.step_in_progress.seconds == 0.0


async def test_while_idle_capacity_rests_commands_run_and_a_caller_begins_at_once() -> None:
    runner = TimedRunner(engine_config())
    bench = Bench(runner, clock=lambda: runner.now)
    bench.loop.start()
    try:
        bench.loop.submit(caller := request([1], max_new_tokens=1))
        await bench.end_of(caller)
        bench.loop.submit(line := request([2], max_new_tokens=2, fair_share_key=IDLE_TENANT))
        await bench.until(lambda: line.request_id in bench.answers)
        # Its clock stands: the rest lasts.
        for _ in range(3):
            assert await asyncio.wrap_future(bench.loop.run_on_engine(lambda engine: engine.stats.steps)) == 2
        assert await asyncio.to_thread(has_no_step, bench.loop)
        bench.loop.submit(caller := request([3], max_new_tokens=1, arrival_time=runner.now))
        await bench.end_of(caller)
        assert bench.answers[line.request_id].finished is None
        runner.now += 1.0
        assert len((await bench.end_of(line)).ids[0]) == 2
    finally:
        await asyncio.to_thread(bench.loop.stop)


async def test_a_rest_does_not_hold_up_the_end() -> None:
    runner = TimedRunner(engine_config(idle_share=0.01))
    bench = Bench(runner, clock=lambda: runner.now)
    bench.loop.start()
    bench.loop.submit(caller := request([1], max_new_tokens=1))
    await bench.end_of(caller)
    bench.loop.submit(line := request([2], max_new_tokens=2, fair_share_key=IDLE_TENANT))
    await bench.until(lambda: line.request_id in bench.answers)
    assert await asyncio.to_thread(bench.loop.stop)
    finished = (await bench.end_of(line)).finished
    assert finished is not None
    assert isinstance(finished.error, PenstockError)


# Pauses.


def reason_of(answer: Answer) -> FinishReason:
    assert answer.finished is not None
    return answer.finished.sequences[0].reason


async def paused(bench: Bench, seconds: float = 600.0, **fields: Any) -> tuple[Request, list[int]]:
    """Pause in the middle of a request's answer. Return it and its ids so far."""
    runner = bench.runner
    assert isinstance(runner, GatedRunner)
    bench.loop.submit(item := request([1, 2, 3], max_new_tokens=20, **fields))
    assert runner.entered.acquire(timeout=60)
    held = bench.loop.pause(1, seconds)
    runner.open()
    await asyncio.wrap_future(held)
    await bench.until(lambda: item.request_id in bench.answers)
    return item, list(bench.answers[item.request_id].ids[0])


async def test_a_pause_holds_the_steps_and_the_blocks_and_the_answer_stays_the_same() -> None:
    async with running() as bench:
        bench.loop.submit(plain := request([1, 2, 3], max_new_tokens=20))
        whole = (await bench.end_of(plain)).ids[0]
    async with running(GatedRunner(engine_config())) as bench:
        item, begun = await paused(bench)
        steps, used = len(bench.runner.steps), bench.loop.load.kv_blocks_used
        assert 0 < len(begun) < 20
        assert used > 0
        # The control channel proves that the thread has gone through its loop since.
        for _ in range(3):
            assert await asyncio.wrap_future(bench.loop.run_on_engine(lambda engine: engine.has_work))
        bench.loop.submit(late := request([7], max_new_tokens=2))
        await asyncio.wrap_future(bench.loop.run_on_engine(lambda _: None))
        assert (len(bench.runner.steps), bench.loop.load.kv_blocks_used, bench.loop.is_paused) == (steps, used, True)
        await asyncio.wrap_future(bench.loop.resume())
        assert not bench.loop.is_paused
        assert (await bench.end_of(item)).ids[0] == whole
        await bench.end_of(late)
        # No prompt was computed again: a row for each token after the first.
        assert sum(step.num_tokens for step in bench.runner.steps) == 3 + 19 + 2
        assert not bench.pauses_over


async def test_an_abort_in_a_pause_ends_its_request_at_once() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, begun = await paused(bench)
        bench.loop.abort([item.request_id])
        answer = await bench.end_of(item)
        assert (answer.ids[0], reason_of(answer)) == (begun, FinishReason.ABORTED)
        assert (bench.loop.load.kv_blocks_used, bench.loop.load.running_requests) == (0, 0)
        assert bench.loop.is_paused


async def test_a_deadline_in_a_pause_ends_its_request_at_once() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, begun = await paused(bench, arrival_time=time.monotonic(), deadline=time.monotonic() + 0.5)
        answer = await bench.end_of(item)
        assert answer.ids[0] == begun
        assert answer.finished is not None
        assert isinstance(answer.finished.error, DeadlineExceeded)
        assert bench.loop.is_paused


async def test_max_time_counts_in_a_pause() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, begun = await paused(bench, max_time=0.3)
        answer = await bench.end_of(item)
        assert (answer.ids[0], reason_of(answer)) == (begun, FinishReason.MAX_TIME)
        assert bench.loop.is_paused


async def test_a_pause_that_is_forgotten_ends_by_itself() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, _ = await paused(bench, 0.2)
        assert len((await bench.end_of(item)).ids[0]) == 20
        await bench.until(lambda: bench.pauses_over == [1])
        assert not bench.loop.is_paused


async def test_a_pause_does_not_keep_a_processor_busy() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, _ = await paused(bench, deadline=time.monotonic() + 600.0)
        looks, end_overdue = 0, bench.engine.end_overdue

        def count() -> list[RequestOutput]:
            nonlocal looks
            looks += 1
            return end_overdue()

        bench.engine.end_overdue = count  # type: ignore[method-assign]
        await asyncio.sleep(0.3)
        # The look that belongs to the pause's own command may come late.
        assert looks <= 1
        assert bench.loop.step_in_progress.seconds == 0.0
        bench.loop.abort([item.request_id])
        await bench.end_of(item)
        assert looks == 1


async def test_a_pause_holds_idle_capacity_and_its_rest_goes_on_after_it() -> None:
    runner = TimedRunner(engine_config())
    bench = Bench(runner, clock=lambda: runner.now)
    bench.loop.start()
    try:
        bench.loop.submit(caller := request([1], max_new_tokens=1))
        await bench.end_of(caller)
        bench.loop.submit(line := request([2], max_new_tokens=2, fair_share_key=IDLE_TENANT))
        await bench.until(lambda: line.request_id in bench.answers)
        await asyncio.wrap_future(bench.loop.pause(1, 600.0))
        # The rest is over long before the pause is.
        runner.now += 100.0
        for _ in range(3):
            assert await asyncio.wrap_future(bench.loop.run_on_engine(lambda engine: engine.stats.steps)) == 2
        await asyncio.wrap_future(bench.loop.resume())
        assert len((await bench.end_of(line)).ids[0]) == 2
    finally:
        await asyncio.to_thread(bench.loop.stop)


async def test_a_second_pause_takes_the_place_of_the_first() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, _ = await paused(bench, 600.0)
        await asyncio.wrap_future(bench.loop.pause(2, 0.1))
        await bench.end_of(item)
        await bench.until(lambda: bench.pauses_over == [2])


async def test_time_in_a_pause_is_no_steps_time() -> None:
    """The pace that deadlines are held against must not fall."""
    async with running(GatedRunner(engine_config())) as bench:
        item, _ = await paused(bench, 0.5)
        await bench.end_of(item)
        assert bench.loop.load.pace.step_seconds < 0.4


async def test_a_paused_engine_can_be_stopped() -> None:
    async with running(GatedRunner(engine_config())) as bench:
        item, _ = await paused(bench)
        assert await asyncio.to_thread(bench.loop.stop, 60.0)
        assert reason_of(await bench.end_of(item)) == FinishReason.ERROR
