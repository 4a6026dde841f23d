"""bitsandbytes: int8 with a scale of each row (SCB), and tables of 16 numbers (nf4, fp4) with a scale of each block.

int8: weight int8 (outputs, inputs); the numbers are weight * SCB / 127. 4 bits: weight as bytes in one column, two
numbers per byte, the high half first; absmax of each block, itself quantised if it is nested; quant_map, the table; and
quant_state, facts as JSON in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.dtypes import stored_bytes
from penstock.generation.core.model_config import ConfigReader
from penstock.generation.layers.linear.base import INT8
from penstock.generation.weights.quantised.base import (
    FLOATS,
    UNQUANTISED,
    GroupedMatrix,
    Part,
    QuantFormat,
    StoredFiles,
    StoredMatrix,
    lying,
    one_of,
)

_KINDS = ("nf4", "fp4")
# Larger than any matrix.
_MOST_BLOCK = 2**40
_STATE = "weight.quant_state.bitsandbytes__"
_MOST = 127.0


class BitsAndBytes(QuantFormat):
    method = "bitsandbytes"

    def __init__(self, config: ConfigReader) -> None:
        self._is_int8 = config.boolean("load_in_8bit", False)
        if self._is_int8 == config.boolean("load_in_4bit", False):
            raise config.error("load_in_8bit", f"or load_in_4bit must be true, one of them: {UNQUANTISED}")
        if self._is_int8:
            one_of(config, "llm_int8_has_fp16_weight", (False,), False)
            self.form = INT8
            self.description = "bitsandbytes int8, a scale a row"
            return
        self._kind = str(one_of(config, "bnb_4bit_quant_type", _KINDS, "fp4"))
        nested = config.boolean("bnb_4bit_use_double_quant", False)
        self.description = f"bitsandbytes {self._kind}{' with nested scales' if nested else ''}"

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        weight = f"{module}.weight"
        if self._is_int8:
            if weight in files and files.stored_as(weight) in FLOATS:
                return None
            return {
                "weight": Part(shape, ("I8",)),
                "SCB": Part((shape[0],), ("F32",)),
                "weight_format": Part((), ("U8",), is_required=False),
            }
        state = next((kind for kind in _KINDS if f"{module}.{_STATE}{kind}" in files), None)
        has_rest = any(f"{module}.weight.{name}" in files for name in ("absmax", "quant_map"))
        if state is None and not has_rest and (weight not in files or files.shape(weight) == shape):
            return None
        facts = f"{module}.{_STATE}{state or self._kind}"
        parts = {f"{_STATE}{state or self._kind}": Part(files.shape(facts) if facts in files else (1,), ("U8",))}
        # Bytes may be stored as numbers of another dtype.
        size = stored_bytes(files.stored_as(weight), 1) if weight in files else 1
        parts["weight"] = Part((-(-math.prod(shape) // 2) // size, 1), ("U8", "I8", *FLOATS))
        parts["weight.quant_map"] = Part((16,), ("F32",))
        absmax = f"{module}.weight.absmax"
        blocks = files.shape(absmax) if absmax in files else (1,)
        nested = absmax in files and files.stored_as(absmax) == "U8"
        parts["weight.absmax"] = Part(blocks, ("U8",) if nested else ("F32",))
        if nested:
            nested_absmax = f"{module}.weight.nested_absmax"
            outer = files.shape(nested_absmax) if nested_absmax in files else (1,)
            parts["weight.nested_absmax"] = Part(outer, ("F32",))
            parts["weight.nested_quant_map"] = Part((256,), ("F32",))
        return parts

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        weight = tensors["weight"]
        if not self._is_int8:
            return _table(module, shape, tensors)
        layout = tensors.get("weight_format")
        if layout is not None and int(layout) != 0:
            raise lying(module, "weight_format", f"is {int(layout)}: only rows (0) are supported; {UNQUANTISED}")
        return GroupedMatrix(
            shape=shape,
            unpack=lambda first, last: weight[first:last],
            lowest=-128,
            levels=256,
            scale=(tensors["SCB"] / _MOST)[:, None],
            zero=0,
            group=shape[1],
        )


@dataclass(frozen=True, slots=True)
class _TableMatrix(StoredMatrix):
    """Numbers of a table, times a scale of each block of consecutive ones."""

    shape: tuple[int, int]
    # (bytes)
    packed: Tensor
    # (16)
    table: Tensor
    # (blocks) in float32.
    scale: Tensor
    block: int

    @override
    def rows(self, first: int, last: int) -> Tensor:
        inputs = self.shape[1]
        begin, end = first * inputs, last * inputs
        octets = self.packed[begin // 2 : -(-end // 2)]
        codes = torch.stack([octets >> 4, octets & 15], dim=1).flatten()[begin % 2 :][: end - begin]
        scale = self.scale[torch.arange(begin, end) // self.block]
        return self.table[codes.int()].mul_(scale).view(last - first, inputs)


def _table(module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> _TableMatrix:
    name, state = next((name, one) for name, one in tensors.items() if name.startswith(_STATE))
    try:
        facts = json.loads(bytes(state.tolist()))
        block, said = int(facts["blocksize"]), tuple(facts["shape"])
        nested_block, offset = int(facts.get("nested_blocksize", 0)), float(facts.get("nested_offset", 0.0))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise lying(module, name, "is not JSON with blocksize and shape") from error
    if max(block, nested_block) > _MOST_BLOCK or not math.isfinite(offset):
        raise lying(module, name, "has a block size or an offset that no matrix has")
    if said != shape:
        raise lying(module, name, f"says shape {list(said)}, config.json asks for {list(shape)}")
    if block < 1 or len(tensors["weight.absmax"]) != -(-math.prod(shape) // block):
        raise lying(module, "weight.absmax", f"has {len(tensors['weight.absmax'])} numbers for blocks of {block}")
    scale = tensors["weight.absmax"]
    if scale.dtype is torch.uint8:
        outer = tensors["weight.nested_absmax"]
        if nested_block < 1 or len(outer) != -(-len(scale) // nested_block):
            raise lying(module, "weight.nested_absmax", f"has {len(outer)} numbers for blocks of {nested_block}")
        inner = tensors["weight.nested_quant_map"][scale.int()]
        scale = inner * outer[torch.arange(len(scale)) // nested_block] + offset
    packed = tensors["weight"].contiguous().view(torch.uint8).flatten()
    return _TableMatrix(shape, packed, tensors["weight.quant_map"].clone(), scale.clone(), block)
