"""Engine.dump: complete, bounded, harmless, and silent about contents."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from factories.engine.fake_engine import FakeDrafter, FakeRunner, collect, engine_config, make_engine, request
from penstock.generation.core.decoding_mode import GuidanceOptions
from penstock.generation.core.request import Request
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.engine import step_plan
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.dump import EngineDump, GroupDump, request_key
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.engine.step_trace import StepTrace
from penstock.generation.engine.trace_file import TraceFile
from structlog.testing import capture_logs

# Of the prompts, and larger than any length, count or hash of these tests.
CANARY = 7_654_321


def by_key(dump: EngineDump, item: Request) -> GroupDump:
    key = request_key(item.request_id)
    (found,) = (group for group in (*dump.running, *dump.waiting) if group.request == key)
    return found


def test_an_idle_engine() -> None:
    engine, _ = make_engine()
    dump = engine.dump()
    assert (dump.running, dump.waiting, dump.last_step.rows) == ((), (), 0)
    assert (dump.pool.total, dump.pool.free, dump.pool.used, dump.pool.references) == (64, 64, 0, 0)
    assert dump.config["max_batch_tokens"] == 64
    assert dump.counters["steps"] == 0
    assert dump.stack == ()


def test_who_runs_who_waits_and_for_what() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=4))
    several = request(range(30), num_return_sequences=3, priority=1)
    beams = request(range(40, 60), mode=BeamOptions(2))
    engine.add(several)
    engine.add(beams)
    before = engine.dump()
    assert [group.state for group in before.waiting] == ["waiting", "waiting"]
    assert {one.waits_for for one in by_key(before, several).sequences} == {"admission"}
    engine.step()
    dump = engine.dump()
    running = by_key(dump, several)
    assert (running.state, running.priority, running.width, running.decoding) == ("running", 1, 3, "ParallelSampling")
    assert [one.index for one in running.sequences] == [0, 1, 2]
    assert {one.waits_for for one in running.sequences} == {"step"}
    # Two beams go beside three sequences only if four may run.
    assert by_key(dump, beams).state == "waiting"
    assert dump.last_step.ended_by == "sequences"
    assert [(rows.sequences, rows.prompt_rows, rows.decode_rows) for rows in dump.last_step.groups] == [(1, 30, 0)]
    assert dump.pool.references > dump.pool.used


def test_followers_wait_for_their_leader_and_a_full_step_says_so() -> None:
    engine, _ = make_engine(engine_config(max_batch_tokens=16))
    item = request(range(40), num_return_sequences=2)
    engine.add(item)
    engine.step()
    dump = engine.dump()
    assert [one.waits_for for one in by_key(dump, item).sequences] == ["step", "leader"]
    assert (dump.last_step.rows, dump.last_step.rows_left, dump.last_step.ended_by) == (16, 0, "budget")


def test_a_step_that_is_just_full_and_holds_everything_says_nothing() -> None:
    """ "budget" is told only where more rows would have held more."""
    engine, _ = make_engine(engine_config(max_batch_tokens=16))
    engine.add(request(range(16)))
    engine.step()
    step = engine.dump().last_step
    assert (step.rows, step.rows_left, step.ended_by) == (16, 0, "nothing")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # A prompt of a running request is cut.
        ({"prompt": range(40)}, None),
        # A request does not begin.
        ({"prompt": range(16)}, {"prompt": range(20, 30)}),
        # The unconditional branch of a request that did begin.
        ({"prompt": range(16), "guidance": GuidanceOptions(2.0, tuple(range(20, 30)))}, None),
    ],
)
def test_a_full_step_that_leaves_something_out_says_so(first: dict[str, Any], second: dict[str, Any] | None) -> None:
    engine, _ = make_engine(engine_config(max_batch_tokens=16, long_prompt_share=1.0))
    for fields in (first, second):
        if fields is not None:
            engine.add(request(**fields))
    engine.step()
    assert (engine.dump().last_step.rows_left, engine.dump().last_step.ended_by) == (0, "budget")


@pytest.mark.parametrize(("rows", "reason"), [(3, "budget"), (5, "nothing")])
def test_drafts_that_the_step_has_no_rows_for_are_left_out(rows: int, reason: str) -> None:
    engine, _ = make_engine(engine_config(max_batch_tokens=rows, max_running_sequences=2), vocab_size=3)
    engine.add(item := request([0, 1, 2] * 5, max_new_tokens=30, mode=AssistanceOptions(prompt_lookup_num_tokens=4)))
    while by_key(engine.dump(), item).sequences[0].draft_tokens < 4:
        engine.step()
    engine.step()
    assert (engine.dump().last_step.rows, engine.dump().last_step.ended_by) == (rows, reason)


def test_an_unconditional_branch_that_is_behind_is_waited_for() -> None:
    engine, _ = make_engine(engine_config(max_batch_tokens=16))
    item = request([1, 2, 3], guidance=GuidanceOptions(2.0, tuple(range(30))))
    engine.add(item)
    engine.step()
    assert sorted(one.waits_for for one in by_key(engine.dump(), item).sequences) == ["others", "step"]


def test_a_pool_that_is_full_holds_back() -> None:
    engine, _ = make_engine(engine_config(num_blocks=12, reserve_share=0.0, prefix_cache=False))
    for start in (0, 100):
        engine.add(request(range(start, start + 24), max_new_tokens=20))
    engine.step()
    assert engine.dump().last_step.ended_by in ("nothing", "blocks")
    while not engine.stats.preemptions:
        engine.step()
    dump = engine.dump()
    assert (dump.last_step.ended_by, dump.last_step.preempted) == ("blocks", 1)
    assert len(dump.waiting) == 1


def test_drafts_are_counted() -> None:
    engine, _ = make_engine(drafter=FakeDrafter(1.0, lengths=(4,)))
    engine.add(item := request([1, 2, 3], max_new_tokens=30, mode=AssistanceOptions(4)))
    engine.step()
    assert by_key(engine.dump(), item).sequences[0].draft_tokens == 4
    engine.step()
    assert [(rows.decode_rows, rows.draft_rows) for rows in engine.dump().last_step.groups] == [(1, 4)]


def test_it_is_bounded() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=12, dump_groups=2, dump_sequences=3))
    for number in range(5):
        engine.add(request([number], num_return_sequences=4))
    engine.step()
    dump = engine.dump()
    assert (len(dump.running), dump.more_running, len(dump.waiting), dump.more_waiting) == (2, 1, 2, 0)
    assert [(len(group.sequences), group.more_sequences) for group in dump.running] == [(3, 1), (3, 1)]
    assert (len(dump.last_step.groups), dump.last_step.more_groups) == (2, 1)


def test_it_tells_no_token_and_no_id() -> None:
    engine, _ = make_engine(vocab_size=CANARY * 2, script=dict.fromkeys(range(20), CANARY))
    item = request([CANARY] * 9, request_id="canary-request", cache_salt="canary-salt", max_new_tokens=20)
    engine.add(item)
    engine.step()
    engine.step()
    told = json.dumps(engine.dump().as_dict())
    assert str(CANARY) not in told
    assert "canary" not in told
    assert request_key("canary-request") in told


def test_a_dump_changes_nothing() -> None:
    def answers(*, looking: bool) -> tuple[dict[str, Any], list[Any]]:
        engine, runner = make_engine(engine_config(num_blocks=30, max_batch_tokens=24))
        for number in range(6):
            engine.add(request(range(number, number + 20), request_id=str(number), num_return_sequences=2))
        found: dict[str, Any] = {}
        while engine.has_work:
            if looking:
                engine.dump()
            collect(found, engine.step())
        steps = [[(one.start, one.num_tokens) for one in step.scheduled] for step in runner.steps]
        return {name: answer.ids for name, answer in found.items()}, steps

    assert answers(looking=True) == answers(looking=False)


class HungRunner(FakeRunner):
    """Runner that hangs in its second step until the test lets it go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        if len(self.steps) == 1:
            self.hangs.set()
            assert self.go_on.wait(60)
        return super().execute(output)


