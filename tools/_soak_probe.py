"""`penstock` that writes what it holds to a file when it is sent SIGUSR1: `_soak_probe.py OUT serve router …`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

_COUNTED = ("Call", "Connection", "StreamCall", "CallsConnection", "RequestState", "Attempt")


def snapshot() -> dict[str, Any]:
    """Of this process, after a full collection."""
    # What was frozen after the start would be counted only once it was replaced.
    gc.unfreeze()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = int(Path("/proc/self/statm").read_text().split()[1])
    objects = gc.get_objects()
    kinds = Counter(type(one).__name__ for one in objects if str(type(one).__module__).startswith("penstock."))
    found = {
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "trimmed_mb": trimmed * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "objects": len(objects),
        **{kind: kinds[kind] for kind in _COUNTED if kinds[kind]},
    }
    del objects
    gc.freeze()
    return found


def main() -> None:
    """Command line."""
    out = Path(sys.argv.pop(1))
    from penstock.cli.main import main as run
    from penstock.common.environment import prepare_environment

    prepare_environment()

    def write(*_: object) -> None:
        part = out.with_suffix(".part")
        part.write_text(json.dumps(snapshot()))
        part.replace(out)

    signal.signal(signal.SIGUSR1, write)
    run()


if __name__ == "__main__":
    main()
