"""Finds the library of the wheel penstock-kernels: compiled elsewhere, of these sources, for this release of torch.

`kernels/hatch_build.py` makes it. It is of the packages that run here anyway, so its files need no digests.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import torch

from penstock.common.logging import get_logger
from penstock.generation.devices.native import LIBRARY
from penstock.generation.devices.native.build import is_supported, sources_digest

_log = get_logger("penstock.generation")
PACKAGE = "penstock_kernels"
FACTS = "facts.json"


def link_arguments() -> tuple[str, ...]:
    """Return the linker's arguments for a library that is loaded elsewhere, into a process that has torch.

    torch's libraries are named without a place: those in the process are taken. OpenMP is not named at all, since each
    build of torch brings one under a name of its own, and makes its symbols global.
    """
    return (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10")


def torch_release(version: str) -> str:
    """Return the part of torch's version within which libraries of C++ fit: "2.13" of 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])


def wheel_facts(torch_version: str) -> dict[str, str]:
    """Return what a library fits to, as its wheel records it."""
    release = torch_release(torch_version)
    return {"torch": release, "sources": sources_digest(release)}


@functools.cache
def find_prebuilt() -> Path | None:
    """Return the library of the installed wheel; None without one, or with one that does not fit, with a warning."""
    spec = importlib.util.find_spec(PACKAGE) if is_supported() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        facts = json.loads((folder / FACTS).read_text())
    except (OSError, ValueError) as error:
        _log.warning("the kernels of penstock-kernels are not loaded", cause=str(error))
        return None
    if facts == wheel_facts(torch.__version__):
        return folder / f"{LIBRARY}.so"
    release = torch_release(torch.__version__)
    cause = (
        f"they are for torch {facts.get('torch')}, and this is {release}"
        if facts.get("torch") != release
        else "they are of another version of penstock"
    )
    _log.warning(
        "the kernels of penstock-kernels are not loaded: install its wheel for this version, or run "
        "`penstock build-kernels`",
        cause=cause,
    )
    return None
