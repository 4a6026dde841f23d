"""Requests as suspects: each knows the backends' deaths that it was there for, and each death who was there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

_numbers: Iterator[int] = itertools.count(1)


class Death:
    """End of a backend's connection while requests ran on it."""

    __slots__ = ("at", "is_death", "is_explained", "suspects")

    def __init__(self, at: float) -> None:
        """Make it. `at` is a time of time.monotonic()."""
        self.at = at
        # None: not known yet. False: the process lives.
        self.is_death: bool | None = None
        # True: a request was found to blame.
        self.is_explained = False
        # Numbers of the requests that ran there; numbers, since a death outlives them.
        self.suspects: set[int] = set()


class Suspect:
    """One request, in the eyes of those who look for the cause of a death."""

    __slots__ = ("deaths", "excused", "is_tried", "longest_attempt", "number", "received_at")

    def __init__(self, received_at: float) -> None:
        """Make it. `received_at` is a time of time.monotonic()."""
        self.number = next(_numbers)
        self.received_at = received_at
        self.deaths: list[Death] = []
        # Most tokens of an attempt that was lost.
        self.longest_attempt = 0
        # True while it is tried apart from other suspects.
        self.is_tried = False
        # Losses since another was being tried there: not its own bad luck.
        self.excused = 0
