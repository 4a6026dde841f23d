"""Penstock's command line with its function calls counted, for benchmarks/gateway_requests.py.

Python's and C's calls of the main thread, the event loop's, are added to a 64-bit counter at the start of the file that
the variable PENSTOCK_BENCHMARK_CALLS names. The reader of the file sees it grow.
"""

from __future__ import annotations

import mmap
import os
import sys
from types import FrameType
from typing import Any

VARIABLE = "PENSTOCK_BENCHMARK_CALLS"


def count_calls(path: str) -> None:
    """Count from now on, in this thread."""
    with open(path, "r+b") as file:
        counter = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        # A generator or coroutine that goes on is a call, too: so is its work.
        if event in ("call", "c_call"):
            counter[0] += 1

    sys.setprofile(note)


if __name__ == "__main__":
    count_calls(os.environ[VARIABLE])
    from penstock.cli.main import main

    main()