async def test_an_engine_that_hangs_is_read_from_outside_with_its_stack() -> None:
    runner = HungRunner(engine_config())
    loop = EngineLoop(Engine(runner.config, runner, None), asyncio.get_running_loop(), lambda *_: None, lambda _: None)
    loop.start()
    try:
        assert (await loop.dump(60.0)).stack == ()
        item = request([1, 2, 3], max_new_tokens=5)
        loop.submit(item)
        assert await asyncio.to_thread(runner.hangs.wait, 60)
        dump = await loop.dump(0.01)
        # One step is done: the one that hangs is the second.
        assert (dump.counters["steps"], dump.last_step.number) == (1, 2)
        assert by_key(dump, item).sequences[0].tokens == 4
        assert any(frame.endswith(" execute") for frame in dump.stack)
        assert any("generation/engine/engine.py" in frame for frame in dump.stack)
    finally:
        runner.go_on.set()
        await asyncio.to_thread(loop.stop)


async def test_dumps_of_an_engine_that_hangs_wait_for_one_command() -> None:
    runner = HungRunner(engine_config())
    loop = EngineLoop(Engine(runner.config, runner, None), asyncio.get_running_loop(), lambda *_: None, lambda _: None)
    loop.start()
    try:
        loop.submit(request([1, 2, 3], max_new_tokens=5))
        assert await asyncio.to_thread(runner.hangs.wait, 60)
        for _ in range(50):
            assert (await loop.dump(0.0)).stack
        assert len(loop._inbox) == 1
        later = [asyncio.create_task(loop.dump(60.0)) for _ in range(3)]
        runner.go_on.set()
        assert [dump.stack for dump in await asyncio.gather(*later)] == [(), (), ()]
        # A dump that was taken is no answer to a later call.
        assert await loop.dump(60.0) is not later[0].result()
    finally:
        runner.go_on.set()
        await asyncio.to_thread(loop.stop)


