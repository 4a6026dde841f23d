"""Requests as suspects: each knows the backends' deaths that it was there for, and each death who was there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

_numbers: Iterator[int] = itertools.count(1)
# Losses that others' trials may cost a request beyond its own bounds: where backends die again and again it must end.
_MOST_BY_TRIALS = 3


class Death:
    """End of a backend's connection while requests ran on it."""

    __slots__ = ("at", "is_death", "is_explained", "past_trial", "suspects", "tried")

    def __init__(self, at: float) -> None:
        """Make it. `at` is a time of time.monotonic()."""
        self.at = at
        # None: not known yet. False: the process lives.
        self.is_death: bool | None = None
        # True: a request was found to blame.
        self.is_explained = False
        # Numbers of the requests that ran there; numbers, since a death outlives them.
        self.suspects: set[int] = set()
        # Those of them that were being tried, and those that had passed without being cleared by that.
        self.tried: set[int] = set()
        self.past_trial: set[int] = set()

    @property
    def is_open(self) -> bool:
        """True while it is, or may be, a death that nothing explains."""
        return self.is_death is not False and not self.is_explained


class SuspectTrial(Protocol):
    """Trial of a suspect with its present attempt."""

    @property
    def deaths(self) -> Sequence[Death]:
        """Deaths that it is tried for."""

    @property
    def has_passed(self) -> bool:
        """True once it has gone on for long enough, or to its end."""

    @property
    def clears(self) -> bool:
        """True when it has passed, and what it did since is no reason to suspect it of those deaths."""


class Suspect:
    """One request, in the eyes of those who look for the cause of a death."""

    __slots__ = ("deaths", "longest_attempt", "losses", "number", "received_at", "trial")

    def __init__(self, received_at: float) -> None:
        """Make it. `received_at` is a time of time.monotonic()."""
        self.number = next(_numbers)
        self.received_at = received_at
        # Those that it may be to blame for, and all that it was there for.
        self.deaths: list[Death] = []
        self.losses: list[Death] = []
        # Most tokens of an attempt that was lost.
        self.longest_attempt = 0
        # Of the present attempt, if it is one.
        self.trial: SuspectTrial | None = None

    def is_suspected_with(self, other: Suspect) -> bool:
        """True where another one may be to blame for a death in its place, for all that is known by now."""
        if other.trial is not None and other.trial.clears:
            return False
        return any(death.is_open and other.number in death.suspects for death in self.deaths)

    @property
    def excused(self) -> int:
        """Number of losses that another was to blame for, or was being tried at: not its own bad luck."""
        explained = sum(death.is_explained for death in self.losses)
        others = sum(
            not death.is_explained and bool(death.tried) and self.number not in death.tried for death in self.losses
        )
        return explained + min(others, _MOST_BY_TRIALS)
