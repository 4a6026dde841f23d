"""The CPU: oneDNN-packed linear layers, torch's attention, threads bounded by configuration."""

from __future__ import annotations

import os

import torch

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.base import Attention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.base import Device, DeviceMemory
from penstock.generation.devices.memory import host_memory
from penstock.generation.quantization.base import LinearMethod
from penstock.generation.quantization.dense import cpu_linear_method, packing_obstacle

_log = get_logger("penstock.generation")
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


class CPUDevice(Device):
    """All of this process's CPU cores, or `num_threads` of them."""

    name = "cpu"

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return torch.device("cpu")

    def start(self, *, num_threads: int | None = None) -> None:
        """See Device. Raises StartupError naming --threads."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if num_threads is not None and num_threads < 1:
            raise StartupError("--threads must be at least 1", flag="--threads")
        if num_threads is not None and num_threads > cores:
            _log.warning("--threads is more than the cores that this process may use", threads=num_threads, cores=cores)
        torch.set_num_threads(num_threads or cores)

    def compute_dtype(self, requested: str, checkpoint: torch.dtype) -> torch.dtype:
        """See Device. "auto" turns float16 into bfloat16 on a CPU that has no float16 arithmetic: same size, and fast;
        asked for by name, float16 works everywhere, slowly."""
        if requested != "auto":
            if requested not in _DTYPES:
                raise StartupError(f"--dtype must be auto or one of {', '.join(_DTYPES)}", flag="--dtype")
            return _DTYPES[requested]
        if checkpoint is torch.float16 and packing_obstacle(torch.float16) is not None:
            _log.warning("the checkpoint's float16 is loaded as bfloat16: this CPU has no float16 arithmetic")
            return torch.bfloat16
        return checkpoint if checkpoint in _DTYPES.values() else torch.float32

    def memory(self) -> DeviceMemory:
        """See Device."""
        return DeviceMemory(*host_memory())

    def linear_method(self, dtype: torch.dtype) -> LinearMethod:
        """See Device."""
        return cpu_linear_method(dtype)

    def attention(self) -> Attention:
        """See Device."""
        return SDPAAttention()

    def synchronize(self) -> None:
        """See Device: nothing is queued on a CPU."""

    def describe(self) -> str:
        """See Device."""
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads != 1 else ''})"
