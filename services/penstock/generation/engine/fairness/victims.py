"""Choice of the running group to preempt when blocks are short: the one place that chooses a victim."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from penstock.common.idle_only import IDLE_TENANT
from penstock.generation.engine.fairness.shares import CROWD

if TYPE_CHECKING:
    from penstock.generation.engine.fairness.fair_queue import FairQueue
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.group_queue import GroupQueue


class Victims:
    """Chooser of victims among the running groups of one scheduler.

    The first group of all is never preempted, so that some group always ends. There is one exception: beside others a
    group that uses idle capacity only gives way, even where it is the first.
    """

    def __init__(self, running: GroupQueue, waiting: FairQueue) -> None:
        """The queues are the scheduler's; this object changes neither."""
        self._running = running
        self._waiting = waiting

    def victim(self) -> SequenceGroup:
        """Return the group to preempt for a running one that needs a block; it may be that one itself.

        It is the last that uses idle capacity only beside others, else the last of a crowd, else the last of all.
        """
        crowd, _ = self._crowd()
        return crowd[-1] if crowd else self._running.last

    def victim_for(self, group: SequenceGroup) -> SequenceGroup | None:
        """Return the group to preempt for a waiting one: the last of another tenant's crowd. None: there is none."""
        crowd, _ = self._crowd()
        return crowd[-1] if crowd and _tenant(crowd[0]) != _tenant(group) else None

    def place_for(self, group: SequenceGroup) -> SequenceGroup | None:
        """Return the group to preempt so that a waiting one gets a place among the running sequences; None: none is."""
        if _tenant(group) == IDLE_TENANT or not self._waiting.has_idle_only:
            return None
        idle = self._idle_only()
        return idle[-1] if idle else None

    def blocks_for(self, group: SequenceGroup) -> int:
        """Return the number of blocks that a waiting group can get from victims."""
        crowd, blocks = self._crowd()
        return blocks if crowd and _tenant(crowd[0]) != _tenant(group) else 0

    def _crowd(self) -> tuple[list[SequenceGroup], int]:
        """Return running groups of the tenant that holds far more blocks than the others, and blocks to get from them.

        Those that use idle capacity only are one beside any others. Without the first group of all otherwise. Empty
        when there is none. O(running sequences) where there are several tenants, else O(1).
        """
        tenants = self._waiting.tenants
        if len(tenants) < 2:
            return [], 0
        if self._waiting.has_idle_only and (idle := self._idle_only()):
            return idle, sum(group.num_blocks for group in idle)
        held = dict.fromkeys(tenants, 0)
        for group in self._running:
            held[_tenant(group)] += group.num_blocks
        largest = max(held, key=lambda tenant: held[tenant])
        surplus = held[largest] - CROWD * (sum(held.values()) - held[largest]) / (len(held) - 1)
        if surplus <= 0:
            return [], 0
        crowd = [group for group in islice(self._running, 1, None) if _tenant(group) == largest]
        return crowd, min(int(surplus), sum(group.num_blocks for group in crowd))

    def _idle_only(self) -> list[SequenceGroup]:
        return [group for group in self._running if _tenant(group) == IDLE_TENANT]


def _tenant(group: SequenceGroup) -> str:
    return group.request.fair_share_key
