"""Deaths of backend processes, and the request that is to blame for them, if one is.

A connection that ended is only a doubt. It becomes a death when the process turns out to be another one, or cannot be
reached any more; a process that is still there clears everybody. A request is to blame when it ran on two processes
that died or more, and no other request ran on all of them. So that one death more tells which it is, those that ran on
a dead one come back one by one, each beside nobody that is suspected as well and has not shown yet that it does no harm
(trials.py).
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable

from penstock.router.requests.suspect import Death, Suspect

# Number of deaths remembered: far more than a request can survive.
_MAX_DEATHS = 1024
# Deaths after which a request that alone ran on all of them is to blame, even if others died without it.
_MANY = 3


class Blame(enum.Enum):
    """Blame of one request: NONE, SUSPECTED (of one death, or of some among others without it), OPEN (a doubt is not
    cleared yet), SHARED with others, or its OWN."""

    NONE = 1
    SUSPECTED = 2
    OPEN = 3
    SHARED = 4
    OWN = 5


class Deaths:
    """Ledger of one router process. Belongs to one event loop."""

    def __init__(self, on_judged: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it. `on_judged`: a doubt became a death or was cleared."""
        self._on_judged = on_judged
        self._clock = clock
        self._deaths: deque[Death] = deque(maxlen=_MAX_DEATHS)

    def doubt(self, suspects: Iterable[Suspect]) -> Death:
        """Note that a process may have died while these requests ran on it."""
        death = Death(self._clock())
        self._deaths.append(death)
        self.add(death, suspects)
        return death

    def add(self, death: Death, suspects: Iterable[Suspect]) -> None:
        """Add requests that ran there, too."""
        for suspect in dict.fromkeys(suspects):
            if suspect.number in death.suspects:
                continue
            trial = suspect.trial
            if trial is not None and not self.settle(suspect):
                (death.past_trial if trial.has_passed else death.tried).add(suspect.number)
            suspect.trial = None
            death.suspects.add(suspect.number)
            suspect.deaths.append(death)
            suspect.losses.append(death)

    def judge(self, death: Death, is_death: bool) -> None:
        """Turn a doubt into a death, or clear it; the last word counts: an unreachable process may come back."""
        if death.is_death is not is_death:
            death.is_death = is_death
            self._on_judged()

    def blame(self, suspect: Suspect) -> Blame:
        """Return what is known of a request."""
        own = _unexplained(suspect.deaths)
        if len(own) < 2:
            return Blame.SUSPECTED if own else Blame.NONE
        if any(death.is_death is None for death in own):
            return Blame.OPEN
        # One that had passed may be in the wrong place at the wrong time: it is tried again.
        if len(set.intersection(*(death.suspects for death in own))) > 1 or suspect.number in own[-1].past_trial:
            return Blame.SHARED
        recent = [death for death in _unexplained(self._deaths) if death.at >= suspect.received_at]
        # Where backends die without it, its presence does not explain why: then it takes one death more.
        return Blame.OWN if len(own) >= _MANY or all(death in own for death in recent) else Blame.SUSPECTED

    def settle(self, suspect: Suspect) -> bool:
        """Clear a request of the deaths that it was tried for, if its trial does so; True then."""
        trial = suspect.trial
        if trial is None or not trial.clears:
            return False
        suspect.trial = None
        tried_for = set(trial.deaths)
        for death in tried_for:
            death.suspects.discard(suspect.number)
        suspect.deaths[:] = [death for death in suspect.deaths if death not in tried_for]
        return True

    def convict(self, suspect: Suspect) -> None:
        """Explain the deaths of a request by it: nobody else is suspected for them."""
        for death in suspect.deaths:
            death.is_explained = True


def _unexplained(deaths: Iterable[Death]) -> list[Death]:
    return [death for death in deaths if death.is_open]
