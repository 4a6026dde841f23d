"""The built kernels as operators of torch's dispatcher: call none before `load`."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.common.logging import get_logger
from penstock.generation.devices.native.build import find
from penstock.generation.devices.native.build_cache import mark_used
from penstock.generation.devices.native.prebuilt import find_prebuilt
from penstock.generation.devices.torch_dtypes import NATIVE_DTYPES
from penstock.generation.host.cpu_features import native_bound

_log = get_logger("penstock.generation")
DTYPES = tuple(NATIVE_DTYPES.values())


def find_first(*folders: Path) -> Path | None:
    """Return the library that `load` takes; None when nothing was built.

    A build of `folders` is for exactly this torch, so it wins over the wheel's.
    """
    return next((found for folder in folders if (found := find(folder)) is not None), None) or find_prebuilt()


def load(*folders: Path) -> str | None:
    """Load the library of the first of `folders` that has one, or of the wheel; return the instruction set it uses.

    native_bound() may narrow that set. None when nothing was built, or it cannot run here.

    A process has one library: once one is loaded, that of another folder (made of the same sources) need not be.
    """
    path = find_first(*folders)
    if path is None:
        return None
    try:
        if not is_loaded():
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            mark_used(path)
    except OSError as error:
        _log.warning("the native kernels cannot be loaded", cause=str(error).splitlines()[0])
        return None
    return torch.ops.penstock.instruction_set(native_bound() or "") or None


def is_loaded() -> bool:
    """True when `load` has found a library in this process."""
    return hasattr(torch.ops.penstock, "instruction_set")
