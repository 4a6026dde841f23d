"""`penstock build-kernels`: the optional C++ kernels."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.console import say
from penstock.common.environment import cache_folder


def run_build_kernels() -> None:
    """Build into the cache, load, and say what will run. Raises StartupError."""
    from penstock.common.errors import StartupError
    from penstock.generation.native import library
    from penstock.generation.native.build import build, library_path

    cache = Path(cache_folder())
    if not library_path(cache).exists():
        say("compiling, about half a minute ...")
    path = build(cache)
    found = library.load(cache)
    if found is None:
        raise StartupError("the native kernels are built, but this CPU has no AVX2", flag="--kernels")
    say(f"{found} kernels: {path}")
