"""`penstock build-kernels`: the optional C++ kernels."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.console import say
from penstock.common.environment import cache_folder, system_folder


def run_build_kernels(*, system: bool) -> None:
    """Build into the user's cache or the environment's folder, load, and say what will run. Raises StartupError."""
    from penstock.generation.native import library
    from penstock.generation.native.build import build, find

    folder = Path(system_folder() if system else cache_folder())
    if find(folder) is None:
        say("compiling, about half a minute ...")
    path = build(folder)
    found = library.load(folder)
    say(f"{found} kernels: {path}" if found else f"built, but this CPU has no AVX2: {path}")
