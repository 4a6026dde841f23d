"""Flame graphs of the processes of benchmarks/wire.py, by py-spy where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

_SECONDS, _RATE = 8, 100


@contextlib.contextmanager
def flamegraphs(folder: Path, prefix: str, pids: Mapping[str, int]) -> Iterator[int]:
    """Record `folder/PREFIX-NAME.svg` of each process for the seconds that are yielded: load them for as long."""
    tool = shutil.which("py-spy")
    if tool is None:
        raise SystemExit("--flamegraphs needs py-spy on the PATH (pip install py-spy)")
    folder.mkdir(parents=True, exist_ok=True)
    settings = ["--nonblocking", "--rate", str(_RATE), "--duration", str(_SECONDS), "--format", "flamegraph"]
    recorders = [
        subprocess.Popen(
            [tool, "record", *settings, "--output", str(folder / f"{prefix}-{name}.svg"), "--pid", str(pid)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, pid in pids.items()
    ]
    try:
        yield _SECONDS
    finally:
        for recorder in recorders:
            recorder.wait()
