"""The devices of this release, by name."""

from __future__ import annotations

from collections.abc import Callable

from penstock.common.errors import StartupError
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice

_DEVICES: dict[str, Callable[[], Device]] = {"cpu": CPUDevice}


def open_device(name: str = "auto") -> Device:
    """Return the device called `name`; "auto" is the best one here. Raises StartupError naming --device."""
    if name == "auto":
        return CPUDevice()
    if name not in _DEVICES:
        raise StartupError(f"--device must be auto or one of {', '.join(_DEVICES)}", flag="--device")
    return _DEVICES[name]()
