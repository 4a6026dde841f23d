"""Time that a request was expected to take when it came: kept with it, to be held against what it takes."""

from __future__ import annotations

from dataclasses import dataclass

# Share of its forecast that a request takes surely: with less left it cannot end before its deadline.
_SUREST = 0.8


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """Forecast of one request, by the engine's figures of its arrival."""

    # Seconds until its first step; 0: it did not have to wait. And the same without the correction of waits.
    wait_seconds: float = 0.0
    raw_wait_seconds: float = 0.0
    # Seconds of a step, and its number of steps: those of its prompt, and of an answer of the expected length.
    step_seconds: float = 0.0
    prompt_steps: int = 0
    output_steps: float = 0.0

    def seconds(self, output_steps: float) -> float:
        """Seconds from arrival to end of a request that took so many steps after its prompt."""
        return self.wait_seconds + (self.prompt_steps + output_steps) * self.step_seconds

    def serving_seconds(self, step_seconds: float) -> float:
        """Seconds from its first step to its end, where a step takes so long."""
        return (self.prompt_steps + self.output_steps) * step_seconds

    def latest_start(self, deadline: float, step_seconds: float) -> float:
        """Time after which it surely cannot end before `deadline`, where a step takes so long."""
        return deadline - _SUREST * self.serving_seconds(step_seconds)
