"""MXFP4, as gpt-oss is published: the experts of a layer, 32 inputs of 4 bits with a power of two as their scale.

X_blocks is uint8 (experts, outputs, inputs / 32, 16): of a byte the lower half comes first. X_scales is uint8 (experts,
outputs, inputs / 32): exponents, 127 for 1. All else is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ConfigReader
from penstock.generation.weights.quantised.base import Part, QuantFormat, StoredFiles, StoredMatrix

_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


class Mxfp4(QuantFormat):
    method = "mxfp4"
    description = "mxfp4"
    form = "mxfp4"

    def __init__(self, config: ConfigReader) -> None:
        """Nothing in its configuration matters."""

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        return None

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        raise TypeError("only experts have this format")

    @override
    def stacked_parts(self, tensor: str, shape: tuple[int, int, int], files: StoredFiles) -> dict[str, Part] | None:
        if tensor in files and f"{tensor}{_BLOCKS}" not in files:
            return None
        experts, inputs, outputs = shape
        if inputs % _GROUP:
            raise StartupError(f"tensor {tensor}{_BLOCKS} has no whole blocks of {inputs} inputs", flag="MODEL")
        groups = inputs // _GROUP
        return {
            _BLOCKS: Part((experts, outputs, groups, _GROUP // 2), ("U8",)),
            _SCALES: Part((experts, outputs, groups), ("U8",)),
        }

    @override
    def stacked_blocks(self, parts: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        return "MXFP4", gguf_rows(parts[_BLOCKS], parts[_SCALES])


def gguf_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return rows (outputs, bytes) of GGUF's MXFP4, in which the lower halves of 16 bytes come before the higher
    ones."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    octets = codes[..., : _GROUP // 2] | codes[..., _GROUP // 2 :] << 4
    return torch.cat([scales.unsqueeze(-1), octets], dim=-1).flatten(1)
