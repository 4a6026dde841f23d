"""Finds the library of the wheel penstock-kernels: compiled elsewhere from these sources, for this release of torch.

`kernels/hatch_build.py` makes it and records its digest: a truncated library, after a full disk or an interrupted copy,
would end the process that loads it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path

import torch

from penstock.common.logging import get_logger
from penstock.generation.devices.native import LIBRARY
from penstock.generation.devices.native.build import is_supported, sources_digest
from penstock.generation.devices.native.trust import digest

_log = get_logger("penstock.generation")
PACKAGE = "penstock_kernels"
FACTS = "facts.json"
# Fact of the library's bytes.
DIGEST = "digest"


def link_arguments() -> tuple[str, ...]:
    """Return the linker's arguments for a library that is loaded elsewhere, into a process that has torch.

    torch's libraries are named without a place: those in the process are taken. OpenMP is not named at all, since each
    build of torch brings one under a name of its own, and makes its symbols global.
    """
    return (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10")


def torch_release(version: str) -> str:
    """Return the part of torch's version that C++ libraries depend on: "2.13" of 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])


def wheel_facts(torch_version: str) -> dict[str, str]:
    """Return the requirements of a library, as its wheel records them."""
    release = torch_release(torch_version)
    return {"torch": release, "sources": sources_digest(release)}


def facts_of(library: Path, torch_version: str) -> dict[str, str]:
    """Return a wheel's record of its library. Raises OSError."""
    return {**wheel_facts(torch_version), DIGEST: digest(library)}


def how_to_get() -> str:
    """Return the way to kernels that fit, for a message where there are none."""
    release = _release_of_wheel()
    if release is None or release == torch_release(torch.__version__):
        return "install penstock-kernels, or run `penstock build-kernels`"
    fits = f"pip install 'torch=={release}.*' brings the torch that the installed penstock-kernels are for"
    return f"{fits}, and `penstock build-kernels` compiles kernels for this one"


@functools.cache
def find_prebuilt() -> Path | None:
    """Return the library of the installed wheel; None without one, or, with a warning, if it does not fit."""
    folder = _folder()
    if folder is None:
        return None
    library = folder / f"{LIBRARY}.so"
    try:
        cause = _obstacle(_read_facts(folder), library)
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("the kernels of penstock-kernels are not loaded", cause=str(error))
        return None
    if cause is None:
        return library
    _log.warning(f"the kernels of penstock-kernels are not loaded: {how_to_get()}", cause=cause)
    return None


def _folder() -> Path | None:
    """Folder of the installed wheel; None without one."""
    spec = importlib.util.find_spec(PACKAGE) if is_supported() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _read_facts(folder: Path) -> object:
    """Read the wheel's record. Raises OSError, ValueError, RecursionError."""
    return json.loads((folder / FACTS).read_text())


def _release_of_wheel() -> str | None:
    """Release of torch that the installed wheel is for, a number; None without one, or where it does not say."""
    folder = _folder()
    try:
        facts = None if folder is None else _read_facts(folder)
    except (OSError, ValueError, RecursionError):
        return None
    release = facts.get("torch") if isinstance(facts, dict) else None
    return release if isinstance(release, str) and re.fullmatch(r"[0-9]+\.[0-9]+", release) else None


def _obstacle(facts: object, library: Path) -> str | None:
    """Return the reason not to load the library; None: it may be loaded. Raises OSError."""
    if not isinstance(facts, dict):
        return f"{FACTS} is not an object"
    release = torch_release(torch.__version__)
    expected = wheel_facts(torch.__version__)
    if facts.get("torch") != release:
        return f"they are for torch {facts.get('torch')}, and this is {release}"
    if {name: facts.get(name) for name in expected} != expected:
        return "they are of another version of penstock"
    if facts.get(DIGEST) != digest(library):
        return f"{library} is not what the wheel has: install it again"
    return None
