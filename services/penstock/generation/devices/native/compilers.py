"""Runs compilers, several at a time; none outlives the call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from penstock.common.environment import current_environment
from penstock.common.errors import StartupError


def run_compilers(
    commands: Sequence[Sequence[str]],
    scratch: Path,
    progress: Callable[[int, int], None] = lambda _done, _commands: None,
) -> None:
    """Run all `commands`, one for each core at a time. Their temporary files go to `scratch`.

    `progress` gets, on this thread, the number of ended ones, from 0, and of all.

    Raises StartupError as soon as one fails. After any exception, KeyboardInterrupt included, no further compiler
    begins, and running ones are gone before the exception goes on.
    """
    running = _Running(scratch)
    with ThreadPoolExecutor(os.cpu_count() or 1, "compiler") as pool:
        try:
            jobs = [pool.submit(running.run, command) for command in commands]
            progress(0, len(jobs))
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                progress(done, len(jobs))
        except BaseException:
            running.kill_all()
            raise


class _Running:
    """The processes of one call, each at the head of a process group: a compiler has children of its own."""

    def __init__(self, scratch: Path) -> None:
        self._variables = {**current_environment(), "TMPDIR": str(scratch)}
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def run(self, command: Sequence[str]) -> None:
        """Run one compiler to its end, unless `kill_all` was called."""
        with self._lock:
            if self._is_over:
                return
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=self._variables,
                process_group=0,
            )
            self._processes.add(process)
        # The pipe closes with the last process of the group.
        _, problems = process.communicate()
        with self._lock:
            self._processes.discard(process)
        if process.returncode and not self._is_over:
            problem = next((line for line in problems.splitlines() if "error" in line), problems[-300:])
            raise StartupError(f"the native kernels could not be compiled: {problem}", flag="--kernels")

    def kill_all(self) -> None:
        """Begin no more, and kill what runs."""
        self._is_over = True
        with self._lock:
            for process in self._processes:
                # A process that has ended, and was waited for just now, has no group any more.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
