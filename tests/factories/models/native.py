"""The C++ kernels for tests that are about them: built once for these sources, into a cache of the tests alone."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from penstock.common.environment import current_environment
from penstock.common.errors import StartupError
from penstock.generation.devices.native import build, library
from penstock.generation.host.cpu_features import native_bound, native_sets

INSTRUCTION_SETS = native_sets()
# Those with which a product is made in a way of its own: "amx" is the wider set of x86 with tile registers.
PRODUCT_SETS = (*(("amx",) if "avx512" in INSTRUCTION_SETS else ()), *INSTRUCTION_SETS)


@functools.cache
def cache_home() -> Path:
    """XDG_CACHE_HOME of a Penstock that is to find the kernels of `use_native`: tests/conftest.py's, a cache of the
    tests alone, or one that holds the library of another build, as tools/sanitize_kernels.py and tools/arm64_kernels.py
    lay it."""
    # Builds are told apart by a digest of all that they are made of; those that nobody loads for long are removed.
    return Path(current_environment()["PENSTOCK_TEST_KERNELS_HOME"])


@functools.cache
def _obstacle() -> str | None:
    """Reason for which there are no kernels; None when they are loaded."""
    cache = cache_home() / "penstock"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        # Workers of one run wait for the first to compile.
        with (cache / "building.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build.build(cache)
    except StartupError as error:
        return str(error)
    if library.load(cache):
        return None
    return "this CPU has none of the instruction sets; last run recorded in docs/learn/testing.md"


def use_native() -> None:
    """Load the kernels, or skip the test with the reason."""
    if (obstacle := _obstacle()) is not None:
        pytest.skip(obstacle)


def use_instruction_set(name: str) -> Iterator[None]:
    """Use the kernels of one instruction set in a fixture's body, or skip the test."""
    use_native()
    if native_bound() not in (None, name):
        pytest.skip(f"ATEN_CPU_CAPABILITY keeps this run from {name}")
    before, threads = torch.ops.penstock.instruction_set(""), torch.get_num_threads()
    if torch.ops.penstock.instruction_set(name) != name:
        pytest.skip(f"this CPU has no {name}; last run recorded in docs/learn/testing.md")
    # Their work is shared, whatever this run's processes have.
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch.ops.penstock.instruction_set(before)
