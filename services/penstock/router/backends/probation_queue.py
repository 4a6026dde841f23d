"""Queue of the requests that were lost with a backend: a poison must be alone among suspects where it strikes again.

On each backend one suspect is on probation at a time; the others of its crash wait. Whoever is most likely to be to
blame comes first, so that innocents seldom wait for long: who was there at most crashes, then who had made the fewest
tokens (what runs for long has shown that it can), then the newest. One that passed alone is cleared by nothing yet (it
may do harm in company), so that of two that were there a crash would not tell which: where another backend will do,
the next are on probation there. For one that is taken they wait only where the probation there will clear its suspect,
and for half of their time: a probation in bad company tells more than none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock.router.backends.ability import Ability
from penstock.router.backends.backend import Backend
from penstock.router.backends.crash_log import Blame
from penstock.router.backends.patience import Patience
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.requests.probation import Probation
from penstock.router.requests.suspect import Suspect

# A probation ends with a token, for which nothing is called. All of a crash come to the queue within this time.
_LOOK_SECONDS = 0.02
# Part of its longest wait in which a suspect leaves a free backend for a better one that is taken.
_PICKY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class SuspectTurn:
    """A suspect's wait: the crashes that it is suspected of, where it may go, and how its probation begins."""

    suspect: Suspect
    # (model, adapter).
    where: tuple[str, str]
    # Chooses among backends without a probation. They are never empty.
    choose: Callable[[Sequence[Backend]], Backend]
    begin: Callable[[float], Probation]
    # True once nobody waits for it any more.
    is_given_up: Callable[[], bool]
    # Gets the adapter to a backend; the second argument is a limit in seconds.
    bring: Callable[[float], Awaitable[object]] | None = None
    # What it needs of a backend; None: any will do.
    ability: Ability | None = None

    @property
    def rank(self) -> tuple[int, int, float]:
        """Order of turns: lower is earlier."""
        suspect = self.suspect
        return (-len(suspect.crashes), suspect.longest_attempt, -suspect.received_at)


@dataclass(slots=True, eq=False)
class _Wait:
    """A turn in the queue."""

    turn: SuspectTurn
    # time.monotonic() from which on it takes any free backend.
    picky_until: float


