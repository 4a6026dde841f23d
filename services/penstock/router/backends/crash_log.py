"""Crashes of backend processes, and the request that is to blame for them, if one is.

A connection that ends makes an unconfirmed crash. It is confirmed when another process answers, or when none can be
reached any more; a process that is still there clears everybody. A request is to blame when three things hold:

1. It ran on two crashed processes or more, and all of these crashes are confirmed.
2. No other request ran on all of them, and it had not passed its probation when the last of them came. One that had
   passed, and was not cleared by that, may have been there by chance: it shares the blame, and is on probation again.
3. Since it came, no process crashed without it for an unknown reason. Where one did, it takes three crashes.

So that one more crash tells which request it is, the suspects come back one by one. Each is on probation beside nobody
that is suspected as well and has not shown yet that it does no harm (probation_queue.py).
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable

from penstock.router.requests.suspect import Crash, Suspect

# Number of crashes remembered: far more than a request can survive.
_MAX_CRASHES = 1024
# Crashes after which a request that alone was at all of them is to blame, even if other processes crashed without it.
_MANY = 3


class Blame(enum.Enum):
    """Blame of one request: NONE, SUSPECTED (of one crash, or of some among others without it), OPEN (a crash is
    not confirmed yet), SHARED with others, or its OWN."""

    NONE = 1
    SUSPECTED = 2
    OPEN = 3
    SHARED = 4
    OWN = 5


class CrashLog:
    """Crashes that one router process has seen. Belongs to one event loop."""

    def __init__(self, on_resolved: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it. `on_resolved`: a crash was confirmed, or turned out to be none."""
        self._on_resolved = on_resolved
        self._clock = clock
        self._crashes: deque[Crash] = deque(maxlen=_MAX_CRASHES)

    def note(self, suspects: Iterable[Suspect]) -> Crash:
        """Note that a process may have crashed while these requests ran on it."""
        crash = Crash(self._clock())
        self._crashes.append(crash)
        self.add(crash, suspects)
        return crash

    def add(self, crash: Crash, suspects: Iterable[Suspect]) -> None:
        """Add requests that ran there, too."""
        for suspect in dict.fromkeys(suspects):
            if suspect.number in crash.suspects:
                continue
            probation = suspect.probation
            if probation is not None and not self.clear(suspect):
                (crash.past_probation if probation.has_passed else crash.on_probation).add(suspect.number)
            suspect.probation = None
            crash.suspects.add(suspect.number)
            suspect.crashes.append(crash)
            suspect.losses.append(crash)

    def resolve(self, crash: Crash, is_confirmed: bool) -> None:
        """Confirm a crash, or note that it was none; the last word counts: an unreachable process may come back."""
        if crash.is_confirmed is not is_confirmed:
            crash.is_confirmed = is_confirmed
            self._on_resolved()

    def blame(self, suspect: Suspect) -> Blame:
        """Return what is known of a request."""
        own = _unexplained(suspect.crashes)
        if len(own) < 2:
            return Blame.SUSPECTED if own else Blame.NONE
        if any(crash.is_confirmed is None for crash in own):
            return Blame.OPEN
        # One that had passed may be in the wrong place at the wrong time: it is on probation again.
        if len(set.intersection(*(crash.suspects for crash in own))) > 1 or suspect.number in own[-1].past_probation:
            return Blame.SHARED
        recent = [crash for crash in _unexplained(self._crashes) if crash.at >= suspect.received_at]
        # Where backends crash without it, its presence does not explain why: then it takes one crash more.
        return Blame.OWN if len(own) >= _MANY or all(crash in own for crash in recent) else Blame.SUSPECTED

    def clear(self, suspect: Suspect) -> bool:
        """Clear a request of the crashes that it is on probation for, if it has passed; True then."""
        probation = suspect.probation
        if probation is None or not probation.clears:
            return False
        suspect.probation = None
        cleared = set(probation.crashes)
        for crash in cleared:
            crash.suspects.discard(suspect.number)
        suspect.crashes[:] = [crash for crash in suspect.crashes if crash not in cleared]
        return True

    def mark_poison(self, suspect: Suspect) -> None:
        """Explain the crashes of a request by it: nobody else is suspected for them."""
        for crash in suspect.crashes:
            crash.is_explained = True


def _unexplained(crashes: Iterable[Crash]) -> list[Crash]:
    return [crash for crash in crashes if crash.is_open]
