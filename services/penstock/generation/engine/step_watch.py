"""Watch on the engine's steps: the time of the current step, compared with earlier steps of its size.

Only earlier steps of the same size tell a slow step from one that hangs: long prompts take long, and so does any step
of a large model. From outside the two look the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.generation.engine.block_copies import num_swapped
from penstock.generation.engine.engine_listener import EngineListener

if TYPE_CHECKING:
    from penstock.generation.core.step import RunnerOutput, SchedulerOutput
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.scheduler import Scheduler

# Factor on the slowest time of a size at each further step: one slow moment is forgotten after some tens of steps.
_KEPT = 0.9
# Sizes are powers of two: the number of bits of the number of rows.
_SIZES = 33


class StepView(NamedTuple):
    """State of the step in progress. All false and 0: there is none."""

    seconds: float = 0.0
    # time.monotonic() of its begin: tells it from other steps.
    began: float = 0.0
    # It has run far longer than such steps take. It may still end; meanwhile there is no progress to report.
    is_overdue: bool = False
    # It has run for so long that nobody should wait for it.
    is_hung: bool = False


class StepWatch(EngineListener):
    """Watch that the engine's thread writes, by plain attributes, and any thread reads. It hears the size of a step
    from the engine; its begin and its end are the thread's."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._began: float | None = None
        # Rows of the step in progress; 0: not known yet.
        self.num_tokens = 0
        # Time of its copies between the pools, as expected, then as measured: it does not depend on the step's size.
        self.copy_seconds = 0.0
        # By size: seconds of the slowest recent step; 0: none yet.
        self._slowest = [0.0] * _SIZES
        # Begin of a step, and the part of its time that does not count.
        self._forgiven = (0.0, 0.0)

    def begin(self) -> None:
        """Note that the thread begins a step, or the commands before it."""
        self.num_tokens = 0
        self.copy_seconds = 0.0
        self._began = time.monotonic()

    def scheduled(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Take the step's rows, and how much longer it takes for its copies."""
        self.num_tokens = output.num_tokens
        if output.copies:
            self.copy_seconds = scheduler.policy.copy_seconds(*num_swapped(output.copies))

    def copied(self, output: SchedulerOutput, result: RunnerOutput) -> None:
        """Take the time that the copies took."""
        self.copy_seconds = result.out_seconds + result.in_seconds

    def end(self) -> None:
        """Note that the step is done."""
        began, self._began = self._began, None
        size = self.num_tokens.bit_length()
        if began is None or not size:
            return
        seconds, kept = time.monotonic() - began - self._forgiven_of(began), _KEPT * self._slowest[size]
        seconds -= self.copy_seconds
        if seconds > kept:
            self.note(self.num_tokens, seconds)
        else:
            self._slowest[size] = kept

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note that a step of `num_tokens` rows took `seconds`.

        One step at most doubles the usual time: after one hang has ended, the next must still be noticed.
        """
        size, slowest = num_tokens.bit_length(), self._slowest
        known = slowest[size]
        if known and seconds > self._config.heartbeat_seconds:
            seconds = min(seconds, max(2 * known, self._config.heartbeat_seconds))
        slowest[size] = max(seconds, _KEPT * known)

    def forgive(self, seconds: float) -> None:
        """Subtract time from the current step: the whole process stood still. Only the watchdog's thread calls it."""
        began = self._began
        if began is not None:
            # The step may have begun after that.
            own = time.monotonic() - began
            self._forgiven = (began, min(self._forgiven_of(began) + seconds, own))

    def look(self, now: float | None = None) -> StepView:
        """Look at the step in progress; `now` is a time of time.monotonic(). O(1)."""
        began = self._began
        if began is None:
            return StepView()
        seconds = (time.monotonic() if now is None else now) - began - self._forgiven_of(began)
        if seconds < self._config.heartbeat_seconds:
            return StepView(seconds, began)
        usual, hung_after = self._usual_seconds(), self._config.hung_step_seconds
        if usual is not None:
            usual += self.copy_seconds
        overdue_after = hung_after if usual is None else usual * self._config.overdue_step_factor
        hung_after = max(hung_after, (usual or 0.0) * self._config.hung_step_factor)
        return StepView(seconds, began, seconds > overdue_after, seconds > hung_after)

    def _forgiven_of(self, began: float) -> float:
        step, seconds = self._forgiven
        return seconds if step == began else 0.0

    def _usual_seconds(self) -> float | None:
        """Return the slowest recent time of a step of the present size; None while no step is known.

        An unknown size is scaled from the next smaller one by the number of rows, else taken from the next larger one.
        """
        size, slowest = self.num_tokens.bit_length(), self._slowest
        if not size:
            return max(slowest) or None
        for smaller in range(size, 0, -1):
            if slowest[smaller]:
                return float(slowest[smaller] * 2 ** (size - smaller))
        return next((seconds for seconds in slowest[size:] if seconds), None)
