"""States of recurrent layers: a slot for each sequence, of one size for sequences of any length, in addition to the
keys and values of its blocks.

A state cannot be cut back. So every read is checked against the next token. A model may keep one behind the last
computed token: it then keeps what it needs of the later rows (LaterRows), to bring the state to those that were not
taken back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.generation.attention.fresh_memory import fresh_zeros

if TYPE_CHECKING:
    from penstock.generation.core.step import Fork, StateCopy

# Length of a slot that holds no state.
_EMPTY = 0


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of each sequence's state."""

    # Place in the model: its layer, the name of the layer's states, and the number among them.
    layer: int
    name: str
    number: int
    # Of one sequence.
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size for one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class HeldStates:
    """States of some slots, outside the pool: (slots, *shape) of each StateTensor, in order."""

    slots: tuple[int, ...]
    tensors: list[Tensor]
    # Object of the model that reads and writes them.
    carrier: object = None


@dataclass(slots=True)
class LaterRows:
    """Rows of a sequence after its state."""

    count: int = 0
    # What the model needs of them, by its own numbers of layers: (rows, ...) each.
    layers: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class StatePool:
    """`num_slots` states of all tensors of a layout. Sequences get slots as they begin. Used by one thread.

    States of the last sequences that decoded together stay outside (`held`) until others need one of their slots: while
    the same sequences go on decoding, nothing is copied.
    """

    def __init__(
        self, layout: Sequence[StateTensor], num_slots: int, device: torch.device, num_snapshots: int = 0
    ) -> None:
        """Allocate the pool, and after the slots of sequences those of snapshots. Raises StartupError naming
        --max-running-sequences when the memory cannot be had."""
        self.layout = tuple(layout)
        self.num_slots = num_slots
        self.num_snapshots = num_snapshots
        count = num_slots + num_snapshots
        try:
            self._tensors = [fresh_zeros((count, *one.shape), one.dtype, device) for one in layout]
        except (RuntimeError, MemoryError, ValueError) as error:
            raise StartupError(
                f"cannot allocate {count} states of {self.bytes_per_slot} bytes: lower --max-running-sequences or "
                "--state-snapshots",
                flag="--max-running-sequences",
            ) from error
        self._device = device
        # seq_id -> slot; slot -> number of tokens that its state is after.
        self._slots: dict[int, int] = {}
        self._lengths = [_EMPTY] * count
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: HeldStates | None = None
        # slot -> rows after its state.
        self._later: dict[int, LaterRows] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Size of one sequence's state."""
        return state_bytes(self.layout)

    @property
    def num_bytes(self) -> int:
        """Size of all slots, those of snapshots included."""
        return (self.num_slots + self.num_snapshots) * self.bytes_per_slot

    @property
    def num_used(self) -> int:
        """Number of sequences that have a slot."""
        return len(self._slots)

    def place(self, starts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Return the slots of a step's sequences, each with its first token; a sequence that begins gets one.

        Raises RuntimeError when a state is not the one before the first token: the scheduler must not ask.
        """
        return tuple(self._place(seq_id, start) for seq_id, start in starts)

    def fork(self, forks: Sequence[Fork], released: Sequence[int]) -> None:
        """Give each child its parent's state. The last child of a `released` parent takes over its slot, so that there
        are never more states than live sequences. Raises RuntimeError as `place` does."""
        if not forks:
            return
        self._put_back()
        leaving, left = set(released), Counter(fork.parent for fork in forks)
        self.release(seq_id for seq_id in released if not left[seq_id])
        for parent, child, num_tokens in forks:
            left[parent] -= 1
            slot = self._slots.get(parent)
            if slot is None or not self._reaches(slot, num_tokens):
                raise RuntimeError(f"no state after token {num_tokens} of the sequence that is forked")
            if child in leaving and not left[child]:
                continue
            if parent in leaving and not left[parent]:
                self._slots[child] = self._slots.pop(parent)
                continue
            self._copy(slot, self._take(child))

    def release(self, seq_ids: Iterable[int]) -> None:
        """Free slots; ids without one are fine."""
        for seq_id in seq_ids:
            slot = self._slots.pop(seq_id, None)
            if slot is not None:
                self._free.append(slot)
                self._later.pop(slot, None)
                if self._held is not None and slot in self._held.slots:
                    self._put_back()

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """Give sequences without a slot one with a snapshot's state. Raises RuntimeError when the snapshot is not the
        state after the sequence's tokens."""
        for seq_id, place, num_tokens in copies:
            snapshot = self.num_slots + place
            if seq_id in self._slots or self._lengths[snapshot] != num_tokens:
                raise RuntimeError(f"no snapshot after token {num_tokens} for a sequence that begins there")
            self._copy(snapshot, self._take(seq_id))

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Take snapshots of sequences' states. Raises RuntimeError as `place` does."""
        for seq_id, place, num_tokens in copies:
            slot = self._slots.get(seq_id)
            if slot is None or self._lengths[slot] != num_tokens:
                raise RuntimeError(f"no state after token {num_tokens} of a sequence to take a snapshot of")
            if self._held is not None and slot in self._held.slots:
                self._put_back()
            self._copy(slot, self.num_slots + place)

    def read(self, slots: tuple[int, ...]) -> HeldStates:
        """Return the states of the slots. They belong to the reader until `write`, which must follow."""
        held = self._held
        if held is not None and held.slots == slots:
            return held
        if held is not None and not set(slots).isdisjoint(held.slots):
            self._put_back()
        index = torch.tensor(slots, device=self._device)
        return HeldStates(slots, [tensor.index_select(0, index) for tensor in self._tensors])

    def write(self, states: HeldStates, num_tokens: Sequence[int], *, holds: bool) -> None:
        """Keep states, each after `num_tokens` of its sequence. `holds`: these slots are likely to be read next."""
        for slot, count in zip(states.slots, num_tokens, strict=True):
            self._lengths[slot] = count
            if self._later:
                self._later.pop(slot, None)
        if self._held is not None and (holds or not set(states.slots).isdisjoint(self._held.slots)):
            if self._held.slots == states.slots:
                self._held = None
            else:
                self._put_back(but=set(states.slots))
        if holds:
            self._held = states
        else:
            self._store(states, range(len(states.slots)))

    def in_place(self) -> list[Tensor]:
        """Return the tensors of all slots, (slots, *shape) each, for a model that changes states where they are; it
        then calls `advance`. No state is held outside."""
        self._put_back()
        return self._tensors

    def behind(self, slots: Sequence[int], starts: Iterable[int]) -> tuple[int, ...] | None:
        """Return for each slot the number of later rows before the token that its sequence goes on with; None: there
        are none."""
        if not self._later:
            return None
        found = tuple(start - self._lengths[slot] for slot, start in zip(slots, starts, strict=True))
        return found if any(found) else None

    def later(self, slot: int, layer: int) -> tuple[Tensor, ...]:
        """Return what a layer kept of the rows after a slot's state."""
        return self._later[slot].layers[layer]

    def keep_later(self, slot: int, layer: int, rows: tuple[Tensor, ...]) -> None:
        """Keep what a layer needs of the rows after a slot's new state, in place of earlier ones."""
        self._later.setdefault(slot, LaterRows()).layers[layer] = rows

    def take_later(self, slot: int, number: int, count: int) -> None:
        """Make what is kept under `number` the slot's state, which is then `count` tokens further."""
        self._put_back()
        for tensor, own in zip(self._tensors, self._later.pop(slot).layers[number], strict=True):
            tensor[slot].copy_(own)
        self._lengths[slot] += count

    def advance(self, slots: Sequence[int], num_tokens: Sequence[int], later: Sequence[int] | None = None) -> None:
        """Note that slots are after `num_tokens` of their sequences. The last `later` of them are rows after the
        states; None: no slot has such rows."""
        for place, (slot, count) in enumerate(zip(slots, num_tokens, strict=True)):
            rows = 0 if later is None else later[place]
            self._lengths[slot] = count - rows
            if rows:
                self._later[slot].count = rows
            elif self._later:
                self._later.pop(slot, None)

    def _place(self, seq_id: int, start: int) -> int:
        slot = self._slots.get(seq_id)
        if slot is None and not start:
            slot = self._take(seq_id)
            self._lengths[slot] = _EMPTY
        if slot is None or not self._reaches(slot, start):
            raise RuntimeError(f"no state after token {start} of a sequence that goes on there")
        return slot

    def _reaches(self, slot: int, num_tokens: int) -> bool:
        """True when a slot's state, or one after some of its later rows, is after this number of tokens."""
        length = self._lengths[slot]
        if length == num_tokens:
            return True
        return slot in self._later and length < num_tokens <= length + self._later[slot].count

    def _take(self, seq_id: int) -> int:
        if not self._free:
            raise RuntimeError("more sequences run than there are states")
        slot = self._slots[seq_id] = self._free.pop()
        return slot

    def _copy(self, source: int, destination: int) -> None:
        self._lengths[destination] = self._lengths[source]
        if source in self._later:
            rows = self._later[source]
            self._later[destination] = LaterRows(rows.count, dict(rows.layers))
        for tensor in self._tensors:
            tensor[destination].copy_(tensor[source])

    def _put_back(self, but: Iterable[int] = ()) -> None:
        """Store the held states, except those of the slots `but`, which have newer ones."""
        held, self._held = self._held, None
        if held is not None:
            self._store(held, [place for place, slot in enumerate(held.slots) if slot not in but])

    def _store(self, states: HeldStates, places: Sequence[int]) -> None:
        if not places:
            return
        index = torch.tensor([states.slots[place] for place in places], device=self._device)
        all_places = len(places) == len(states.slots)
        chosen = None if all_places else torch.tensor(list(places), device=self._device)
        for tensor, own in zip(self._tensors, states.tensors, strict=True):
            tensor.index_copy_(0, index, own if chosen is None else own.index_select(0, chosen))


def new_states(
    layout: Sequence[StateTensor], num_slots: int, device: torch.device, num_snapshots: int = 0
) -> StatePool | None:
    """Return a pool for a model's `state_layout`; None: its layers keep no state."""
    return StatePool(layout, num_slots, device, num_snapshots) if layout else None


def state_bytes(layout: Iterable[StateTensor]) -> int:
    """Size of one sequence's state."""
    return sum(one.num_bytes for one in layout)
