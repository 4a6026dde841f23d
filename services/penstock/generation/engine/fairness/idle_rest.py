"""Rest between the steps of idle capacity, while callers are there.

A caller's request reaches the engine through several processes. Steps that follow each other without a pause keep the
processors from each of these. Beside callers they so take a share of the time, whatever a step takes on this machine.
"""

from __future__ import annotations

import math


class IdleRest:
    """Time until which steps of idle capacity rest. Engine thread only."""

    def __init__(self, share: float) -> None:
        """`share` of the time that the steps may take; 1: they do not rest."""
        self._rest_of_step = 1.0 / share - 1.0
        self._until = -math.inf

    def stepped(self, seconds: float, end: float) -> None:
        """Take the time of a step beside callers, and its end."""
        self._until = end + self._rest_of_step * seconds

    def seconds(self, now: float) -> float:
        """Return the seconds that are left; 0: a step may begin."""
        return max(self._until - now, 0.0)
