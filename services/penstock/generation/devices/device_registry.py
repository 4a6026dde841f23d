"""The devices of this release, by name."""

from __future__ import annotations

import torch

from penstock.common.environment import num_npus
from penstock.common.errors import StartupError
from penstock.generation.devices import DEVICE_NAME, DEVICE_WORDS
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.devices.npu import NPUDevice


def open_device(name: str = "auto") -> Device:
    """Return the device called `name`: cpu, cuda, npu, or one of several by its number among those visible, as in
    cuda:1; "auto" is the best one here. Raises StartupError naming --device."""
    if (found := DEVICE_NAME.fullmatch(name)) is None:
        raise StartupError(f"--device must be {DEVICE_WORDS}", flag="--device")
    kind, number = found[2] or found[1], int(found[3] or 0)
    if kind == "auto":
        kind = "npu" if num_npus() else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return CPUDevice()
    return CUDADevice(number) if kind == "cuda" else NPUDevice(number)
