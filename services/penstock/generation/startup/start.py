"""One start of a model: what it was asked for, and who is told of it. Every step gets it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.common.progress import IfCancelled, ShowProgress, never_cancelled
from penstock.generation.config import GenerationServiceConfig


class StartupTimer:
    """Timer of the parts of a start: seconds of each by the clock and of the processor, in order. The first begins now.

    The processor's are of all threads of this process. On a busy machine only they tell how much work a part is.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor_seconds: dict[str, float] = {}
        self._began, self._worked = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        """End the part `name`, which began when the part before it ended."""
        now, worked = time.perf_counter(), time.process_time()
        self.seconds[name] = round(now - self._began, 3)
        self.processor_seconds[name] = round(worked - self._worked, 3)
        self._began, self._worked = now, worked


@dataclass(frozen=True, slots=True)
class Start:
    """A start that is under way, from now on."""

    config: GenerationServiceConfig
    # Name of the model to callers.
    name: str
    # Gets the progress, and may raise to give up.
    show: ShowProgress
    # Gets what ends a wait for other processes.
    if_cancelled: IfCancelled = never_cancelled
    timer: StartupTimer = field(default_factory=StartupTimer)
