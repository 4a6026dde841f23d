"""The devices of this release, by name."""

from __future__ import annotations

import re

from penstock.common.environment import num_npus
from penstock.common.errors import StartupError
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.npu import NPUDevice

_NAME = re.compile(r"(auto|cpu|(cuda|npu)(?::(\d{1,3}))?)")


def open_device(name: str = "auto") -> Device:
    """Return the device called `name`: cpu, npu or npu:NUMBER (among those visible); "auto" is the
    best one here. Raises StartupError naming --device."""
    if (found := _NAME.fullmatch(name)) is None:
        raise StartupError("--device must be auto, cpu, cuda, cuda:NUMBER, npu or npu:NUMBER", flag="--device")
    kind = found[2] or found[1]
    if kind == "cuda":
        raise StartupError(
            f"--device {name}: this release has no CUDA backend; it runs on cpu and npu", flag="--device"
        )
    if kind == "auto":
        kind = "npu" if num_npus() else "cpu"
    return CPUDevice() if kind == "cpu" else NPUDevice(int(found[3] or 0))
