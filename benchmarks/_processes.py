"""Processes that end with the benchmark that started them, in whatever way it ends. Standard library only, which every
engine's Python has.

    python benchmarks/_processes.py PARENT_PID PROGRAM FLAGS...

runs a program that does not know how to end with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


def stop_on_sigterm() -> None:
    """SIGTERM ends this process as ctrl-C does, by an exception: SystemExit(143). Call it first thing in main()."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, _frame: FrameType | None) -> None:
    # `timeout` sends it to its command and then to the group: the second must not cut off what the first began.
    signal.signal(number, lambda *_: None)
    sys.exit(128 + number)


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `number` when its parent's main thread ends; Linux only. Call it in the child.

    Exits at once when the parent is gone already. Raises OSError.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


def ending_with_us(*command: str) -> list[str]:
    """The command line of `command` as a child of this process that ends with it."""
    return [sys.executable, __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
