"""Engines of this process that take only as many steps as a test allows: what it does meanwhile is done in time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from factories.generation import PATIENCE_SECONDS
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.runner.model_runner import ModelRunner


class StepGate:
    """Holds an engine's thread at the beginning of a step."""

    def __init__(self, steps: float) -> None:
        self._steps = steps
        self._changed = threading.Condition()

    def allow(self, steps: float) -> None:
        """So many steps more."""
        with self._changed:
            self._steps += steps
            self._changed.notify_all()

    def open(self) -> None:
        """As many as there are."""
        self.allow(math.inf)

    @property
    def is_spent(self) -> bool:
        """Whether the next step waits: what comes now is in none."""
        return self._steps <= 0

    def enter(self) -> None:
        """On the engine's thread. Raises TimeoutError when the test forgets it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._steps > 0, 2 * PATIENCE_SECONDS):
                raise TimeoutError("the step was never allowed")
            self._steps -= 1


@contextmanager
def held_after(steps: int) -> Iterator[StepGate]:
    """From now on engines take `steps` steps and then wait; at the end of the block they go on."""
    gate, execute = StepGate(steps), ModelRunner.execute

    def held(runner: ModelRunner, output: SchedulerOutput) -> RunnerOutput:
        gate.enter()
        return execute(runner, output)

    with mock.patch.object(ModelRunner, "execute", held):
        try:
            yield gate
        finally:
            gate.open()
