"""Keeps retries a small share of requests, so that an overloaded cluster is not hit harder for being overloaded."""

from __future__ import annotations


class RetryBudget:
    """A bucket that starts full with `burst` retries; each request adds `ratio` of one."""

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = float(burst)
        self._left = float(burst)

    def note_request(self) -> None:
        """A request was placed for the first time."""
        self._left = min(self._burst, self._left + self._ratio)

    def take(self) -> bool:
        """Whether one more retry is within the budget; it is then spent."""
        # Ten times a tenth is not quite one.
        if self._left < 1.0 - 1e-9:
            return False
        self._left -= 1.0
        return True
