"""Failpoints: faults that a test orders, at the place where real ones come from. Refused without --allow-failpoints.

An order is `NAME` (at every step) or `NAME@WHEN`, where WHEN is one of

    120         the 120th step of the runner, counted from 1
    120+        that step and every later one
    /a/file     every step while the file exists (a hang ends when it is gone)
    token:7     every step that computes a row of a sequence with id 7 in its prompt

Without orders nothing is wrapped, and a step costs what it did.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.core.step import Runner, RunnerOutput, SchedulerOutput

# Interval of a hanging step's check that its file is gone.
_LOOK_SECONDS = 0.01
FAILPOINTS = {
    "engine.step.hang": "the step does not end",
    "engine.step.slow": "the step takes a second longer",
    "engine.step.raise": "the step raises, as a broken device does",
    "engine.step.nan": "the model's output is not a number, for every sequence that draws",
    "engine.step.kill": "the process is killed by SIGKILL",
}


class FailpointError(RuntimeError):
    """Failure ordered by a test."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One order."""

    name: str
    first_step: int = 1
    last_step: int | None = None
    file: str | None = None
    token_id: int | None = None

    @staticmethod
    def parse(text: str) -> Failpoint:
        """Parse an order. Raises ValueError that tells the names or the forms."""
        name, at, when = text.strip().partition("@")
        if name not in FAILPOINTS:
            raise ValueError(f"expected one of {', '.join(FAILPOINTS)}, each alone or with @WHEN")
        if not at:
            return Failpoint(name)
        if when.startswith("/"):
            return Failpoint(name, file=when)
        kind, colon, number = when.partition(":")
        digits = number if colon else kind.removesuffix("+")
        if not digits.isdecimal() or (colon and kind != "token"):
            raise ValueError("expected NAME@120, NAME@120+, NAME@/a/file or NAME@token:7")
        if colon:
            return Failpoint(name, token_id=int(digits))
        return Failpoint(name, int(digits), None if kind.endswith("+") else int(digits))

    def fires(self, step: int, output: SchedulerOutput) -> bool:
        """True when the fault is due in this step (counted from 1)."""
        if step < self.first_step or (self.last_step is not None and step > self.last_step):
            return False
        if self.token_id is not None:
            sequences = (entry.sequence for entry in output.scheduled)
            return any(self.token_id in one.token_ids[: one.num_prompt_tokens] for one in sequences)
        return self.file is None or os.path.exists(self.file)


class FailingRunner:
    """Runner that fails as ordered and otherwise delegates to another one. Used by the engine's thread."""

    def __init__(
        self, runner: Runner, orders: Iterable[Failpoint], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._runner = runner
        self._orders = tuple(orders)
        self._sleep = sleep
        self._steps = 0

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """The faults come first, except outputs that are not numbers."""
        self._steps += 1
        due = {order.name: order for order in self._orders if order.fires(self._steps, output)}
        if "engine.step.kill" in due:
            os.kill(os.getpid(), signal.SIGKILL)
        if "engine.step.raise" in due:
            raise FailpointError("failpoint engine.step.raise")
        if "engine.step.slow" in due:
            self._sleep(1.0)
        hang = due.get("engine.step.hang")
        while hang is not None and hang.fires(self._steps, output):
            self._sleep(_LOOK_SECONDS)
        result = self._runner.execute(output)
        if "engine.step.nan" not in due:
            return result
        return replace(result, sampled={}, failed=frozenset(result.sampled))

    def release(self, seq_ids: Sequence[int]) -> None:
        self._runner.release(seq_ids)
