"""Preemption by swap, prefixes in the host pool, and blocks that somebody outside copies: without a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories.engine.fake_engine import Answer, FakeRunner, collect, engine_config, make_engine, request, run
from factories.engine.host_pools import host_fields
from penstock.common.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock.generation.core.request import Request
from penstock.generation.core.step import CopyKind, DraftKind, RunnerOutput, SchedulerOutput
from penstock.generation.engine.block_commands import BlockCommands
from penstock.generation.engine.config import AUTO, RECOMPUTE, SWAP, EngineConfig
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.swap_or_recompute import LineFit, SwapPolicy

ROOMY = engine_config(num_blocks=400, max_batch_tokens=1000)


def tight(way: str = SWAP, host: int = 100, **changes: Any) -> EngineConfig:
    """A pool of 12 blocks of 4 tokens."""
    fields = {"num_blocks": 12, "max_batch_tokens": 40, "reserve_share": 0.0, **host_fields(host, way, False)}
    return engine_config(**(fields | changes))


def crowd(count: int = 4, **fields: Any) -> list[Request]:
    return [request([10 + number] * 9, max_new_tokens=20, **fields) for number in range(count)]


def alone(items: list[Request]) -> list[dict[int, list[int]]]:
    copies = [dataclasses.replace(item, request_id=f"alone {item.request_id}") for item in items]
    return [run(make_engine(ROOMY)[0], item)[item.request_id].ids for item in copies]


def step_until_swapped(engine: Engine, answers: dict[str, Answer] | None = None) -> None:
    answers = {} if answers is None else answers
    for _ in range(100):
        collect(answers, engine.step())
        engine.check_integrity()
        if engine.load().swapped_requests:
            return
    raise AssertionError("nobody is swapped")


def nothing_is_held(engine: Engine) -> None:
    load = engine.load()
    assert (load.kv_blocks_used, load.host_blocks_used, load.swapped_requests) == (0, 0, 0)
    engine.check_integrity()


@pytest.mark.parametrize("way", [SWAP, RECOMPUTE, AUTO])
def test_the_ids_are_those_of_an_idle_engine_whichever_way(way: str) -> None:
    engine, _ = make_engine(tight(way))
    items = crowd()
    answers = run(engine, *items)
    assert [answers[item.request_id].ids for item in items] == alone(items)
    assert engine.stats.preemptions
    assert (engine.stats.swaps > 0) == (way != RECOMPUTE)
    nothing_is_held(engine)


def test_what_is_swapped_is_not_computed_again() -> None:
    items = crowd()
    wanted = sum(len(item.prompt_token_ids) + 20 - 1 for item in items)
    swapped, _ = make_engine(tight(SWAP))
    run(swapped, *items)
    assert swapped.stats.swaps == swapped.stats.preemptions > 0
    assert swapped.stats.computed_tokens == wanted
    assert swapped.stats.preempted_tokens == 0
    recomputed, _ = make_engine(tight(RECOMPUTE, prefix_cache=False))
    run(recomputed, *crowd())
    assert recomputed.stats.computed_tokens == wanted + recomputed.stats.preempted_tokens > wanted


def test_without_a_host_pool_nothing_of_it_is_there() -> None:
    engine, runner = make_engine(tight(AUTO, host=0))
    run(engine, *crowd())
    assert engine.stats.preemptions
    assert engine.stats.swaps == engine.stats.host_out_blocks == 0
    assert not any(step.copies or step.parked for step in runner.steps)
    assert {value for name, value in engine.load()._asdict().items() if name.startswith(("host_", "swapped_"))} == {0}


def test_a_host_pool_that_is_full_leaves_the_others_to_be_computed_again() -> None:
    engine, _ = make_engine(tight(SWAP, host=4))
    items = crowd(5)
    answers = run(engine, *items)
    assert [answers[item.request_id].ids for item in items] == alone(items)
    assert 0 < engine.stats.swaps < engine.stats.preemptions
    nothing_is_held(engine)


def test_a_block_that_beams_share_is_copied_once() -> None:
    engine, runner = make_engine(tight(SWAP, num_blocks=16))
    plain = crowd(2)
    beams = request([2] * 17, max_new_tokens=12, mode=BeamOptions(4))
    answers: dict[str, Answer] = {}
    for item in (*plain, beams):
        engine.add(item)
    step_until_swapped(engine, answers)
    out = [copy for copy in runner.steps[-1].copies if copy.kind is CopyKind.OUT]
    assert len({copy.source for copy in out}) == len(out)
    group = next(group for group in engine._scheduler.waiting if group.is_swapped)
    held = [block for tables in group.host_tables.values() for table in tables for block in table]
    assert len(set(held)) == len(out) < len(held)
    assert engine.load().host_blocks_used == len(out)
    run(engine, answers=answers)
    assert [answers[item.request_id].ids for item in (*plain, beams)] == alone([*plain, beams])
    nothing_is_held(engine)


@pytest.mark.parametrize("error", [None, FailedPrecondition("it was cut off", reason="BUSY")])
def test_a_swapped_request_that_is_cut_off_leaves_nothing(error: PenstockError | None) -> None:
    engine, runner = make_engine(tight())
    items = crowd()
    for item in items:
        engine.add(item)
    answers: dict[str, Answer] = {}
    step_until_swapped(engine, answers)
    swapped = [group for group in engine._scheduler.waiting if group.is_swapped]
    known = {sequence.seq_id for group in swapped for sequence in group.sequences}
    assert known <= runner.known
    for group in swapped:
        assert engine.abort(group.request.request_id, error)
    engine.check_integrity()
    assert engine.load().host_blocks_used == 0
    run(engine, answers=answers)
    assert not known & runner.known, "the runner keeps what is gone"
    nothing_is_held(engine)


def test_a_deadline_that_passes_while_a_request_is_swapped_leaves_nothing() -> None:
    now = [0.0]
    engine, _ = make_engine(tight(), clock=lambda: now[0])
    items = crowd(deadline=50.0)
    for item in items:
        engine.add(item)
    step_until_swapped(engine)
    now[0] = 51.0
    engine.step()
    assert not engine.has_work
    nothing_is_held(engine)


def test_a_drafter_forgets_who_waits_for_its_blocks() -> None:
    released: list[int] = []

    class Drafter:
        kind = DraftKind.DRAFT_MODEL

        def draft(self, requests: Any) -> list[list[int]]:
            return [[] for _ in requests]

        def release(self, seq_ids: Any) -> None:
            released.extend(seq_ids)

    engine, _ = make_engine(tight(), drafter=Drafter())
    for item in crowd():
        engine.add(item)
    step_until_swapped(engine)
    (group,) = [group for group in engine._scheduler.waiting if group.is_swapped]
    assert {sequence.seq_id for sequence in group.sequences} <= set(released)


def test_evicted_prefixes_come_back_from_the_host_pool() -> None:
    config = engine_config(num_blocks=12, max_batch_tokens=64, num_host_blocks=40)
    engine, runner = make_engine(config)
    head = [*range(1, 25)]
    first = run(engine, request([*head, 30], max_new_tokens=2))
    run(engine, request([40] * 40, max_new_tokens=2))
    assert engine.stats.evictions
    assert engine.stats.host_out_blocks == engine.load().host_blocks_evictable > 0
    hits = engine.stats.prefix_hit_tokens
    again = run(engine, request([*head, 30], max_new_tokens=2))
    assert engine.stats.prefix_hit_tokens - hits == len(head)
    assert 0 < engine.stats.host_prefix_hit_tokens <= len(head)
    assert engine.stats.host_in_blocks == engine.stats.host_prefix_hit_tokens // config.block_size
    assert [answer.ids for answer in first.values()] == [answer.ids for answer in again.values()]
    assert [entry.start for entry in runner.steps[-2].scheduled] == [len(head)]
    nothing_is_held(engine)


def test_a_prefix_in_the_host_pool_is_its_tenants_alone() -> None:
    engine, _ = make_engine(engine_config(num_blocks=12, max_batch_tokens=64, num_host_blocks=40))
    head = [*range(1, 25)]
    run(engine, request([*head, 30], max_new_tokens=2, cache_salt="one"))
    run(engine, request([40] * 40, max_new_tokens=2))
    run(engine, request([*head, 30], max_new_tokens=2, cache_salt="other"))
    assert engine.stats.host_prefix_hit_tokens == engine.stats.prefix_hit_tokens == 0
    run(engine, request([*head, 30], max_new_tokens=2, cache_salt="one"))
    assert engine.stats.prefix_hit_tokens == len(head)


def test_prefixes_are_kept_only_where_they_are_to_be() -> None:
    engine, _ = make_engine(engine_config(num_blocks=12, num_host_blocks=40, host_prefix_cache=False))
    run(engine, request([*range(1, 25), 30], max_new_tokens=2))
    run(engine, request([40] * 40, max_new_tokens=2))
    assert engine.stats.evictions
    assert engine.stats.host_out_blocks == 0


def test_the_host_pool_gives_away_what_was_used_the_longest_ago() -> None:
    engine, _ = make_engine(engine_config(num_blocks=12, max_batch_tokens=64, num_host_blocks=14))
    heads = [[number] * 24 for number in range(3)]
    for head in (*heads, [50] * 40):
        run(engine, request([*head, 60], max_new_tokens=2))
    assert engine.stats.host_evictions
    found = []
    for head in (heads[2], heads[0]):
        before = engine.stats.prefix_hit_tokens
        run(engine, request([*head, 60], max_new_tokens=2))
        found.append(engine.stats.prefix_hit_tokens - before)
    assert found[0] == 24 > found[1]


def test_clearing_the_cache_clears_both_pools() -> None:
    engine, _ = make_engine(engine_config(num_blocks=12, max_batch_tokens=64, num_host_blocks=40))
    run(engine, request([*range(1, 25), 30], max_new_tokens=2))
    run(engine, request([40] * 40, max_new_tokens=2))
    load = engine.load()
    assert load.host_blocks_evictable
    assert engine.clear_cache() == load.kv_blocks_evictable + load.host_blocks_evictable
    assert engine.load().host_blocks_free == engine.load().host_blocks_total


def test_numbers_that_are_none_are_in_neither_pool() -> None:
    class Broken(FakeRunner):
        def execute(self, output: SchedulerOutput) -> RunnerOutput:
            result = super().execute(output)
            failed = {one.seq_id for entry in output.scheduled for one in entry.sample if 7 in one.token_ids}
            return dataclasses.replace(result, failed=frozenset(failed))

    config = engine_config(num_blocks=12, max_batch_tokens=64, num_host_blocks=40, max_running_sequences=4)
    engine = Engine(config, Broken(config), None)
    # Fills blocks, is evicted to the host pool, comes back, and then turns out to be broken.
    head = [*range(20, 44)]
    run(engine, request([*head, 1], max_new_tokens=2))
    run(engine, request([45] * 40, max_new_tokens=2))
    assert engine._scheduler.host is not None
    assert engine.load().host_blocks_evictable
    run(engine, request([*head, 7], max_new_tokens=2))
    hits = engine.stats.prefix_hit_tokens
    run(engine, request([*head, 1], max_new_tokens=2))
    assert engine.stats.prefix_hit_tokens == hits, "a prefix that cannot be trusted was found"


# --- the judge


def test_the_cheaper_way_is_taken() -> None:
    policy = SwapPolicy(AUTO, 0)
    assert policy.swaps(None, 10, 1), "nothing is known: a swap teaches"  # type: ignore[arg-type]
    for rows in (10, 100, 300):
        policy.stepped(rows, 0.010 + rows * 0.001)
    for blocks in (1, 5, 20):
        policy.copied(blocks, 0.002 + blocks * 0.0001, blocks, 0.002 + blocks * 0.0001)
    # 4.2 ms for a block and back, 1 ms a row.
    assert not policy.swaps(None, 1, 3)  # type: ignore[arg-type]
    assert policy.swaps(None, 1, 6)  # type: ignore[arg-type]
    assert policy.swaps(None, 100, 1600)  # type: ignore[arg-type]


def test_a_way_that_was_slow_once_is_tried_again() -> None:
    policy = SwapPolicy(AUTO, 0)
    for rows in (10, 100):
        policy.stepped(rows, 0.01 + rows * 0.001)
    policy.copied(10, 5.0, 0, 0.0)
    tries = next(number for number in range(10_000) if policy.swaps(None, 10, 160))  # type: ignore[arg-type]
    assert 10 < tries < 1000


def test_a_line_through_points() -> None:
    fit = LineFit(1.0)
    assert not fit.is_known
    assert fit.slope == fit.seconds(3) == 0.0
    fit.add(10, 2.0)
    assert fit.slope == pytest.approx(0.2)
    assert fit.seconds(5) == pytest.approx(1.0)
    fit.add(20, 3.0)
    assert fit.slope == pytest.approx(0.1)
    assert fit.seconds(30) == pytest.approx(4.0)
    assert fit.seconds(0) == 0.0
    # Less for more: noise, and no row is free.
    fit.add(40, 1.0)
    assert fit.slope > 0


def test_a_step_that_copies_is_given_its_time() -> None:
    engine, _ = make_engine(tight(block_bytes=50_000_000))
    seen: list[float] = []

    class Watching(FakeRunner):
        def execute(self, output: SchedulerOutput) -> RunnerOutput:
            if output.copies:
                seen.append(engine.watch.copy_seconds)
            return dataclasses.replace(super().execute(output), out_seconds=3.0 if output.copies else 0.0)

    engine._runner = Watching(engine.config)
    for item in crowd():
        engine.add(item)
    step_until_swapped(engine)
    assert seen[0] >= 0.1, "blocks of 50 MB, before any was measured"
    assert engine.watch.copy_seconds == 3.0, "what it took says nothing of steps of its size"
    assert engine.stats.host_out_seconds == 3.0


# --- orders from outside


def commands(**changes: Any) -> tuple[Engine, FakeRunner, BlockCommands]:
    engine, runner = make_engine(tight(**changes))
    return engine, runner, BlockCommands(engine)


def test_blocks_are_copied_in_order() -> None:
    engine, runner, orders = commands()
    runner.kv[1] = [(5, 0)] * 4
    assert orders.copy([(1, 2), (2, 3)]) >= 0.0
    assert runner.kv[3] == [(5, 0)] * 4
    orders.swap([(1, 3, 60), (0, 60, 9)])
    assert runner.host[60] == runner.kv[9] == [(5, 0)] * 4
    assert (engine.stats.host_out_blocks, engine.stats.host_in_blocks) == (1, 1)
    nothing_is_held(engine)


def test_blocks_that_the_engine_holds_are_refused_by_number() -> None:
    engine, runner, orders = commands()
    for item in crowd():
        engine.add(item)
    step_until_swapped(engine)
    used = [block for block in range(12) if engine.device_blocks.ref_count(block)]
    assert engine.host_blocks is not None
    host = next(block for block in range(100) if engine.host_blocks.ref_count(block))
    steps = len(runner.steps)
    for pair in [(used[0], 11), (used[0], used[1])]:
        with pytest.raises(FailedPrecondition, match=rf"device blocks {used[0]}\b") as told:
            orders.copy([pair])
        assert told.value.reason == "BLOCK_IN_USE"
    with pytest.raises(FailedPrecondition, match=f"host blocks {host}") as told:
        orders.swap([(0, host, 11)])
    assert told.value.metadata["host_blocks"] == str(host)
    assert len(runner.steps) == steps, "nothing was copied"


def test_blocks_that_a_caller_claims_are_its_own_in_both_pools() -> None:
    engine, runner, orders = commands(host=8, host_prefix_cache=True)
    mine = BlockCommands(engine, claims=True)
    runner.kv[5] = [(8, 0)] * 4
    mine.swap([(1, 5, 4)])
    assert (engine.caller_blocks.device, engine.caller_blocks.host) == ({5}, {4})
    engine.check_integrity()
    for refused in ([(1, 5, 6)], [(0, 4, 6)]):
        with pytest.raises(FailedPrecondition, match="requests hold"):
            orders.swap(refused)
    # Requests that are swapped, and prefixes that are kept, fill all other blocks of the host pool.
    items = crowd(5)
    answers = run(engine, *items, *crowd(3, cache_salt="others"))
    assert [answers[item.request_id].ids for item in items] == alone(items)
    assert engine.stats.swaps
    assert engine.host_blocks is not None
    assert engine.host_blocks.num_free - engine.host_blocks.num_evictable == 0
    assert runner.host[4] == [(8, 0)] * 4, "the engine wrote into a claimed block"
    mine.swap([(0, 4, 7)])
    assert runner.kv[7] == [(8, 0)] * 4
    with pytest.raises(FailedPrecondition, match="a caller holds blocks"):
        engine.reinitialise(FakeRunner(engine.config), lambda: None)
    assert engine.caller_blocks.release([5, 7]) == 2
    with pytest.raises(FailedPrecondition, match="a caller holds blocks"):
        engine.reinitialise(FakeRunner(engine.config), lambda: None)
    assert engine.caller_blocks.release(host_blocks=[4, 5]) == 1
    nothing_is_held(engine)


def test_a_host_block_may_be_claimed_while_requests_are_live_unless_one_holds_it() -> None:
    engine, _, _ = commands()
    for item in crowd():
        engine.add(item)
    answers: dict[str, Answer] = {}
    step_until_swapped(engine, answers)
    assert engine.host_blocks is not None
    free = next(block for block in range(100) if not engine.host_blocks.ref_count(block))
    held = next(block for block in range(100) if engine.host_blocks.ref_count(block))
    engine.caller_blocks.claim((), host_blocks=[free])
    with pytest.raises(FailedPrecondition, match=f"^host block {held}: a request") as told:
        engine.caller_blocks.claim((), host_blocks=[free, held])
    assert told.value.reason == "BLOCK_IN_USE"
    with pytest.raises(InvalidArgument, match="every host block must be from 0 to 99"):
        engine.caller_blocks.claim((), host_blocks=[100])
    # All or none: the device's are not to be had while requests are live.
    with pytest.raises(FailedPrecondition, match="requests are live"):
        engine.caller_blocks.claim([0], host_blocks=[free + 50])
    assert engine.caller_blocks.host == {free}
    engine.check_integrity()
    run(engine, answers=answers)
    assert engine.caller_blocks.release() == 1
    nothing_is_held(engine)


def test_a_swapped_request_whose_cache_is_released_computes_all_of_it_again() -> None:
    engine, runner = make_engine(tight(host_prefix_cache=True))
    items = crowd()
    for item in items:
        engine.add(item)
    answers: dict[str, Answer] = {}
    step_until_swapped(engine, answers)
    (group,) = [group for group in engine._scheduler.waiting if group.is_swapped]
    name, computed = group.request.request_id, group.sequences[0].num_computed_tokens
    assert computed > 0
    assert engine.release_cache([name]) > 0
    engine.check_integrity()
    assert not group.is_swapped
    assert group.sequences[0].num_computed_tokens == 0
    assert engine.load().host_blocks_used == 0
    before = len(runner.steps)
    run(engine, answers=answers)
    starts = [
        entry.start for step in runner.steps[before:] for entry in step.scheduled if entry.sequence in group.sequences
    ]
    assert starts == [] or min(starts) == 0, "nothing of it was found"
    assert [answers[item.request_id].ids for item in items] == alone(items)
    nothing_is_held(engine)


def test_a_released_cache_is_not_found_in_the_host_pool_either() -> None:
    engine, _ = make_engine(tight(num_blocks=12, host=50, host_prefix_cache=True))
    prompt = [*range(1, 25), 30]
    run(engine, request(prompt, max_new_tokens=2))
    # Another request takes all blocks: the prefix goes to the host pool.
    run(engine, request([40] * 40, max_new_tokens=6))
    assert engine.load().host_blocks_evictable > 0
    again = request(prompt, request_id="again", max_new_tokens=8)
    engine.add(again)
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    hits = engine.stats.host_prefix_hit_tokens
    assert hits > 0
    engine.release_cache(["again"])
    engine.check_integrity()
    run(engine, answers=answers)
    assert engine.stats.host_prefix_hit_tokens == hits
    nothing_is_held(engine)


def test_a_prefix_that_is_overwritten_is_no_prefix_any_more() -> None:
    engine, _, orders = commands(host_prefix_cache=True)
    run(engine, request([*range(1, 25), 30], max_new_tokens=2))
    kept = [block for block in range(12) if engine.device_blocks.hash_of(block)]
    orders.copy([(kept[0], 0 if 0 not in kept else 11)])
    assert engine.device_blocks.hash_of(kept[0]), "it was only read"
    before = engine.load().kv_blocks_evictable
    orders.swap([(0, 50, kept[0])])
    assert engine.load().kv_blocks_evictable == before - 1
    run(engine, request([*range(1, 25), 30], max_new_tokens=2))
    nothing_is_held(engine)


@pytest.mark.parametrize(
    ("kind", "orders", "field"),
    [
        ("copy", [(0, 12)], r"pairs\[0\].destination"),
        ("copy", [(0, 1), (-1, 2)], r"pairs\[1\].source"),
        ("copy", [(0, 1), (2, 1)], r"pairs\[1\].destination"),
        ("copy", [(0, 1)] * 6, "pairs"),
        ("swap", [(1, 0, 100)], r"swaps\[0\].destination"),
        ("swap", [(0, 100, 0)], r"swaps\[0\].source"),
        ("swap", [(2, 0, 0)], r"swaps\[0\].kind"),
    ],
)
def test_orders_that_cannot_be_are_refused_by_field(kind: str, orders: Any, field: str) -> None:
    _, runner, told = commands(max_block_copies=5)
    with pytest.raises(InvalidArgument) as error:
        getattr(told, kind)(orders)
    assert error.value.field is not None
    assert error.value.field == field.replace("\\", "")
    assert not runner.steps


def test_swaps_need_a_host_pool() -> None:
    _, _, orders = commands(way=AUTO, host=0)
    with pytest.raises(FailedPrecondition, match="--host-kv-memory") as error:
        orders.swap([(1, 0, 0)])
    assert error.value.reason == "NO_HOST_POOL"


@pytest.mark.parametrize(
    "changes",
    [{"num_host_blocks": -1}, {"preemption": "both"}, {"preemption": SWAP, "num_host_blocks": 0}, {"block_bytes": -1}],
)
def test_the_bounds_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        engine_config(**changes)
