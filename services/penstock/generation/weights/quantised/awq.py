"""AWQ: whole numbers of 4 bits, packed along the outputs; groups of inputs share a scale and a zero.

Layout of AutoAWQ's version gemm: qweight (inputs, outputs / 8), qzeros (groups, outputs / 8), scales (groups, outputs).
A word has its outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.layers.linear.base import INT4_ASYMMETRIC
from penstock.generation.layers.linear.native import GROUP
from penstock.generation.weights.quantised.base import (
    UNQUANTISED,
    GroupedMatrix,
    Part,
    QuantFormat,
    StoredFiles,
    lying,
    one_of,
    unpacked,
)

_BITS = 4
_A_WORD = 32 // _BITS
# Place of each output in its word.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq(QuantFormat):
    method = "awq"

    def __init__(self, config: ConfigReader) -> None:
        one_of(config, "bits" if "bits" in config.values else "w_bit", (_BITS,), None)
        version = str(config.values.get("version", config.values.get("format", "gemm"))).lower()
        if version != "gemm":
            name = "version" if "version" in config.values else "format"
            raise config.error(name, f"{version!r} is not supported; supported is 'gemm': {UNQUANTISED}")
        one_of(config, "zero_point", (True,), True)
        field = "group_size" if "group_size" in config.values else "q_group_size"
        self.group = config.integer(field, 128, minimum=-1)
        if self.group == 0:
            raise config.error(field, "must be -1 or at least 1")
        groups = "a group a row" if self.group == -1 else f"groups of {self.group}"
        self.description = f"awq of {_BITS} bits, asymmetric, {groups}"
        if self.group == -1 or self.group % GROUP == 0:
            self.form = INT4_ASYMMETRIC

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        if f"{module}.weight" in files:
            return None
        outputs, inputs = shape
        if outputs % _A_WORD:
            raise lying(module, "qweight", f"cannot hold {outputs} outputs in whole words of {_A_WORD}")
        groups = 1 if self.group == -1 else -(-inputs // self.group)
        return {
            "qweight": Part((inputs, outputs // _A_WORD), ("I32",)),
            "qzeros": Part((groups, outputs // _A_WORD), ("I32",)),
            "scales": Part((groups, outputs)),
        }

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> GroupedMatrix:
        packed = tensors["qweight"]

        def unpack(first: int, last: int) -> Tensor:
            low = first // _A_WORD
            outputs = _in_order(packed[:, low : -(-last // _A_WORD)])
            return outputs[:, first - low * _A_WORD : last - low * _A_WORD].T.contiguous()

        return GroupedMatrix(
            shape=shape,
            unpack=unpack,
            lowest=0,
            levels=2**_BITS,
            scale=tensors["scales"].float().T.contiguous(),
            zero=_in_order(tensors["qzeros"]).T.to(torch.int32).contiguous(),
            group=shape[1] if self.group == -1 else self.group,
        )


def _in_order(words: Tensor) -> Tensor:
    """Return the outputs (any, outputs) of packed words."""
    return unpacked(words, _BITS).view(len(words), -1, _A_WORD)[:, :, _PLACES].flatten(1)
