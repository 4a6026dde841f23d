"""Rotary position embedding, applied."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by its positions' angles (half rotation); new, contiguous."""
    half = x_THD.shape[-1] // 2
    first, second = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
