"""Which number format a model's linear layers get on CPU."""

from __future__ import annotations

import torch

from penstock.common.errors import StartupError
from penstock.generation.host.arena import Arena
from penstock.generation.layers.linear import QUANTIZATIONS
from penstock.generation.layers.linear.base import LinearMethod
from penstock.generation.layers.linear.dense import cpu_linear_method
from penstock.generation.layers.linear.int4 import Int4LinearMethod
from penstock.generation.layers.linear.int8 import Int8LinearMethod
from penstock.generation.layers.linear.native import NativeLinearMethod, formats


def cpu_method(dtype: torch.dtype, quantization: str, *, native: bool, arena: Arena | None = None) -> LinearMethod:
    """`native`: the C++ kernels are loaded and work in `dtype`; these put weights into `arena` while it lasts.

    Raises StartupError naming --quantization.
    """
    if quantization not in QUANTIZATIONS:
        raise StartupError(f"--quantization must be auto or one of {', '.join(QUANTIZATIONS)}", flag="--quantization")
    if quantization != "none" and dtype not in (torch.bfloat16, torch.float32):
        raise StartupError(f"--quantization {quantization} needs --dtype bfloat16 or float32", flag="--quantization")
    if native:
        layers, head = formats(dtype, quantization)
        return NativeLinearMethod(layers, head=head, arena=arena)
    if quantization == "none":
        return cpu_linear_method(dtype)
    return Int8LinearMethod() if quantization == "int8" else Int4LinearMethod()
