"""Errors of forecasts, on a machine that others use too: how much longer than forecast requests take that wait."""

from __future__ import annotations

import math

# The headroom is never more than this.
MOST_HEADROOM = 4.0
# Share of the way to a larger error that one request takes; seconds in which what was learnt fades to a third.
_WEIGHT, _FADE_SECONDS = 0.25, 600.0


class ForecastErrors:
    """Headroom of forecasts for requests that wait. Engine thread only.

    Such a request is accepted long before its end, and other programs may take half of the processor meanwhile. So it
    has a headroom from the start, and a larger one once requests have taken longer than that allows for.
    """

    def __init__(self, least: float) -> None:
        """`least`: the headroom while nothing is known, and after long."""
        self._least = least
        self._learnt = 0.0
        self._noted_at = -math.inf

    @property
    def headroom(self) -> float:
        """Factor by which a forecast is multiplied before it is held against a deadline."""
        return self._least + self._learnt

    def note(self, took: float, forecast: float, now: float) -> None:
        """Take the seconds of a request that waited, and its forecast of them. `now`: a time of the engine's clock."""
        if forecast <= 0.0:
            return
        passed, self._noted_at = max(now - self._noted_at, 0.0), now
        self._learnt *= math.exp(-passed / _FADE_SECONDS)
        more = min(took / forecast, MOST_HEADROOM) - self.headroom
        if more > 0.0:
            self._learnt += _WEIGHT * more
