"""Gate for engines of this process: they take only as many steps as a test allows, so that it can act in time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from factories.servers.generation import PATIENCE_SECONDS
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.runner.model_runner import ModelRunner


class StepGate:
    """Gate that holds an engine's thread at the beginning of a step."""

    def __init__(self, steps: float) -> None:
        self._steps = steps
        self._changed = threading.Condition()

    def allow(self, steps: float) -> None:
        """Allow so many steps more."""
        with self._changed:
            self._steps += steps
            self._changed.notify_all()

    def open(self) -> None:
        """Allow any number of steps."""
        self.allow(math.inf)

    @property
    def is_spent(self) -> bool:
        """True when the next step waits: a request that comes now is in none."""
        return self._steps <= 0

    def enter(self) -> None:
        """Pass the gate, on the engine's thread. Raises TimeoutError when the test forgets it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._steps > 0, 2 * PATIENCE_SECONDS):
                raise TimeoutError("the step was never allowed")
            self._steps -= 1


@contextmanager
def held_after(steps: int) -> Iterator[StepGate]:
    """Hold engines after `steps` steps from now on; at the end of the block they go on."""
    gate, execute = StepGate(steps), ModelRunner.execute

    def held(runner: ModelRunner, output: SchedulerOutput) -> RunnerOutput:
        gate.enter()
        return execute(runner, output)

    with mock.patch.object(ModelRunner, "execute", held):
        try:
            yield gate
        finally:
            gate.open()
