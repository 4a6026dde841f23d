"""Limit on the work of a child process: by the processor, since a busy machine keeps it waiting."""

from __future__ import annotations

import time

from penstock.common.child_io import Child


class WorkTime:
    """Limit on the processor's seconds of one piece of a child's work, which begins now.

    On a busy machine a wait for the processor is not the work's fault. The clock's own limit is `MOST_WAIT` times as
    long. Where the system does not tell processor seconds, the clock's are taken for them.
    """

    MOST_WAIT = 15.0
    # A look at the child costs microseconds, and its clock has steps of ten milliseconds.
    SHORTEST = 0.02

    def __init__(self, child: Child, seconds: float) -> None:
        self._child = child
        self._seconds = seconds
        self._worked = child.processor_seconds
        self._began = time.monotonic()

    def left(self) -> float:
        """Seconds after which to look again; 0: it has taken more than allowed, of the processor or by the clock."""
        waited = time.monotonic() - self._began
        if self.is_starved(waited):
            return 0.0
        now = self._child.processor_seconds
        worked = waited if now is None or self._worked is None else now - self._worked
        return 0.0 if worked >= self._seconds else max(self._seconds - worked, self.SHORTEST)

    def is_starved(self, waited: float | None = None) -> bool:
        """True once the clock's limit is over: the work has not had the processor."""
        waited = time.monotonic() - self._began if waited is None else waited
        return waited >= self._seconds * self.MOST_WAIT
