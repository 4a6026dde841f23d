"""Leases, their quotas and ends; the blocks of named sequences; turns before the engine's thread."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock.generation.graphs.graph import GraphStage
from penstock.generation.graphs.graph_limits import GraphLimits
from penstock.generation.graphs.leases import Lease, Leases
from penstock.generation.graphs.model_access import GraphTurns
from penstock.generation.graphs.sequences import PoolSequence, SequenceBlocks

LIMITS = GraphLimits(
    stages=(GraphStage(1, 8),),
    max_graph_call_bytes=1 << 20,
    max_graph_streams=2,
    max_graph_tensors=3,
    max_graph_tensor_bytes=100,
    max_graph_leases=2,
    graph_lease_seconds=60.0,
    graph_share=0.25,
    retry_seconds=1.5,
)


class Sized:
    """A tensor that has nothing but its size."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Released:
    """Sequences that came back, and an event for it."""

    def __init__(self) -> None:
        self.sequences: list[PoolSequence] = []
        self.event = asyncio.Event()

    def __call__(self, sequences: list[PoolSequence]) -> None:
        self.sequences += sequences
        self.event.set()


def add(leases: Leases, lease: Lease, *sizes: int) -> list[int]:
    return leases.add(lease, sizes, lambda index: Sized(sizes[index]))


async def test_quotas_are_of_all_leases_and_nothing_is_half_done() -> None:
    leases = Leases(LIMITS, Released())
    one, two = leases.open(None), leases.open(1.0)
    assert (one.seconds, two.seconds, one.lease_id == two.lease_id) == (60.0, 1.0, False)
    first = add(leases, one, 40, 40)
    for lease, sizes, flag in ((two, (30,), "--max-graph-tensor-bytes"), (two, (1, 1), "--max-graph-tensors")):
        with pytest.raises(ResourceExhausted, match=flag) as caught:
            add(leases, lease, *sizes)
        assert (caught.value.reason, caught.value.retry_after_seconds) == ("GRAPH_QUOTA", 1.5)
    assert (leases.num_tensors, leases.tensor_bytes, two.tensors) == (2, 80, {})
    with pytest.raises(ResourceExhausted, match="--max-graph-leases"):
        leases.open(None)
    assert leases.free(two, first) == 0
    assert leases.free(one, first[:1] * 2) == 1
    assert (leases.num_tensors, leases.tensor_bytes) == (1, 40)
    leases.end_all()
    assert (leases.num_leases, leases.num_tensors, leases.tensor_bytes) == (0, 0, 0)
    for lease in (one, two):
        with pytest.raises(NotFound) as missing:
            leases.find(lease.lease_id)
        assert missing.value.reason == "LEASE_NOT_FOUND"
        assert lease.expiry is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 3601.0])
async def test_a_time_out_of_bounds_is_refused(seconds: float) -> None:
    leases = Leases(LIMITS, Released())
    with pytest.raises(InvalidArgument, match="lease_seconds"):
        leases.open(seconds)
    lease = leases.open(5.0)
    with pytest.raises(InvalidArgument, match="lease_seconds"):
        leases.change(lease, seconds)
    assert lease.seconds == 5.0
    leases.end_all()


async def test_an_unused_lease_ends_with_all_it_holds_and_a_held_one_does_not() -> None:
    released = Released()
    leases = Leases(LIMITS, released)
    lease, held = leases.open(0.01), leases.open(0.01)
    leases.hold(held)
    add(leases, lease, 10)
    add(leases, held, 10)
    lease.sequences["x"] = PoolSequence([0])
    await released.event.wait()
    assert (leases.num_expired, leases.num_leases, leases.num_tensors) == (1, 1, 1)
    assert len(released.sequences) == 1
    assert held.expiry is None
    held.sequences["y"] = PoolSequence([0])
    released.event.clear()
    leases.let_go(held)
    await released.event.wait()
    assert (leases.num_expired, leases.num_leases, leases.num_tensors, leases.tensor_bytes) == (2, 0, 0, 0)


async def test_a_streams_own_lease_has_no_time_and_ends_with_it() -> None:
    released = Released()
    leases, own = Leases(LIMITS, released), Lease()
    (handle,) = add(leases, own, 10)
    assert own.tensor(handle, "handle").nbytes == 10
    with pytest.raises(NotFound) as caught:
        own.tensor(handle + 1, "inputs[0].handle")
    assert (caught.value.reason, caught.value.field) == ("TENSOR_NOT_FOUND", "inputs[0].handle")
    own.sequences["x"] = PoolSequence([0])
    assert leases.end_sequences(own, ["x", "x", "z"]) == 1
    assert leases.end(own) == (1, 0)
    assert own.expiry is None
    assert len(released.sequences) == 1


def test_sequences_get_their_own_blocks_and_give_them_back_once() -> None:
    blocks = SequenceBlocks(100, 4, 16, max_tokens=1000)
    one, two = PoolSequence([0]), PoolSequence([0])
    blocks.grow(one, 33)
    assert one.blocks == [100, 101, 102]
    blocks.grow(one, 48)
    assert blocks.num_used == 3
    with pytest.raises(ResourceExhausted, match="--graph-kv-tokens"):
        blocks.grow(two, 17)
    assert two.blocks == []
    blocks.grow(two, 16)
    with pytest.raises(InvalidArgument, match="at most 1000"):
        blocks.grow(two, 1001)
    blocks.release(one)
    blocks.release(one)
    assert blocks.num_used == 1
    with pytest.raises(NotFound) as caught:
        blocks.grow(one, 1)
    assert caught.value.reason == "SEQUENCE_NOT_FOUND"
    blocks.grow(two, 64)
    assert sorted(two.blocks) == [100, 101, 102, 103]


class Clock:
    """A clock that a test sets, and waits that it sees."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle = asyncio.Event()
        self.waiting = asyncio.Event()

    async def wait_idle(self) -> None:
        self.waiting.set()
        await self.idle.wait()


async def test_graphs_get_their_share_while_there_are_requests() -> None:
    clock = Clock()
    turns = GraphTurns(0.25, clock.wait_idle, lambda: clock.now)
    async with turns.turn() as took:
        took(2.0)
    # Three times as long is the requests'.
    second: Any = asyncio.ensure_future(turns.turn().__aenter__())
    await clock.waiting.wait()
    assert not second.done()
    # No request is left: nobody needs the time.
    clock.idle.set()
    await second


async def test_a_turn_waits_for_the_one_before_and_for_no_more() -> None:
    clock = Clock()
    turns = GraphTurns(1.0, clock.wait_idle, lambda: clock.now)
    async with turns.turn() as took:
        took(5.0)
        late = asyncio.ensure_future(turns.turn().__aenter__())
        await asyncio.sleep(0)
        assert not late.done()
    await late
    assert not clock.waiting.is_set()