async def test_a_step_that_breaks_is_logged_with_the_state() -> None:
    runner = FakeRunner(engine_config())
    runner.fail_at_step = 2
    failed = asyncio.Event()
    loop = EngineLoop(
        Engine(runner.config, runner, None), asyncio.get_running_loop(), lambda *_: None, lambda _: failed.set()
    )
    with capture_logs() as logs:
        loop.start()
        loop.submit(item := request([CANARY] * 3, max_new_tokens=5))
        await asyncio.wait_for(failed.wait(), 60)
        await asyncio.to_thread(loop.stop)
    (record,) = (log for log in logs if log["event"] == "engine step failed")
    state = record["state"]
    assert state["running"][0]["request"] == request_key(item.request_id)
    assert state["last_step"]["groups"][0]["decode_rows"] == 1
    assert state["counters"]["steps"] == 1
    # One step is done: the one that broke is the second.
    assert state["last_step"]["number"] == 2
    assert str(CANARY) not in json.dumps(state)


async def test_a_state_that_cannot_be_read_is_told_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(engine_config())
    runner.fail_at_step = 1
    failed = asyncio.Event()
    engine = Engine(runner.config, runner, None)
    loop = EngineLoop(engine, asyncio.get_running_loop(), lambda *_: None, lambda _: failed.set())

    def broken() -> EngineDump:
        raise LookupError("the state is broken, too")

    monkeypatch.setattr(engine, "dump", broken)
    with capture_logs() as logs:
        loop.start()
        loop.submit(request([1, 2, 3]))
        await asyncio.wait_for(failed.wait(), 60)
        await asyncio.to_thread(loop.stop)
    told = {log["event"]: log for log in logs}
    assert told["engine step failed"]["state"] is None
    assert told["the engine's state cannot be read"]["error"] == "LookupError"


def test_a_step_may_be_read_while_it_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump from another thread can fall between any two lines of the scheduler."""
    engine, _ = make_engine()
    seen: list[int] = []
    make = step_plan._entry

    def looking(*arguments: Any) -> Any:
        seen.append(len(engine.dump().last_step.groups))
        return make(*arguments)

    monkeypatch.setattr(step_plan, "_entry", looking)
    for number in range(3):
        engine.add(request([number]))
    engine.step()
    assert seen == [0, 1, 2]


def test_an_idle_engine_holds_nothing_of_requests_that_ended(tmp_path: Path) -> None:
    trace = TraceFile(str(tmp_path / "trace"), 1 << 20)
    trace.start()
    config = engine_config()
    engine, _ = make_engine(config, listeners=[StepTrace(config, trace, 0.0)])
    engine.add(item := request([1, 2, 3], max_new_tokens=3))
    strategy = weakref.ref(engine._groups[item.request_id].strategy)
    while engine.has_work:
        engine.step()
    gc.collect()
    assert strategy() is None
    step = engine.dump().last_step
    assert (step.number, step.rows, step.groups, step.admitted, step.ended_by) == (0, 0, (), 0, "nothing")
    trace.close()


@pytest.mark.parametrize("field", ["dump_groups", "dump_sequences", "dump_wait_seconds"])
def test_the_bounds_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        engine_config(**{field: -1})
