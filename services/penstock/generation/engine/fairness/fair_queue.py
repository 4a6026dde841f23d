"""Waiting groups, fair between tenants: by tokens from tenant to tenant, by `SequenceGroup.key` within one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain

from penstock.common.fair_order import FairOrder
from penstock.common.idle_only import IDLE_TENANT
from penstock.generation.engine.group import SequenceGroup
from penstock.generation.engine.group_queue import GroupQueue


class FairQueue:
    """Queue of groups and counters of their tenants. A tenant is a request's `fair_share_key`.

    A tenant is charged the expected cost when one of its groups starts, and the difference when that group is over.
    With one tenant the order is that of a GroupQueue. The tenant of idle capacity comes after all others, and is none
    of those that share.
    """

    def __init__(self, memory_seconds: float) -> None:
        """`memory_seconds`: time that a tenant still counts as present after its last request is over."""
        self._memory_seconds = memory_seconds
        # Time of the step being put together, by the engine's clock, comparable with arrival times.
        self.now = float("-inf")
        self._queues: dict[str, GroupQueue] = {}
        self._order = FairOrder()
        self._num_groups = 0
        # Number of groups here without those that use idle capacity only.
        self.num_pressing = 0
        # True when a request that uses idle capacity only is here, waiting or not.
        self.has_idle_only = False
        # Unfinished groups of each tenant, waiting or not.
        self._live: Counter[str] = Counter()
        self._charged: dict[SequenceGroup, int] = {}
        # Waiting tokens, by tenant. Replaced, never changed: readers on other threads may keep it.
        self.waiting_tokens: dict[str, float] = {}
        # Number of prompt tokens of all groups here, computed or not.
        self.prompt_tokens = 0
        # The two tenants that last came or went, and when.
        self._last = self._last_other = ("", float("-inf"))

    def __len__(self) -> int:
        return self._num_groups

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Iterate over all groups, tenant by tenant."""
        return chain.from_iterable(self._queues[tenant] for tenant in tuple(self._order))

    def num_of(self, tenant: str) -> int:
        """Return the number of a tenant's groups here."""
        queue = self._queues.get(tenant)
        return 0 if queue is None else len(queue)

    def first(self, held: Collection[str] = ()) -> SequenceGroup | None:
        """Return the group that is next in turn, among tenants that are not `held`."""
        for tenant in self._order:
            if tenant not in held and tenant != IDLE_TENANT:
                return self._queues[tenant].first
        if IDLE_TENANT in self._queues and IDLE_TENANT not in held:
            return self._queues[IDLE_TENANT].first
        return None

    def enter(self, group: SequenceGroup) -> None:
        """Take a new group."""
        tenant = group.request.fair_share_key
        self._remember(tenant, group.request.arrival_time)
        self._live[tenant] += 1
        if tenant == IDLE_TENANT:
            self.has_idle_only = True
        self._add(group, is_new=True)

    def put_back(self, group: SequenceGroup) -> None:
        """Put a group back in its place: it was preempted, or passed over."""
        self._add(group, is_new=False)

    def remove(self, group: SequenceGroup) -> None:
        """Remove `group`. Raises KeyError when it is not in the queue."""
        tenant = group.request.fair_share_key
        queue = self._queues[tenant]
        queue.remove(group)
        if not len(queue):
            del self._queues[tenant]
            self._order.stop_waiting(tenant)
        self._count(group, -1)

    def charge(self, group: SequenceGroup) -> None:
        """Charge the tenant of a group that starts; do nothing if it started before."""
        if group not in self._charged:
            self._charged[group] = group.cost
            self._order.charge(group.request.fair_share_key, group.cost)

    def close(self, group: SequenceGroup, tokens: int) -> None:
        """Note that a group is over and in no queue; `tokens` counts its prompt and its generated tokens."""
        tenant, charged = group.request.fair_share_key, self._charged.pop(group, None)
        if charged is not None:
            self._order.charge(tenant, tokens - charged)
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if tenant == IDLE_TENANT:
                self.has_idle_only = False
            self._order.forget(tenant)
            self._remember(tenant, self.now)

    @property
    def tenants(self) -> Collection[str]:
        """Tenants that have a group, waiting or not."""
        return self._live.keys()

    @property
    def num_idle_only(self) -> int:
        """Number of groups that use idle capacity only, waiting or not."""
        return self._live[IDLE_TENANT] if self.has_idle_only else 0

    @property
    def is_idle_alone(self) -> bool:
        """True when there are such requests, and no others."""
        return self.has_idle_only and len(self._live) == 1

    @property
    def has_callers(self) -> bool:
        """True when a request that uses more than idle capacity is here, or was a short time ago."""
        return len(self._live) > self.has_idle_only or self._last[1] >= self.now - self._memory_seconds

    @property
    def is_shared(self) -> bool:
        """True when several tenants have a request, or one has and another had one a short time ago."""
        if len(self._live) - self.has_idle_only > 1:
            return True
        # The only tenant, or none.
        for tenant in self._live:
            if tenant != IDLE_TENANT:
                return self._had_others(tenant)
        return False

    def has_others(self, tenant: str) -> bool:
        """True when another tenant has a request, or had one a short time ago."""
        return len(self._live) - self.has_idle_only > (tenant in self._live) or self._had_others(tenant)

    def _had_others(self, tenant: str) -> bool:
        other = self._last_other if self._last[0] == tenant else self._last
        return other[1] >= max(self.now, self._last[1]) - self._memory_seconds

    def _remember(self, tenant: str, at: float) -> None:
        """Note that a tenant was present at `time`."""
        if tenant == IDLE_TENANT:
            return
        at = max(at, self._last[1])
        if tenant != self._last[0]:
            self._last_other = self._last
        self._last = (tenant, at)

    def _add(self, group: SequenceGroup, *, is_new: bool) -> None:
        tenant = group.request.fair_share_key
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = GroupQueue()
        queue.add(group)
        self._order.wait(tenant, is_new=is_new)
        self._count(group, 1)

    def _count(self, group: SequenceGroup, sign: int) -> None:
        tenant, prompt = group.request.fair_share_key, len(group.request.prompt_token_ids)
        self._num_groups += sign
        self.prompt_tokens += sign * prompt
        if tenant == IDLE_TENANT:
            # Nobody waits for it.
            return
        self.num_pressing += sign
        waiting = {**self.waiting_tokens, tenant: self.waiting_tokens.get(tenant, 0.0) + sign * group.cost}
        if tenant not in self._queues:
            del waiting[tenant]
        self.waiting_tokens = waiting
