"""Flame graphs of Python processes under a benchmark's load, by py-spy where it is installed."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks._processes import ending_with_us

_SECONDS, _RATE = 8, 100


@contextlib.contextmanager
def flamegraphs(folder: Path, prefix: str, pids: Mapping[str, int]) -> Iterator[int]:
    """Record `folder/PREFIX-NAME.svg` of each process for the seconds that are yielded: load them for as long."""
    with record({folder / f"{prefix}-{name}.svg": pid for name, pid in pids.items()}, _SECONDS):
        yield _SECONDS


@contextlib.contextmanager
def record(pids: Mapping[Path, int], seconds: int, *more: str) -> Iterator[None]:
    """Record each process to its file for as long; returns when the files are written. `more`: flags of py-spy."""
    tool = shutil.which("py-spy")
    if tool is None:
        raise SystemExit("a flame graph needs py-spy on the PATH (pip install py-spy)")
    settings = ["--nonblocking", "--rate", str(_RATE), "--duration", str(seconds), "--format", "flamegraph", *more]
    recorders = []
    for path, pid in pids.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [tool, "record", *settings, "--output", str(path), "--pid", str(pid)]
        recorders.append(
            subprocess.Popen(ending_with_us(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    try:
        yield
    except BaseException:
        for recorder in recorders:
            recorder.terminate()
        raise
    finally:
        for recorder in recorders:
            recorder.wait()
        for path in pids:
            if path.is_file():
                path.write_text(_titled(path.read_text(), path.stem))


def _titled(svg: str, title: str) -> str:
    """Replace py-spy's title, its command line with the folders of the user."""
    return re.sub(r'(y="24.00">)[^<]*', lambda found: found[1] + title, svg, count=1)