class ProbationQueue:
    """Probations of one router process, and the suspects that wait for theirs. Belongs to one event loop."""

    def __init__(self, pool: BackendPool, config: RouterConfig) -> None:
        """Make it: nobody is on probation."""
        self._pool = pool
        self._config = config
        # Key of a backend -> the backend, and the probation there.
        self._running: dict[str, tuple[Backend, Probation]] = {}
        # Key -> those that passed there alone.
        self._alone: dict[str, list[Probation]] = {}
        self._waiting: list[_Wait] = []
        # Key -> numbers of those that may be to blame for a crash there, as seen in this turn of the event loop: after
        # a crash with a thousand streams each of them asks.
        self._others: dict[str, set[int]] = {}
        # time.monotonic() when a probation last began or ended: while some do, the others' turns come.
        self._moved_at = 0.0
        self._look_timer: asyncio.TimerHandle | None = None

    def taken(self) -> set[str]:
        """Return the keys of backends with a probation that is not over. What is over is noted, and wakes who waits."""
        now, before = time.monotonic(), len(self._running)
        for key, (backend, probation) in list(self._running.items()):
            # One that waits in a queue for so long keeps the others back for nothing.
            is_late = now - probation.begun_at > self._config.quarantine_wait_seconds
            if probation.is_over or is_late or not any(crash.is_open for crash in probation.crashes):
                del self._running[key]
                self._moved_at = now
                if probation.has_passed:
                    self._note_passed(key, probation, has_company=backend.in_flight > 1)
        if len(self._running) < before:
            self._others.clear()
            self._pool.wake()
        return set(self._running)

    async def wait(self, turn: SuspectTurn, blame: Callable[[], Blame], patience: Patience) -> Backend | None:
        """Return a backend for a suspect, where its probation has begun; None when it must, or may, do without.

        `blame` tells what is known of it now. One that shares it waits for as long as others are on probation; one that
        is merely suspected, for `--isolation-wait-seconds` at most; nobody, once another was found to blame.
        """
        wait = _Wait(turn, time.monotonic() + _PICKY_SHARE * self._config.isolation_wait_seconds)
        self._waiting.append(wait)
        try:
            if any(len(crash.suspects) > 1 for crash in turn.suspect.crashes):
                await asyncio.sleep(_LOOK_SECONDS)
            since = time.monotonic()
            while not turn.is_given_up() and (known := blame()) in (Blame.SUSPECTED, Blame.SHARED):
                if turn.bring is not None:
                    await turn.bring(patience.left())
                usable = [one for one in self._pool.usable(*turn.where) if not one.load.is_full]
                if turn.ability is not None:
                    usable = [one for one in usable if turn.ability.has(one)]
                wait.picky_until = since + _PICKY_SHARE * self._longest(known)
                backend = self._place(wait, usable)
                if backend is not None:
                    return backend
                if not usable:
                    since = time.monotonic()
                left = self._left(known, since) if usable else patience.left()
                if left <= 0:
                    return None
                picky = wait.picky_until - time.monotonic()
                await self._pool.changed(min(left, picky) if picky > 0 else left)
        finally:
            self._waiting.remove(wait)
            # It may have been the one that the others let go first.
            self._pool.wake()
        return None

    def _place(self, wait: _Wait, usable: Sequence[Backend]) -> Backend | None:
        """Begin the probation, if it is the suspect's turn."""
        taken = self.taken()
        places = self._places(wait, usable, taken)
        if not places or self._are_for_others(places, wait.turn, usable, taken):
            return None
        backend = wait.turn.choose(places)
        self._moved_at = time.monotonic()
        self._running[backend.key] = backend, wait.turn.begin(self._moved_at)
        if self._look_timer is None:
            self._look_timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        return backend

    def _are_for_others(
        self, places: Sequence[Backend], turn: SuspectTurn, usable: Sequence[Backend], taken: set[str]
    ) -> bool:
        """Return True where those that come earlier may need all of these backends. Who would take none of them now
        keeps nobody back."""
        keys, left = {one.key for one in places}, len(places)
        for wait in self._waiting:
            is_earlier = wait.turn.where == turn.where and wait.turn.rank < turn.rank
            if is_earlier and not keys.isdisjoint(one.key for one in self._places(wait, usable, taken)):
                left -= 1
                if not left:
                    return True
        return False

    def _places(self, wait: _Wait, usable: Sequence[Backend], taken: set[str]) -> list[Backend]:
        """Return the free backends where a probation may begin now: those where a crash would tell that it was this
        one; all of them, where no backend is such. None while it waits for one that is taken and will be such."""
        free = [one for one in usable if one.key not in taken]
        suspect = wait.turn.suspect
        apart = [one for one in free if self._is_apart(suspect, one)]
        if apart or not free:
            return apart
        is_picky = time.monotonic() < wait.picky_until
        if is_picky and any(one.key in taken and self._is_apart(suspect, one) for one in usable):
            return []
        return free

    def _is_apart(self, suspect: Suspect, backend: Backend) -> bool:
        """Return True where a crash of this backend would tell that it was this suspect, once the probation there is
        over."""
        others = self._others.get(backend.key)
        if others is None:
            if not self._others:
                asyncio.get_running_loop().call_soon(self._others.clear)
            others = self._others[backend.key] = self._find_others(backend)
        return not suspect.is_suspected_with(others)

    def _find_others(self, backend: Backend) -> set[int]:
        """Return the numbers of those that run at a backend and were not cleared, nor will be by their probation."""
        _, probation = self._running.get(backend.key, (backend, None))
        cleared = None
        if probation is not None and (probation.clears_alone or backend.in_flight > 1):
            cleared = probation.suspect
        return {one.number for one in backend.suspects() if one is not cleared and not one.is_cleared}

    def _look(self) -> None:
        """Look for probations that are over, again and again while there is one."""
        loop = asyncio.get_running_loop()
        self._look_timer = loop.call_later(_LOOK_SECONDS, self._look) if self.taken() else None

    def _note_passed(self, key: str, probation: Probation, *, has_company: bool) -> None:
        """Note who has run beside others: those that passed there before have, too."""
        probation.had_company = has_company
        alone = [one for one in self._alone.pop(key, []) if one.suspect.probation is one]
        if not has_company:
            self._alone[key] = [*alone, probation]
            return
        for one in alone:
            one.had_company = True

    def _left(self, blame: Blame, since: float) -> float:
        """Seconds that a suspect waits on, where there is a backend, since that is so."""
        begin = max(since, self._moved_at) if blame is Blame.SHARED else since
        return begin + self._longest(blame) - time.monotonic()

    def _longest(self, blame: Blame) -> float:
        config = self._config
        return config.quarantine_wait_seconds if blame is Blame.SHARED else config.isolation_wait_seconds
