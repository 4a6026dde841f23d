"""A benchmark's process that runs a turn at a time, and is held between turns."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._processes import ending_with_us

STOP_SECONDS = 10.0
# Lines of its output that a failure shows.
TAIL = 12


class TurnFailed(Exception):
    """The process ended badly; the message is its command, its exit status and the end of its output."""


class HeldProcess:
    """Starts with its first turn. A turn ends with a line that `turn_ends` matches; then its whole process group stops.

    Held, it takes no processor time, so the other tree's process has the machine. A group of its own also keeps a
    terminal's ctrl-C from it, and when this process is killed the kernel wakes and ends what is left of the group.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, turn_ends: re.Pattern[str]
    ) -> None:
        self._command = [*command]
        self._environment = dict(environment)
        self._folder = folder
        self._turn_ends = turn_ends
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL)

    def turn(self) -> None:
        """Run until the next turn has ended, or to the end of the output. Raises TurnFailed."""
        process = self._running()
        assert process.stdout is not None
        for line in process.stdout:
            self._tail.append(line.rstrip())
            if self._turn_ends.search(line):
                self._send(signal.SIGSTOP)
                return
        self._ended(process)

    def finish(self) -> None:
        """Run to the end. Raises TurnFailed."""
        process = self._running()
        assert process.stdout is not None
        self._tail.extend(line.rstrip() for line in process.stdout)
        self._ended(process)

    def stop(self) -> None:
        """End it and all that it started, held or not: what is left after a while by force."""
        process = self._process
        if process is None:
            return
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        self._send(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None:
            self._send(signal.SIGCONT)
            return self._process
        self._process = subprocess.Popen(
            ending_with_us(*self._command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self._folder,
            env=self._environment,
            process_group=0,
        )
        return self._process

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended(self, process: subprocess.Popen[str]) -> None:
        if process.wait():
            said = "\n".join(f"    {line}" for line in self._tail)
            raise TurnFailed(f"{' '.join(self._command)} ended with {process.returncode}:\n{said}")
