"""torchao as transformers writes it to safetensors: `_weight_qdata`, `_weight_scale` and `_weight_zero_point` of a
module, and in the file's header the class of each weight, with its facts as JSON.

Int8Tensor and IntxUnpackedToInt8Tensor keep whole numbers, a byte each, with a scale and a zero of each block;
Float8Tensor keeps float8 with a scale of each row, or one. Activations stay unquantised, unless a product of ours
quantises them. Classes in the order of a GPU's product are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ConfigReader
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, INT8
from penstock.generation.weights.quantised.base import (
    UNQUANTISED,
    GroupedMatrix,
    Part,
    QuantFormat,
    ScaledMatrix,
    StoredFiles,
    StoredMatrix,
    check_bits,
    lying,
)

_WHOLE = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_FLOAT = "Float8Tensor"
_BITS = re.compile(r"int([1-8])")


class TorchAo(QuantFormat):
    method = "torchao"

    def __init__(self, config: ConfigReader) -> None:
        quant_type = config.values.get("quant_type")
        named = quant_type.get("default") if isinstance(quant_type, dict) else quant_type
        name = str(named.get("_type", "") if isinstance(named, dict) else named)
        self.description = f"torchao {name.removesuffix('Config') or 'of an unknown kind'}"
        text = json.dumps(named)
        if "Int8" in name and "Intx" not in name:
            self.form = INT8
        elif '"int4"' in text:
            self.form = INT4 if '"SYMMETRIC"' in text else INT4_ASYMMETRIC
        # Facts of each module's weight, found by `parts`.
        self._facts: dict[str, dict[str, Any]] = {}

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        if f"{module}.weight" in files:
            return None
        facts = self._facts[module] = _facts(module, files)
        kind, block = facts.get("_type"), facts["_data"].get("block_size")
        if kind not in (*_WHOLE, _FLOAT):
            raise StartupError(
                f"tensor {module}.weight is a torchao {kind}, which is not supported; supported are "
                f"{', '.join((*_WHOLE, _FLOAT))}: {UNQUANTISED}",
                flag="MODEL",
            )
        if f"{module}._weight_act_pre_scale" in files:
            raise lying(module, "_weight_act_pre_scale", f"(scaled activations) is not supported: {UNQUANTISED}")
        is_block = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
        if not is_block or any(size % one for size, one in zip(shape, block, strict=True)):
            raise lying(module, "weight", f"has block_size {block} in the header: no blocks of {list(shape)}")
        scales = shape[0] // block[0], shape[1] // block[1]
        if kind == _FLOAT:
            return {"_weight_qdata": Part(shape, ("F8_E4M3", "F8_E5M2")), "_weight_scale": Part(scales)}
        if kind == "IntxUnpackedToInt8Tensor" and _bits(facts) is None:
            raise lying(module, "weight", "has no target_dtype of int1 to int8 in the header")
        return {
            "_weight_qdata": Part(shape, ("I8",)),
            "_weight_scale": Part(scales),
            "_weight_zero_point": Part(scales, ("I8", "I32", "I64"), is_required=False),
        }

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        facts = self._facts[module]
        block = facts["_data"]["block_size"]
        numbers, scale = tensors["_weight_qdata"], tensors["_weight_scale"].float()
        if facts["_type"] == _FLOAT:
            return ScaledMatrix(numbers, scale, (block[0], block[1]))
        bits = _bits(facts) or 8
        check_bits(module, "_weight_qdata", numbers, bits)
        zero = tensors.get("_weight_zero_point")
        return GroupedMatrix(
            shape=shape,
            unpack=lambda first, last: numbers[first:last],
            lowest=-(2 ** (bits - 1)),
            levels=2**bits,
            scale=scale.repeat_interleave(block[0], dim=0),
            zero=0 if zero is None else zero.to(torch.int32).repeat_interleave(block[0], dim=0),
            group=block[1],
        )


def _bits(facts: dict[str, Any]) -> int | None:
    """Return the bits of whole numbers; None: the facts do not say."""
    target = facts["_data"].get("target_dtype")
    match = _BITS.fullmatch(str(target.get("_data"))) if isinstance(target, dict) else None
    return None if match is None else int(match[1])


def _facts(module: str, files: StoredFiles) -> dict[str, Any]:
    """Return the facts of a module's weight. Raises StartupError if the files' headers have none."""
    text = files.metadata.get(f"{module}.weight")
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("_data"), dict):
        raise lying(module, "weight", "is neither stored nor described in a file's header, as torchao does")
    return found
