"""Command `penstock build-kernels`: the optional C++ kernels."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from penstock.cli.console import say
from penstock.common.environment import cache_folder, system_folder
from penstock.common.units import format_size


def run_build_kernels(*, system: bool) -> None:
    """Build into the user's cache or the environment's folder, load, and print the kernels. Raises StartupError."""
    from penstock.generation.devices.native import library
    from penstock.generation.devices.native.build import build, find
    from penstock.generation.devices.native.build_cache import UNUSED_DAYS, remove_unused

    folder = Path(system_folder() if system else cache_folder())
    signal.signal(signal.SIGTERM, _stop)
    if find(folder) is None:
        say("compiling, about a minute ...")
    path = build(folder)
    found = library.load(folder)
    say(f"{found} kernels: {path}" if found else f"built, but this CPU has no AVX2: {path}")
    freed = remove_unused(folder, path)
    if freed:
        say(f"removed builds that were not used for {UNUSED_DAYS} days: {format_size(freed)}")


def _stop(number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does: compilers are stopped, and their files removed."""
    sys.exit(128 + number)
