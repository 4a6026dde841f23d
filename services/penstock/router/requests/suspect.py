"""Requests as suspects: each knows the backends' crashes that it was there for, and each crash who was there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

_numbers: Iterator[int] = itertools.count(1)
# Losses that others' probations may cost a request beyond its own bounds: where backends crash again and again it must
# end.
_MOST_BY_PROBATIONS = 3


class Crash:
    """End of a backend's connection while requests ran on it: a crash of its process, if that is confirmed."""

    __slots__ = ("at", "is_confirmed", "is_explained", "on_probation", "past_probation", "suspects")

    def __init__(self, at: float) -> None:
        """Make it. `at` is a time of time.monotonic()."""
        self.at = at
        # None: not known yet. False: the process lives on.
        self.is_confirmed: bool | None = None
        # True: a request was found to blame.
        self.is_explained = False
        # Numbers of the requests that ran there; numbers, since a crash outlives them.
        self.suspects: set[int] = set()
        # Those of them that were on probation, and those that had passed theirs without being cleared by that.
        self.on_probation: set[int] = set()
        self.past_probation: set[int] = set()

    @property
    def is_open(self) -> bool:
        """True while it is, or may be, a crash that nothing explains."""
        return self.is_confirmed is not False and not self.is_explained


class SuspectProbation(Protocol):
    """Probation of a suspect with its present attempt."""

    @property
    def crashes(self) -> Sequence[Crash]:
        """Crashes that it is on probation for."""

    @property
    def has_passed(self) -> bool:
        """True once it has gone on for long enough, or to its end."""

    @property
    def clears(self) -> bool:
        """True when it has passed, and what it did since is no reason to suspect it of those crashes."""


class Suspect:
    """One request, in the eyes of those who look for the cause of a crash."""

    __slots__ = ("crashes", "longest_attempt", "losses", "number", "probation", "received_at")

    def __init__(self, received_at: float) -> None:
        """Make it. `received_at` is a time of time.monotonic()."""
        self.number = next(_numbers)
        self.received_at = received_at
        # Those that it may be to blame for, and all that it was there for.
        self.crashes: list[Crash] = []
        self.losses: list[Crash] = []
        # Most tokens of an attempt that was lost.
        self.longest_attempt = 0
        # Of the present attempt, if it is one.
        self.probation: SuspectProbation | None = None

    @property
    def is_cleared(self) -> bool:
        """True when its probation has cleared it of the crashes so far."""
        return self.probation is not None and self.probation.clears

    def is_suspected_with(self, others: Set[int]) -> bool:
        """True where one of the others, by their numbers, may be to blame for a crash in its place."""
        return any(crash.is_open and not crash.suspects.isdisjoint(others) for crash in self.crashes)

    @property
    def excused(self) -> int:
        """Number of losses that another was to blame for, or was on probation at: not its own bad luck."""
        unexplained = [crash for crash in self.losses if not crash.is_explained]
        others = sum(bool(crash.on_probation) and self.number not in crash.on_probation for crash in unexplained)
        return len(self.losses) - len(unexplained) + min(others, _MOST_BY_PROBATIONS)
