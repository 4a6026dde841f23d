"""Memory of pools: zeros on pages that the operating system commits on their first write."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from penstock.generation.host.small_pages import SmallPages

# A cache line, as torch's own tensors are.
_ALIGNMENT = 64


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros on fresh pages; these are zero until they are written. torch.zeros would write gigabytes at every
    start. `device` None: in the host's memory."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -buffer.ctypes.data % _ALIGNMENT
    return torch.from_numpy(buffer[first : first + num_bytes]).view(dtype).view(shape)


def small_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, SmallPages]:
    """Return zeros in the host's memory, and the small pages that they are on. Raises MemoryError."""
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = SmallPages(num_bytes)
    return torch.from_numpy(np.frombuffer(pages.memory, np.uint8)).view(dtype).view(shape), pages
