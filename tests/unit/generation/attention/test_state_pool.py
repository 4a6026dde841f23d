"""Slots of states: who has one, what a fork copies, and that no state is read at another token than its own."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.attention.state_pool import HeldStates, StatePool, StateTensor
from penstock.generation.core.step import Fork, StateCopy

LAYOUT = (
    StateTensor(0, "conv_states", 0, (2, 3), torch.float32),
    StateTensor(1, "recurrent_states", 0, (4,), torch.float64),
)


def pool(num_slots: int = 3, num_snapshots: int = 0) -> StatePool:
    return StatePool(LAYOUT, num_slots, torch.device("cpu"), num_snapshots)


def write(states: StatePool, slots: tuple[int, ...], value: float, length: int, *, holds: bool = False) -> None:
    """Write `value`, `value` + 1, ... into the slots, each after `length` tokens."""
    tensors = [
        torch.stack([torch.full(one.shape, value + place, dtype=one.dtype) for place in range(len(slots))])
        for one in LAYOUT
    ]
    states.write(HeldStates(slots, tensors), [length] * len(slots), holds=holds)


def values(states: StatePool, slots: tuple[int, ...]) -> list[float]:
    found = states.read(slots).tensors
    rows = [{float(number) for tensor in found for number in tensor[place].flatten()} for place in range(len(slots))]
    assert all(len(row) == 1 for row in rows)
    return [row.pop() for row in rows]


def test_held_states_are_stored_when_others_need_a_slot_of_theirs() -> None:
    states = pool()
    slots = states.place([(10, 0), (11, 0), (12, 0)])
    write(states, slots, 1.0, 5, holds=True)
    assert states.read(slots) is states.read(slots)
    write(states, slots, 4.0, 6, holds=True)
    write(states, slots[1:2], 9.0, 7)
    assert values(states, slots) == [4.0, 9.0, 6.0]
    assert states.bytes_per_slot == 6 * 4 + 4 * 8
    assert states.num_bytes == 3 * states.bytes_per_slot


def test_held_states_outlive_a_sequence_of_theirs() -> None:
    states = pool()
    slots = states.place([(10, 0), (11, 0)])
    write(states, slots, 1.0, 5, holds=True)
    states.release([10, 99])
    assert states.num_used == 1
    assert values(states, states.place([(11, 5)])) == [2.0]


def test_the_last_child_of_a_parent_that_ends_takes_its_slot() -> None:
    states = pool()
    slots = states.place([(1, 0)])
    write(states, slots, 7.0, 4, holds=True)
    states.fork([Fork(1, 2, 4), Fork(1, 3, 4), Fork(1, 4, 4)], [1])
    states.release([1])
    assert states.num_used == 3
    assert values(states, states.place([(2, 4), (3, 4), (4, 4)])) == [7.0, 7.0, 7.0]
    with pytest.raises(RuntimeError, match="more sequences run"):
        states.place([(5, 0)])


def test_a_child_that_is_gone_already_takes_nothing() -> None:
    states = pool(1)
    write(states, states.place([(1, 0)]), 7.0, 4)
    states.fork([Fork(1, 2, 4)], [2])
    assert states.num_used == 1


def test_a_sequence_begins_with_a_snapshot_of_another() -> None:
    states = pool(2, num_snapshots=2)
    slots = states.place([(1, 0)])
    write(states, slots, 7.0, 4, holds=True)
    states.save([StateCopy(1, 1, 4)])
    write(states, slots, 8.0, 5, holds=True)
    states.restore([StateCopy(2, 1, 4)])
    assert values(states, states.place([(1, 5), (2, 4)])) == [8.0, 7.0]
    assert states.num_bytes == 4 * states.bytes_per_slot
    assert states.num_used == 2
    # Neither the state, nor the snapshot, nor the slot is that which the copy says.
    for copies in ([StateCopy(2, 0, 3)], [StateCopy(9, 0, 4)]):
        with pytest.raises(RuntimeError, match="to take a snapshot of"):
            states.save(copies)
    for copies in ([StateCopy(3, 1, 5)], [StateCopy(3, 0, 4)], [StateCopy(1, 1, 4)]):
        with pytest.raises(RuntimeError, match="no snapshot after token"):
            states.restore(copies)


def test_a_state_is_read_at_its_own_token_only() -> None:
    states = pool()
    write(states, states.place([(1, 0)]), 7.0, 4)
    for start in (0, 3, 5):
        with pytest.raises(RuntimeError, match=f"after token {start}"):
            states.place([(1, start)])
    with pytest.raises(RuntimeError, match="after token 2"):
        states.place([(9, 2)])
    with pytest.raises(RuntimeError, match="after token 3"):
        states.fork([Fork(1, 2, 3)], [])


def test_a_state_goes_on_from_any_row_that_was_not_taken_back() -> None:
    states, row = pool(), (torch.arange(3.0),)
    slots = states.place([(1, 0), (2, 0)])
    states.keep_later(slots[0], 7, row)
    # Eight tokens of each, of which the state of the first is before the last three.
    states.advance(slots, [8, 8], [3, 0])
    assert [states.behind(slots, [start, 8]) for start in (5, 7, 8)] == [None, (2, 0), (3, 0)]
    assert states.later(slots[0], 7) is row
    for start in (4, 9):
        with pytest.raises(RuntimeError, match=f"no state after token {start}"):
            states.place([(1, start)])
    # A copy goes on from there, too, until rows of its own come.
    states.fork([Fork(1, 3, 6)], [])
    child = states.place([(3, 6)])
    assert states.behind(child, [6]) == (1,)
    states.advance(child, [9])
    assert states.behind((*slots, *child), [5, 8, 9]) is None
    assert states.place([(1, 8), (3, 9)]) == (slots[0], *child)
    # Nothing is left of a sequence that is gone.
    states.release([1])
    assert states.behind(states.place([(4, 0)]), [0]) is None
