"""Children that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies in any way; a child calls this first.

    Linux only; elsewhere it does nothing. The parent must have started this process from a thread that lives as long
    as the parent: the kernel watches the thread. Exits at once when the parent is gone already.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        # It died before the kernel began to watch.
        os._exit(1)
