"""Generation service whose steps sleep in place of a model: its engine, scheduler and RPCs are the real ones.

    python benchmarks/_paced_generation.py serve generation [FLAGS]

PACED_STEP="FIXED PER_ROW": seconds of a step, and of each of its rows. The speed does not depend on what else the
machine does. PACED_SLOW="FACTOR FILE": while the file exists, steps take so many times as long.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from penstock.cli.main import main
from penstock.generation.core.step import RunnerOutput, SampledToken, SchedulerOutput
from penstock.generation.running import RunningEngine

_TOKEN = 300


class PacedRunner:
    """Runner that draws the same token for every sequence."""

    def __init__(self, runner: Any, fixed: float, per_row: float, factor: float, file: str) -> None:
        self._runner = runner
        self._fixed = fixed
        self._per_row = per_row
        self._factor = factor
        self._file = file

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Sleep for the time of the rows."""
        factor = self._factor if self._file and os.path.exists(self._file) else 1.0
        time.sleep((self._fixed + self._per_row * output.num_tokens) * factor)
        token = SampledToken(_TOKEN)
        return RunnerOutput({drawer.seq_id: token for entry in output.scheduled for drawer in entry.sample}, {})

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's."""
        return getattr(self._runner, name)


def _pace() -> None:
    fixed, per_row = map(float, os.environ["PACED_STEP"].split())
    factor, _, file = os.environ.get("PACED_SLOW", "1").partition(" ")
    runner_of: Any = RunningEngine._runner

    def paced(self: RunningEngine, loaded: Any) -> Any:
        return PacedRunner(runner_of(self, loaded), fixed, per_row, float(factor), file)

    RunningEngine._runner = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    _pace()
    sys.exit(main())
