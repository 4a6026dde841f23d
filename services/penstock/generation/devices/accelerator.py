"""Common base of devices other than the CPU: memory of their own, a number among several, a runtime in torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.devices import KERNELS
from penstock.generation.devices.base import Device, DeviceMemory
from penstock.generation.host.memory import host_memory
from penstock.generation.layers.linear.dense import PlainLinearMethod
from penstock.generation.sampling.sampling_kernels import QueuedSampling

if TYPE_CHECKING:
    from penstock.generation.host.arena import Arena
    from penstock.generation.layers.linear.base import LinearMethod
    from penstock.generation.sampling.sampling_kernels import SamplingKernels


class Accelerator(Device):
    """One of the accelerators of a kind visible to this process."""

    ranks_share_memory = False

    def __init__(self, number: int = 0) -> None:
        """Take the device's number among the visible ones. Nothing is imported until it is used."""
        self.number = number

    @property
    @override
    def torch_device(self) -> torch.device:
        return torch.device(self.name, self.number)

    @override
    def start(
        self,
        *,
        num_threads: int | None = None,
        kernels: str = "auto",
        arena: Arena | None = None,
        compact_weights: str = "auto",
    ) -> None:
        """Raises StartupError naming --device, --threads, --kernels or --compact-weights."""
        if arena is not None:
            arena.close()
        if kernels not in KERNELS:
            raise StartupError(f"--kernels must be one of {', '.join(KERNELS)}", flag="--kernels")
        if kernels == "native":
            raise StartupError(
                f"--kernels native is for the CPU: leave it out with --device {self.name}", flag="--kernels"
            )
        if compact_weights == "on":
            raise StartupError(
                f"--compact-weights on is for the CPU: leave it out with --device {self.name}", flag="--compact-weights"
            )
        if num_threads is not None:
            if num_threads < 1:
                raise StartupError("--threads must be at least 1", flag="--threads")
            torch.set_num_threads(num_threads)
        self._claim()

    def _claim(self) -> None:
        """Make the device this thread's current one."""
        self._runtime().set_device(self.number)

    @abstractmethod
    def _runtime(self) -> Any:
        """Return torch's module of this kind. Raises StartupError naming --device if it, or the device, is missing."""

    def _check_number(self, count: int, kind: str, variable: str) -> None:
        """Raise StartupError unless the device is one of `count`; `variable` of the environment chooses them."""
        if count <= self.number:
            raise StartupError(
                f"--device {self.name}:{self.number}: {count} {kind} are visible, numbered from 0 ({variable} "
                "chooses them)",
                flag="--device",
            )

    @override
    def memory(self) -> DeviceMemory:
        free, total = self._runtime().mem_get_info(self.number)
        return DeviceMemory(total=total, available=free)

    @override
    def host_memory(self) -> DeviceMemory:
        return DeviceMemory(*host_memory())

    @override
    def linear_method(self, dtype: torch.dtype, quantization: str = "none") -> LinearMethod:
        if quantization != "none":
            raise StartupError(
                f"--quantization {quantization} is not there with --device {self.name}: use none",
                flag="--quantization",
            )
        return PlainLinearMethod()

    @override
    def sampling_kernels(self) -> SamplingKernels:
        return QueuedSampling()

    @override
    def synchronize(self) -> None:
        self._runtime().synchronize(self.number)

    @override
    def describe(self) -> str:
        return f"{self.name}:{self.number} ({self._runtime().get_device_name(self.number)})"
