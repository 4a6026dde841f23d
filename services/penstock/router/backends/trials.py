"""Turns of the requests that were lost with a backend: a poison must be alone among suspects where it strikes again.

On each backend one suspect is being tried at a time; the others of its death wait. Whoever is most likely to be to
blame comes first, so that innocents seldom wait for long: who was there at most deaths, then who had made the fewest
tokens (what runs for long has shown that it can), then the newest. One that passed alone is cleared by nothing yet (it
may do harm in company), so that of two that were there a death would not tell which: where another backend will do,
the next are tried there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock.router.backends.backend import Backend
from penstock.router.backends.deaths import Blame
from penstock.router.backends.patience import Patience
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.requests.suspect import Suspect
from penstock.router.requests.trial import Trial

# A trial ends with a token, for which nothing is called. It is also the time in which all of a death come to the queue.
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Turn:
    """A suspect's wait: what it is tried for, where it may go, and how its trial begins."""

    suspect: Suspect
    # (model, adapter).
    where: tuple[str, str]
    # Chooses among backends without a trial. They are never empty.
    choose: Callable[[Sequence[Backend]], Backend]
    begin: Callable[[float], Trial]
    # True once nobody waits for it any more.
    is_given_up: Callable[[], bool]
    # Gets the adapter to a backend, in so many seconds at most.
    bring: Callable[[float], Awaitable[object]] | None = None

    @property
    def rank(self) -> tuple[int, int, float]:
        """Order of turns: lower is earlier."""
        suspect = self.suspect
        return (-len(suspect.deaths), suspect.longest_attempt, -suspect.received_at)


class Trials:
    """Trials and waits of one router process. Belongs to one event loop."""

    def __init__(self, pool: BackendPool, config: RouterConfig) -> None:
        """Make it: nothing is tried."""
        self._pool = pool
        self._config = config
        # Key of a backend -> the backend, and the trial there.
        self._running: dict[str, tuple[Backend, Trial]] = {}
        # Key -> those that passed there alone.
        self._alone: dict[str, list[Trial]] = {}
        self._waiting: list[Turn] = []
        # time.monotonic() when a trial last began or ended: while some do, the others' turns come.
        self._moved_at = 0.0
        self._look_timer: asyncio.TimerHandle | None = None

    def taken(self) -> set[str]:
        """Return the keys of backends with a trial that is not over. What is over is noted, and wakes who waits."""
        now, before = time.monotonic(), len(self._running)
        for key, (backend, trial) in list(self._running.items()):
            # One that waits in a queue for so long keeps the others back for nothing.
            is_late = now - trial.begun_at > self._config.quarantine_wait_seconds
            if trial.is_over or is_late or not any(death.is_open for death in trial.deaths):
                del self._running[key]
                self._moved_at = now
                if trial.has_passed:
                    self._note_passed(key, trial, has_company=backend.in_flight > 1)
        if len(self._running) < before:
            self._pool.wake()
        return set(self._running)

    async def wait(self, turn: Turn, blame: Callable[[], Blame], patience: Patience) -> Backend | None:
        """Return a backend for a suspect, where its trial has begun; None when it must, or may, do without.

        `blame` tells what is known of it now. One that shares it waits for as long as others are tried; one that is
        merely suspected, for `--isolation-wait-seconds` at most; nobody, once another was found to blame.
        """
        self._waiting.append(turn)
        try:
            if any(len(death.suspects) > 1 for death in turn.suspect.deaths):
                await asyncio.sleep(_LOOK_SECONDS)
            since = time.monotonic()
            while not turn.is_given_up() and (known := blame()) in (Blame.SUSPECTED, Blame.SHARED):
                if turn.bring is not None:
                    await turn.bring(patience.left())
                usable = [one for one in self._pool.usable(*turn.where) if not one.is_full]
                backend = self._place(turn, usable)
                if backend is not None:
                    return backend
                if not usable:
                    since = time.monotonic()
                left = self._left(known, since) if usable else patience.left()
                if left <= 0:
                    return None
                await self._pool.changed(left)
        finally:
            self._waiting.remove(turn)
            # It may have been the one that the others let go first.
            self._pool.wake()
        return None

    def _place(self, turn: Turn, usable: Sequence[Backend]) -> Backend | None:
        """Begin the trial, if it is the suspect's turn."""
        taken = self.taken()
        free = [one for one in usable if one.key not in taken]
        before = sum(one.where == turn.where and one.rank < turn.rank for one in self._waiting)
        if len(free) > before:
            free = self._apart(turn.suspect, usable, free)
        if len(free) <= before:
            return None
        backend = turn.choose(free)
        self._moved_at = time.monotonic()
        self._running[backend.key] = backend, turn.begin(self._moved_at)
        if self._look_timer is None:
            self._look_timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        return backend

    def _apart(self, suspect: Suspect, usable: Sequence[Backend], free: list[Backend]) -> list[Backend]:
        """Return those of the free backends where a death would tell that it was this suspect; all of them, where no
        backend is such. One with a trial counts by who was there before: whoever is tried there will be cleared."""
        apart = {one.key for one in usable if not any(map(suspect.is_suspected_with, self._others(one)))}
        return [one for one in free if one.key in apart] if apart else free

    def _others(self, backend: Backend) -> list[Suspect]:
        """Return who runs at a backend, but for the one that is being tried there."""
        _, trial = self._running.get(backend.key, (backend, None))
        return [one for one in backend.suspects() if trial is None or one is not trial.suspect]

    def _look(self) -> None:
        """Look for trials that are over, again and again while there is one."""
        loop = asyncio.get_running_loop()
        self._look_timer = loop.call_later(_LOOK_SECONDS, self._look) if self.taken() else None

    def _note_passed(self, key: str, trial: Trial, *, has_company: bool) -> None:
        """Note who has run beside others: those that passed there before have, too."""
        trial.had_company = has_company
        alone = [one for one in self._alone.pop(key, []) if one.suspect.trial is one]
        if not has_company:
            self._alone[key] = [*alone, trial]
            return
        for one in alone:
            one.had_company = True

    def _left(self, blame: Blame, since: float) -> float:
        """Seconds that a suspect waits on, where there is a backend, since that is so."""
        config, now = self._config, time.monotonic()
        if blame is Blame.SHARED:
            return max(since, self._moved_at) + config.quarantine_wait_seconds - now
        return since + config.isolation_wait_seconds - now
