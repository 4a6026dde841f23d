"""Order of tenants by the tokens that each has received: start-time fair queueing with counters, without a clock.

Each tenant has a counter of the tokens that its requests received. The tenant with the lowest comes first. A tenant
that returns after an idle time starts level with the others, so nobody saves up a claim by being away.
(Goyal et al. 1996, Start-time Fair Queueing; Sheng et al. 2024, Fairness in Serving Large Language Models.)
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant's counter. `number` decides between equal counters: the tenant known first comes first."""

    tenant: str
    number: int
    spent: float = 0.0
    waits: bool = False

    @property
    def key(self) -> tuple[float, int]:
        return self.spent, self.number


class FairOrder:
    """Waiting tenants, the one that has received the least first. Every change is O(log tenants)."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._waiting: list[_Account] = []
        # Counter of the tenant served last, before it was charged: newcomers start with it.
        self._floor = 0.0
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tenants that wait, in order."""
        return (account.tenant for account in self._waiting)

    def wait(self, tenant: str, *, is_new: bool = True) -> None:
        """Put a tenant into the order. `is_new` False: it only returns to its place, as after a preemption."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(tenant, next(self._numbers), self._floor)
        if account.waits:
            return
        if is_new:
            account.spent = max(account.spent, self._floor)
        account.waits = True
        insort(self._waiting, account, key=lambda one: one.key)

    def stop_waiting(self, tenant: str) -> None:
        """Take a tenant out of the order; its counter stays."""
        account = self._accounts[tenant]
        if account.waits:
            account.waits = False
            self._take_out(account)

    def charge(self, tenant: str, tokens: float) -> None:
        """Add to a tenant's counter; a negative number corrects an earlier one that was too high."""
        account = self._accounts[tenant]
        if account.waits:
            self._take_out(account)
        if tokens > 0:
            self._floor = max(self._floor, account.spent)
        account.spent += tokens
        if account.waits:
            insort(self._waiting, account, key=lambda one: one.key)

    def forget(self, tenant: str) -> None:
        """Forget a tenant without requests, if it is known."""
        if tenant in self._accounts:
            self.stop_waiting(tenant)
            del self._accounts[tenant]

    def _take_out(self, account: _Account) -> None:
        del self._waiting[bisect_left(self._waiting, account.key, key=lambda one: one.key)]
