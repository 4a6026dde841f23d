"""Expected time of a request: kept with it, compared with its real time, and summed over the running requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Share of its forecast that a request surely takes: with less time left it cannot end before its deadline.
_SUREST = 0.8
# The headroom is never more than this.
MOST_HEADROOM = 4.0
# Share of the way to a larger error that one request moves the average; seconds in which it fades to a third.
_WEIGHT, _FADE_SECONDS = 0.25, 600.0


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """Forecast of one request, by the engine's figures at its arrival."""

    # Seconds until its first step; 0: it does not have to wait. Then the same without the correction of waits.
    wait_seconds: float = 0.0
    raw_wait_seconds: float = 0.0
    # Seconds of a step, and its number of steps: those of its prompt, and of an answer of the expected length.
    step_seconds: float = 0.0
    prompt_steps: int = 0
    output_steps: float = 0.0

    def seconds(self, output_steps: float) -> float:
        """Seconds from arrival to end of a request with `output_steps` steps after its prompt."""
        return self.wait_seconds + (self.prompt_steps + output_steps) * self.step_seconds

    def serving_seconds(self, step_seconds: float) -> float:
        """Seconds from its first step to its end, with steps of `step_seconds`."""
        return (self.prompt_steps + self.output_steps) * step_seconds

    def latest_start(self, deadline: float, step_seconds: float) -> float:
        """Latest start for an end before `deadline`, with steps of `step_seconds`; later ones surely fail."""
        return deadline - _SUREST * self.serving_seconds(step_seconds)


class ForecastErrors:
    """Headroom of forecasts for requests that wait. Engine thread only.

    Such a request is accepted long before its end, and other programs may take half of the processor meanwhile. So it
    has a headroom from the start, and a larger one after requests have exceeded that.
    """

    def __init__(self, least: float) -> None:
        """`least`: the headroom at the start, and again a long time after the last error."""
        self._least = least
        self._learnt = 0.0
        self._noted_at = -math.inf
        # Factor on a forecast before it is compared with a deadline.
        self.headroom = least

    def note(self, took: float, forecast: float, now: float) -> None:
        """Take the seconds of a request that waited, and its forecast of them. `now`: a time of the engine's clock."""
        if forecast <= 0.0:
            return
        passed, self._noted_at = max(now - self._noted_at, 0.0), now
        self._learnt *= math.exp(-passed / _FADE_SECONDS)
        more = min(took / forecast, MOST_HEADROOM) - (self._least + self._learnt)
        if more > 0.0:
            self._learnt += _WEIGHT * more
        self.headroom = self._least + self._learnt


class RunningAges:
    """Begins and expected steps of running requests. O(1) per begin or end. Engine thread only."""

    def __init__(self) -> None:
        self._num = 0
        self._begins = self._steps = 0.0

    def began(self, expected: ExpectedTime, at: float) -> None:
        """Add a request that has its first step at `time`."""
        self._num += 1
        self._begins += at
        self._steps += expected.prompt_steps + expected.output_steps

    def ended(self, expected: ExpectedTime, at: float) -> None:
        """Remove a request that began at `time`."""
        self._num -= 1
        if self._num:
            self._begins -= at
            self._steps -= expected.prompt_steps + expected.output_steps
        else:
            # Sums of fractions may leave a remainder.
            self._begins = self._steps = 0.0

    def uneven_seconds(self, now: float, step_seconds: float) -> float:
        """Seconds from the mean end of requests that began one after the other to the mean end of these.

        The former have half of their time behind them, and places become free all the time. A crowd that came at once
        has all of its time before it, and no place becomes free until then.
        """
        if not self._num:
            return 0.0
        half = self._steps / self._num * step_seconds / 2
        return max(half - (now - self._begins / self._num), 0.0)
