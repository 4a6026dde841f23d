"""An Ascend NPU, by torch-npu: fused operators for attention and norms, torch's own for the rest.

No NPU has run this yet: docs/guide/ascend.md says what has been checked, and how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from penstock.common.environment import VISIBLE_NPUS
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.npu import NPUAttention
from penstock.generation.attention.npu_operators import AttentionLimits
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices import KERNELS
from penstock.generation.devices.base import DTYPES, Device, DeviceMemory, named_dtype
from penstock.generation.host.memory import host_memory
from penstock.generation.layers.kernels import LayerKernels, NPUKernels
from penstock.generation.layers.linear.dense import PlainLinearMethod
from penstock.generation.sampling.kernels import SamplingKernels

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention
    from penstock.generation.host.arena import Arena
    from penstock.generation.layers.linear.base import LinearMethod

_log = get_logger("penstock.generation")


class NPUDevice(Device):
    """One NPU, of those that ASCEND_RT_VISIBLE_DEVICES leaves visible."""

    name = "npu"
    limits = AttentionLimits()

    def __init__(self, number: int = 0) -> None:
        """Take the device's number among the visible ones. Nothing is imported until it is used."""
        self.number = number

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return torch.device("npu", self.number)

    def start(self, *, num_threads: int | None = None, kernels: str = "auto", arena: Arena | None = None) -> None:
        """See Device. Raises StartupError naming --device, --threads or --kernels."""
        if arena is not None:
            arena.close()
        if kernels not in KERNELS:
            raise StartupError(f"--kernels must be one of {', '.join(KERNELS)}", flag="--kernels")
        if kernels == "native":
            raise StartupError("--kernels native is for the CPU: leave it out with --device npu", flag="--kernels")
        if num_threads is not None:
            if num_threads < 1:
                raise StartupError("--threads must be at least 1", flag="--threads")
            torch.set_num_threads(num_threads)
        self._claim()

    def _claim(self) -> None:
        """Make the device this thread's current one."""
        self._runtime().set_device(self.number)

    def _runtime(self) -> Any:
        """Return torch.npu. Raises StartupError naming --device where it, or the device, is not there."""
        try:
            import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise StartupError(
                f"--device {self.name} needs torch-npu (the extra [npu]) of torch's own version and CANN's libraries: "
                f"{error}",
                flag="--device",
            ) from error
        runtime: Any = torch.npu  # type: ignore[attr-defined]
        if (count := runtime.device_count()) <= self.number:
            raise StartupError(
                f"--device {self.name}:{self.number}: {count} NPUs are visible, numbered from 0 ({VISIBLE_NPUS} "
                "chooses them)",
                flag="--device",
            )
        return runtime

    def compute_dtype(self, requested: str, checkpoint: torch.dtype) -> torch.dtype:
        """See Device."""
        dtype = named_dtype(requested) if requested != "auto" else checkpoint
        if dtype not in DTYPES.values():
            return torch.bfloat16
        if dtype is torch.float32:
            _log.warning("attention in float32 is slow on an NPU: its operator has float16 and bfloat16 only")
        return dtype

    def memory(self) -> DeviceMemory:
        """See Device."""
        free, total = self._runtime().mem_get_info(self.number)
        return DeviceMemory(total=total, available=free)

    def host_memory(self) -> DeviceMemory:
        """See Device."""
        return DeviceMemory(*host_memory())

    def block_size(self, requested: int | None) -> int:
        """See Device."""
        size = self.limits.block_size
        if requested is not None and size is not None and requested != size:
            raise StartupError(f"--block-size must be {size} on an NPU, found {requested}", flag="--block-size")
        return size or super().block_size(requested)

    def linear_method(self, dtype: torch.dtype, quantization: str = "none") -> LinearMethod:
        """See Device."""
        if quantization != "none":
            raise StartupError(
                f"--quantization {quantization} is not there on an NPU yet: use none", flag="--quantization"
            )
        return PlainLinearMethod()

    def attention(self, dtype: torch.dtype, head_dim: int) -> Attention:
        """See Device."""
        if self.limits.fits(dtype, head_dim):
            return NPUAttention(self.limits)
        _log.warning(
            "attention runs by torch's operators, which gather the context: the NPU's has no such heads",
            dtype=str(dtype).removeprefix("torch."),
            head_dim=head_dim,
        )
        return SDPAAttention()

    def layer_kernels(self, dtype: torch.dtype) -> LayerKernels:
        """See Device."""
        return NPUKernels()

    def sampling_kernels(self) -> SamplingKernels:
        """See Device."""
        return SamplingKernels()

    def synchronize(self) -> None:
        """See Device."""
        self._runtime().synchronize(self.number)

    def describe(self) -> str:
        """See Device."""
        return f"{self.name}:{self.number} ({self._runtime().get_device_name(self.number)})"
