"""GPTQ: whole numbers of 2, 3, 4 or 8 bits, packed along the inputs; groups of inputs share a scale and a zero.

Layout of AutoGPTQ and GPTQModel: qweight (inputs * bits / 32, outputs), qzeros (groups, outputs * bits / 32), scales
(groups, outputs), g_idx (inputs). In `checkpoint_format` gptq zeros are stored minus one, in gptq_v2 unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, INT8
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

_CONVERT = f"convert it with GPTQModel, or {UNQUANTISED}"


class Gptq(QuantFormat):
    method = "gptq"

    def __init__(self, config: ConfigReader) -> None:
        self.bits = int(str(one_of(config, "bits", (4, 8, 2, 3), None)))
        self.group = config.integer("group_size", 128, minimum=-1)
        if self.group == 0:
            raise config.error("group_size", "must be -1 or at least 1")
        # Newer releases of GPTQModel say it in another field.
        name = "format" if "checkpoint_format" not in config.values and config.has("format") else "checkpoint_format"
        self._is_v1 = one_of(config, name, ("gptq", "gptq_v2"), "gptq", _CONVERT) == "gptq"
        one_of(config, "pack_dtype", ("int32",), "int32")
        if config.values.get("dynamic"):
            raise config.error("dynamic", f"(bits by module) is not supported: {UNQUANTISED}")
        symmetric, ordered = config.boolean("sym", True), config.boolean("desc_act", False)
        words = [
            f"gptq of {self.bits} bits",
            "symmetric" if symmetric else "asymmetric",
            "a group a row" if self.group == -1 else f"groups of {self.group}",
            *(["ordered by activation"] if ordered else []),
        ]
        self.description = ", ".join(words)
        if self.bits < 4:
            self.form = INT4
        elif self.bits == 4 and not ordered:
            self.form = INT4 if symmetric else INT4_ASYMMETRIC
        elif symmetric and self.bits == 8 and self.group == -1:
            self.form = INT8

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        if f"{module}.weight" in files:
            return None
        outputs, inputs = shape
        if inputs * self.bits % 32 or outputs * self.bits % 32:
            raise lying(
                module, "qweight", f"cannot hold {outputs} outputs of {inputs} inputs in whole words of 32 bits"
            )
        groups = 1 if self.group == -1 else -(-inputs // self.group)
        return {
            "qweight": Part((inputs * self.bits // 32, outputs), ("I32",)),
            "qzeros": Part((groups, outputs * self.bits // 32), ("I32",)),
            "scales": Part((groups, outputs)),
            "g_idx": Part((inputs,), ("I32", "I64"), is_required=False),
        }

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> GroupedMatrix:
        inputs = shape[1]
        group = inputs if self.group == -1 else self.group
        groups, levels = tensors["scales"].shape[0], 2**self.bits
        order = tensors.get("g_idx")
        if order is not None:
            if int(order.min()) < 0 or int(order.max()) >= groups:
                raise lying(module, "g_idx", f"names a group outside of the {groups} that scales has")
            order = None if torch.equal(order.long(), torch.arange(inputs) // group) else order.long()
        packed, bits = tensors["qweight"], self.bits

        def unpack(first: int, last: int) -> Tensor:
            return unpacked(packed[:, first:last].T, bits)

        return GroupedMatrix(
            shape=shape,
            unpack=unpack,
            lowest=0,
            levels=levels,
            scale=tensors["scales"].float().T.contiguous(),
            zero=self._zeros(tensors["qzeros"]).T.contiguous(),
            group=group,
            group_of_input=order,
        )

    def _zeros(self, packed: Tensor) -> Tensor:
        """Return the zeros (groups, outputs) as int32. Those of v1 wrap around, as in the libraries that subtract one
        from a whole word."""
        if not self._is_v1:
            return unpacked(packed, self.bits).to(torch.int32)
        if 32 % self.bits:
            return torch.remainder(unpacked(packed, self.bits).to(torch.int32) + 1, 2**self.bits)
        ones = sum(1 << shift for shift in range(0, 32, self.bits))
        words = (packed.long() + ones) & 0xFFFFFFFF
        return unpacked(torch.where(words < 2**31, words, words - 2**32).to(torch.int32), self.bits).to(torch.int32)
