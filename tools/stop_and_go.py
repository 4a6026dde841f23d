"""Runs pytest while its processes are stopped at random moments: what a busy machine does to tests, and worse.

`python tools/stop_and_go.py SEED tests/integration …`: a test that fails here and nowhere else depends on time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

# Seconds between stops, and of one: most are short, some as long as the worst pause that tests must bear.
BETWEEN, SHORT, LONG, SHARE_OF_LONG = (0.05, 1.0), (0.1, 1.0), 2.0, 0.1
# Of one process of the tree; otherwise of all.
SHARE_OF_ONE = 0.7


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Processes that still live and were not stopped by a test."""
    held = []
    try:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGSTOP)
                    held.append(process)
        yield
    finally:
        for process in held:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def main() -> int:
    """Pytest's exit code."""
    rng = random.Random(int(sys.argv[1]))
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1800", *sys.argv[2:]]
    tests = subprocess.Popen(command, start_new_session=True)
    root = psutil.Process(tests.pid)
    try:
        while tests.poll() is None:
            time.sleep(rng.uniform(*BETWEEN))
            with contextlib.suppress(psutil.Error):
                tree = [root, *root.children(recursive=True)]
                with stopped([rng.choice(tree)] if rng.random() < SHARE_OF_ONE else tree):
                    time.sleep(LONG if rng.random() < SHARE_OF_LONG else rng.uniform(*SHORT))
    finally:
        if tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
