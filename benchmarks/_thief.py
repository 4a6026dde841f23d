"""A program that takes part of the processor: processes that compute without a pause, on and off.

    python -m benchmarks._thief PROCESSES BUSY_SECONDS PERIOD_SECONDS [FILE]

Each period begins with its busy part, and FILE is there during it. At the end (SIGTERM) it prints the processor seconds
that it took.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks._processes import end_with_parent


def steal(busy_seconds: float, period_seconds: float, began: float) -> None:
    """Compute in the busy part of each period, for ever."""
    while True:
        into = (time.monotonic() - began) % period_seconds
        if into < busy_seconds:
            sum(range(10_000))
        else:
            time.sleep(period_seconds - into)


def mark(file: Path, busy_seconds: float, period_seconds: float) -> None:
    """Have the file there in the busy part of each period, until SIGTERM."""
    while True:
        file.touch()
        ended = signal.sigtimedwait([signal.SIGTERM], busy_seconds)
        file.unlink(missing_ok=True)
        if ended is not None or signal.sigtimedwait([signal.SIGTERM], period_seconds - busy_seconds) is not None:
            return


def main() -> None:
    """Command line."""
    processes, busy, period, began = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), time.monotonic()
    end_with_parent(os.getppid())
    # It is taken by sigwait alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    children = []
    for _ in range(processes):
        parent = os.getpid()
        child = os.fork()
        if not child:
            end_with_parent(parent)
            steal(busy, period, began)
        children.append(child)
    if len(sys.argv) > 4:
        mark(Path(sys.argv[4]), busy, period)
    else:
        signal.sigwait([signal.SIGTERM])
    taken = 0.0
    for child in children:
        os.kill(child, signal.SIGKILL)
        usage = os.wait4(child, 0)[2]
        taken += usage.ru_utime + usage.ru_stime
    print(f"{taken:.3f}", flush=True)


if __name__ == "__main__":
    main()
