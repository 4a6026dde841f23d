"""fp8 by blocks, as DeepSeek and Qwen publish it, and by rows, as FBGEMM does. Activations stay unquantised.

weight is float8 (outputs, inputs). Blocks: weight_scale_inv has a factor for each (of 128 times 128), or one for all.
Rows: weight_scale has a factor for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.weights.quantised.base import (
    FLOATS,
    UNQUANTISED,
    Part,
    QuantFormat,
    ScaledMatrix,
    StoredFiles,
    one_of,
)

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
# U8: the exponents of E8M0 under another name.
_SCALES = (*FLOATS, "F8_E8M0", "U8")


class Fp8(QuantFormat):
    method = "fp8"

    def __init__(self, config: ConfigReader) -> None:
        one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
        one_of(config, "fmt", ("e4m3", "float8_e4m3fn", "e5m2"), "e4m3")
        one_of(config, "weight_per_tensor", (False, True), False)
        size = config.values.get("weight_block_size")
        is_block = isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size)
        if size is not None and not is_block:
            raise config.error("weight_block_size", f"must be two whole numbers or null, found {size!r}: {UNQUANTISED}")
        self.block = (size[0], size[1]) if isinstance(size, list) else None
        self.description = f"fp8, {'one scale' if self.block is None else 'blocks of {} x {}'.format(*self.block)}"

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        scale = f"{module}.weight_scale_inv"
        if _is_plain(module, "weight_scale_inv", files):
            return None
        scales: tuple[int, ...] = (1,)
        if self.block is not None:
            scales = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        elif scale in files and files.shape(scale) in ((), (1, 1)):
            scales = files.shape(scale)
        parts = {"weight": Part(shape, _FLOAT8), "weight_scale_inv": Part(scales, _SCALES)}
        for name in ("activation_scale", "input_scale"):
            if f"{module}.{name}" in files:
                # Calibrated for quantised activations.
                parts[name] = Part(files.shape(f"{module}.{name}"), FLOATS, is_required=False)
        return parts

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> ScaledMatrix:
        scale = tensors["weight_scale_inv"]
        scale = torch.exp2(scale.float() - 127.0) if scale.dtype is torch.uint8 else scale.float()
        blocks = (1, 1) if self.block is None else tuple(scale.shape)
        return ScaledMatrix(tensors["weight"], scale.reshape(blocks), self.block or shape)


class FbgemmFp8(QuantFormat):
    """Scales by rows."""

    method = "fbgemm_fp8"

    def __init__(self, config: ConfigReader) -> None:
        """`activation_scale_ub` bounds quantised activations; here activations are not quantised."""
        self.description = "fbgemm fp8, a scale a row"

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        if _is_plain(module, "weight_scale", files):
            return None
        parts = {"weight": Part(shape, _FLOAT8), "weight_scale": Part((shape[0], 1))}
        if f"{module}.input_scale_ub" in files:
            parts["input_scale_ub"] = Part(files.shape(f"{module}.input_scale_ub"), is_required=False)
        return parts

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> ScaledMatrix:
        return ScaledMatrix(tensors["weight"], tensors["weight_scale"].float(), (1, shape[1]))


def _is_plain(module: str, scale: str, files: StoredFiles) -> bool:
    """True when the weight is stored unquantised."""
    weight = f"{module}.weight"
    return weight in files and files.stored_as(weight) in FLOATS and f"{module}.{scale}" not in files
