"""The C++ kernels for tests that are about them: built once for these sources, into a cache of the tests alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from penstock.common.environment import cache_folder
from penstock.common.errors import StartupError
from penstock.generation.devices.native import build, library
from penstock.generation.host.cpu_features import native_bound

INSTRUCTION_SETS = ("avx512", "avx2")


@functools.cache
def cache_home() -> Path:
    """Value of XDG_CACHE_HOME with which Penstock itself finds the kernels of `use_native`."""
    # Builds are named by a digest of all their inputs; those that are not loaded for long are removed.
    return Path(cache_folder()).with_name("penstock-tests")


@functools.cache
def _obstacle() -> str | None:
    """Reason for which there are no kernels; None when they are loaded."""
    cache = cache_home() / "penstock"
    try:
        build.build(cache)
    except StartupError as error:
        return str(error)
    return None if library.load(cache) else "this CPU has no AVX2; last run recorded in docs/learn/testing.md"


def use_native() -> None:
    """Load the kernels, or skip the test with the reason."""
    if (obstacle := _obstacle()) is not None:
        pytest.skip(obstacle)


def use_instruction_set(name: str) -> Iterator[None]:
    """Use the kernels of one instruction set in a fixture's body, or skip the test."""
    use_native()
    if native_bound() not in (None, name):
        pytest.skip(f"ATEN_CPU_CAPABILITY keeps this run from {name}")
    before = torch.ops.penstock.instruction_set("")
    if torch.ops.penstock.instruction_set(name) != name:
        pytest.skip(f"this CPU has no {name}; last run recorded in docs/learn/testing.md")
    yield
    torch.ops.penstock.instruction_set(before)
