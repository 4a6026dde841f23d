"""Signals to child processes of an event loop."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol


class LoopChild(Protocol):
    """Child process that an event loop waits for, as asyncio.subprocess.Process is."""

    @property
    def pid(self) -> int:
        """Number of the process."""

    @property
    def returncode(self) -> int | None:
        """Exit code; None until the loop knows it."""


def signal_child(child: LoopChild, number: int) -> None:
    """Send a signal to a child; one that has ended gets none.

    asyncio's own `send_signal` first looks whether the child has ended, before Python 3.13. It then takes the exit
    status of one that has just ended away from the loop, for which the child ends with 255.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
