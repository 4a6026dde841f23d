"""Tiny checkpoints quantised by the documented packing of each format, beside the numbers that they mean.

Written apart from the readers: whole numbers become bits one after the other, by numpy.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from factories.models.checkpoints import tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

# Widths that every format's groups and words divide.
SHAPE = {"hidden_size": 64, "intermediate_size": 128}
WEIGHTS = "model.safetensors"
NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Quantised:
    """The tensors of a quantised matrix by their names behind the module, and the numbers that they mean."""

    tensors: dict[str, Tensor]
    dense: Tensor
    # Texts for the file's header.
    metadata: dict[str, str] = field(default_factory=dict)


# (module, weight) -> the quantised matrix; None: it stays as it is.
Quantise = Callable[[str, Tensor], Quantised | None]


@dataclass(frozen=True)
class Pair:
    """A quantised checkpoint, and a plain one in float32 with the numbers that it means."""

    folder: Path
    dense: Path


@cache
def _base(family: str, layers: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json's values and the tensors of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_checkpoint(Path(folder), family, num_hidden_layers=layers, **SHAPE)
        values = json.loads((Path(folder) / "config.json").read_text())
        return values, {name: value.clone() for name, value in load_file(Path(folder) / WEIGHTS).items()}


def quantised_pair(
    where: Path,
    config: dict[str, Any],
    quantise: Quantise,
    *,
    family: str = "qwen2",
    shards: bool = False,
    layers: int = 2,
) -> Pair:
    """Write a random model both ways; each matrix of its layers, but a router of experts, goes through `quantise`."""
    dense, folder = where / "dense", where / "quantised"
    dense.mkdir()
    folder.mkdir()
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    values, tensors = _base(family, layers)
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        is_matrix = name.startswith("model.layers") and value.dim() == 2 and not module.endswith(".gate")
        found = quantise(module, value) if is_matrix else None
        if found is None:
            stored[name], meant[name] = value.half(), value.half().float()
            continue
        # Tables that all matrices have are saved for each.
        stored |= {f"{module}.{suffix}": tensor.contiguous().clone() for suffix, tensor in found.tensors.items()}
        meant[name] = found.dense
        metadata |= found.metadata
    save_file(meant, dense / WEIGHTS, metadata={"format": "pt"})
    (dense / "config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "float16", "quantization_config": config}))
    if not shards:
        save_file(stored, folder / WEIGHTS, metadata=metadata)
        return Pair(folder, dense)
    names = sorted(stored)
    # The parts of a matrix in files of their own, too.
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, own in files.items():
        save_file({name: stored[name] for name in own}, folder / file, metadata=metadata)
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return Pair(folder, dense)


def words(values: Tensor, bits: int) -> Tensor:
    """Pack whole numbers along the last dimension into int32, the lowest bits first, filled up with zeros."""
    numbers = values.numpy().astype(np.uint8)
    stream = (numbers[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(*numbers.shape[:-1], -1)
    pad = [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)]
    octets = np.packbits(np.pad(stream, pad), axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(octets).view(np.int32).copy())


@dataclass(frozen=True)
class Grouped:
    """Whole numbers (outputs, inputs) from 0 on, scale and zero (outputs, groups), and each input's group."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor
    group_of_input: Tensor

    @property
    def dense(self) -> Tensor:
        """The numbers that they mean."""
        scale, zero = self.scale.float()[:, self.group_of_input], self.zero[:, self.group_of_input]
        return (self.numbers - zero).float() * scale


def grouped(weight: Tensor, bits: int, group: int, *, symmetric: bool, ordered: bool = False, seed: int = 0) -> Grouped:
    """Round a weight to whole numbers by groups of inputs, in random groups where `ordered`."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else min(group, inputs)
    index = torch.arange(inputs) // group
    if ordered:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    groups, top = -(-inputs // group), 2**bits - 1
    scale, zero = torch.empty(outputs, groups), torch.empty(outputs, groups, dtype=torch.int64)
    for number in range(groups):
        part = weight[:, index == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale[:, number] = torch.maximum(-low, high) / (2 ** (bits - 1) - 0.5)
            zero[:, number] = 2 ** (bits - 1)
        else:
            scale[:, number] = (high - low) / top
            # At least 1: the first release of GPTQ cannot hold 0.
            zero[:, number] = (-low / scale[:, number]).round().clamp(1, top).long()
    scale = scale.half()
    numbers = (weight / scale.float()[:, index]).round().long() + zero[:, index]
    return Grouped(numbers.clamp(0, top), scale, zero, index)


def gptq(
    bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, v2: bool = False
) -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of GPTQ, and its packing."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}

    def quantise(module: str, weight: Tensor) -> Quantised:
        found = grouped(weight, bits, group, symmetric=symmetric, ordered=ordered)
        tensors = {
            "qweight": words(found.numbers, bits).T,
            "qzeros": words(found.zero.T - (0 if v2 else 1), bits),
            "scales": found.scale.T,
            "g_idx": found.group_of_input.int(),
        }
        return Quantised(tensors, found.dense)

    return config | ({"checkpoint_format": "gptq_v2"} if v2 else {}), quantise


def awq(group: int) -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of AWQ's version gemm, and its packing."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Tensor) -> Tensor:
        return words(values.reshape(len(values), -1, 8)[:, :, order].flatten(1), 4)

    def quantise(module: str, weight: Tensor) -> Quantised:
        found = grouped(weight, 4, group, symmetric=False)
        tensors = {"qweight": packed(found.numbers.T), "qzeros": packed(found.zero.T), "scales": found.scale.T}
        return Quantised(tensors, found.dense)

    return config, quantise


def compressed(
    kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, ignore: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of compressed-tensors with one group of modules, and its packing."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
    bits, size = weights["num_bits"], weights.get("group_size") or -1
    symmetric, is_float = weights.get("symmetric", True), weights.get("type") == "float"
    ordered = weights.get("actorder") == "group"

    def quantise(module: str, weight: Tensor) -> Quantised | None:
        if module in ignore:
            return None
        if bits == 4 and is_float:
            return _float4(weight, size, activations)
        if is_float:
            return _float8(weight, weights)
        found = grouped(weight, bits, size, symmetric=symmetric, ordered=ordered)
        half = 2 ** (bits - 1)
        tensors = {"weight_scale": found.scale}
        if kind == "pack-quantized":
            tensors |= {"weight_packed": words(found.numbers, bits), "weight_shape": torch.tensor(weight.shape)}
            if not symmetric:
                tensors["weight_zero_point"] = words(found.zero.T, bits).T
        else:
            tensors["weight"] = (found.numbers - half).to(torch.int8)
            if not symmetric:
                tensors["weight_zero_point"] = (found.zero - half).to(torch.int8)
        if ordered:
            tensors["weight_g_idx"] = found.group_of_input.int()
        if activations is not None and not activations.get("dynamic"):
            tensors["input_scale"] = torch.ones(1)
        return Quantised(tensors, found.dense)

    return config, quantise


def _float4(weight: Tensor, group: int, activations: dict[str, Any] | None) -> Quantised:
    """Quantise to 4-bit floats: with powers of two for 32 inputs, or float8 for 16 below one scale of the matrix."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    parts = weight.unflatten(1, (-1, group))
    least = parts.abs().amax(2) / 6
    if group == 32:
        exponent = least.log2().ceil()
        scale, tensors = exponent.exp2(), {"weight_scale": (exponent + 127).to(torch.uint8)}
    else:
        whole = 448 / least.max()
        stored = (least * whole).to(torch.float8_e4m3fn)
        scale, tensors = stored.float() / whole, {"weight_scale": stored, "weight_global_scale": whole[None]}
    if activations is not None and activations.get("dynamic") == "local":
        tensors["input_global_scale"] = torch.ones(1)
    ratio = (parts / scale[:, :, None]).flatten(1)
    code = (ratio.abs()[..., None] - numbers).abs().argmin(-1)
    dense = (numbers[code] * ratio.sign()).unflatten(1, (-1, group)) * scale[:, :, None]
    code = (code + 8 * (ratio < 0)).to(torch.uint8)
    tensors["weight_packed"] = code[:, ::2] + 16 * code[:, 1::2]
    return Quantised(tensors, dense.flatten(1))


def _float8(weight: Tensor, scheme: dict[str, Any]) -> Quantised:
    if scheme["strategy"] == "block":
        return block_float8(weight, *scheme["block_structure"], name="weight_scale")
    largest = weight.abs().amax(1, keepdim=True) if scheme["strategy"] == "channel" else weight.abs().amax()[None]
    scale = largest / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return Quantised({"weight": stored, "weight_scale": scale}, stored.float() * scale)


def block_float8(weight: Tensor, rows: int, columns: int, name: str = "weight_scale_inv") -> Quantised:
    """Quantise to float8 with a scale of each block; the last blocks may be smaller."""
    outputs, inputs = weight.shape
    scale = torch.empty(-(-outputs // rows), -(-inputs // columns))
    stored, dense = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[block] = stored[block].float() * scale[i, j]
    return Quantised({"weight": stored, name: scale}, dense)


def fp8(block: tuple[int, int] | None) -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of fp8 by blocks, or with one scale, and its packing."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}

    def quantise(module: str, weight: Tensor) -> Quantised:
        found = block_float8(weight, *(block or weight.shape))
        if block is None:
            found.tensors["weight_scale_inv"] = found.tensors["weight_scale_inv"].flatten()
        return found

    return config, quantise


def fbgemm_fp8() -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of FBGEMM's fp8, and its packing."""
    return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, lambda module, weight: _float8(
        weight, {"strategy": "channel"}
    )


def bitsandbytes_int8() -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of bitsandbytes int8, and its packing."""

    def quantise(module: str, weight: Tensor) -> Quantised:
        largest = weight.abs().amax(1)
        stored = (weight * (127 / largest)[:, None]).round().to(torch.int8)
        tensors = {"weight": stored, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return Quantised(tensors, stored.float() * (largest / 127)[:, None])

    return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, quantise


def bitsandbytes_nf4(*, nested: bool, block: int = 64) -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of bitsandbytes nf4, and its packing."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    table, inner = torch.tensor(NF4), torch.linspace(-1, 1, 256)

    def quantise(module: str, weight: Tensor) -> Quantised:
        parts = weight.reshape(-1, block)
        scale = parts.abs().amax(1)
        facts: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": block,
            "shape": list(weight.shape),
            "dtype": "float16",
        }
        tensors = {"weight.quant_map": table, "weight.absmax": scale}
        if nested:
            offset = float(scale.mean())
            most = (scale - offset).abs().max()
            codes = ((scale - offset)[:, None] / most - inner).abs().argmin(1)
            scale = inner[codes] * most + offset
            facts |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors["weight.absmax"] = codes.to(torch.uint8)
            tensors |= {"weight.nested_absmax": most[None], "weight.nested_quant_map": inner}
        codes = (parts[..., None] / scale[:, None, None] - table).abs().argmin(-1)
        flat = codes.flatten().to(torch.uint8)
        tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(facts).encode()), dtype=torch.uint8
        )
        return Quantised(tensors, (table[codes] * scale[:, None]).view(weight.shape))

    return config | {"bnb_4bit_use_double_quant": nested}, quantise


def torchao_int8() -> tuple[dict[str, Any], Quantise]:
    """Return quantization_config of torchao's Int8WeightOnlyConfig as transformers saves it, and its packing."""
    kind = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": {"_type": "PerRow"}}}

    def quantise(module: str, weight: Tensor) -> Quantised:
        found = grouped(weight, 8, -1, symmetric=True)
        tensors = {
            "_weight_qdata": (found.numbers - 128).to(torch.int8),
            "_weight_scale": found.scale.float(),
            "_weight_zero_point": torch.zeros(len(weight), 1, dtype=torch.int8),
        }
        facts = {"_type": "Int8Tensor", "_data": {"block_size": [1, weight.shape[1]]}, "_tensor_data_names": ["qdata"]}
        return Quantised(tensors, found.dense, {f"{module}.weight": json.dumps(facts)})

    return {"quant_method": "torchao", "quant_type": {"default": kind}}, quantise


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}

# Format -> (its packing, the form that its matrices run in).
CASES: dict[str, tuple[tuple[dict[str, Any], Quantise], str]] = {
    "gptq": (gptq(4, 32), "int4"),
    "gptq-row": (gptq(4, -1), "int4"),
    "gptq-wide": (gptq(4, 2**30), "int4"),
    "gptq-v2": (gptq(4, 32, v2=True), "int4"),
    "gptq-ordered": (gptq(4, 32, ordered=True), "float32"),
    "gptq-asymmetric": (gptq(4, 32, symmetric=False), "int4-asymmetric"),
    "gptq-asymmetric-v2": (gptq(4, 32, symmetric=False, v2=True), "int4-asymmetric"),
    "gptq-asymmetric-64": (gptq(4, 64, symmetric=False), "int4-asymmetric"),
    "gptq-asymmetric-row": (gptq(4, -1, symmetric=False), "int4-asymmetric"),
    "gptq-asymmetric-ordered": (gptq(4, 32, symmetric=False, ordered=True), "float32"),
    "gptq-narrow": (gptq(4, 16), "float32"),
    "gptq-2": (gptq(2, 32, symmetric=False), "int4"),
    "gptq-3": (gptq(3, 32, symmetric=False), "int4"),
    "gptq-8": (gptq(8, 32), "float32"),
    "gptq-8-row": (gptq(8, -1), "int8"),
    "awq": (awq(32), "int4-asymmetric"),
    "awq-narrow": (awq(16), "float32"),
    "w8a8": (compressed("int-quantized", EIGHT_BITS, PER_TOKEN), "int8"),
    "w8a8-static": (compressed("int-quantized", EIGHT_BITS, {"num_bits": 8}), "int8"),
    "w4a16": (compressed("pack-quantized", FOUR_BITS), "int4"),
    "w4a16-asymmetric": (compressed("pack-quantized", {**FOUR_BITS, "symmetric": False}), "int4-asymmetric"),
    "w4a16-ordered": (compressed("pack-quantized", {**FOUR_BITS, "actorder": "group"}), "float32"),
    "w8a16-packed": (compressed("pack-quantized", EIGHT_BITS), "int8"),
    "w8a16-groups": (compressed("pack-quantized", {**EIGHT_BITS, "strategy": "group", "group_size": 32}), "float32"),
    "w8-asymmetric": (compressed("int-quantized", {**EIGHT_BITS, "symmetric": False}), "float32"),
    "fp8-row": (
        compressed("float-quantized", FLOAT8, {"num_bits": 8, "type": "float", "dynamic": True}),
        "float32",
    ),
    "fp8-one": (compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}), "float32"),
    "fp8-tiles": (
        compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [32, 48]}),
        "float32",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}), "float32"),
    "nvfp4-a16": (compressed("nvfp4-pack-quantized", NVFP4), "float32"),
    "mxfp4": (compressed("mxfp4-pack-quantized", MXFP4), "float32"),
    "fp8-blocks": (fp8((32, 48)), "float32"),
    "fp8": (fp8(None), "float32"),
    "fp8-fbgemm": (fbgemm_fp8(), "float32"),
    "bitsandbytes-int8": (bitsandbytes_int8(), "int8"),
    "nf4": (bitsandbytes_nf4(nested=False), "float32"),
    "nf4-nested": (bitsandbytes_nf4(nested=True), "float32"),
    "torchao-int8": (torchao_int8(), "int8"),
}


def write_gguf(path: Path, facts: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    """Write a GGUF file of version 3; `tensors`: number of the type, shape with the rows first, bytes. A fact that is
    bytes is written as they are: a type and a value."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value_of(value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value[0], int):
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))

    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    start += b"".join(text(name) + value_of(value) for name, value in facts.items())
    offset, data = 0, b""
    for name, (kind, shape, octets) in tensors.items():
        dims = tuple(reversed(shape))
        start += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        padded = octets + b"\0" * (-len(octets) % 32)
        data += padded
        offset += len(padded)
    # A file that is emptied and written again would wait for the disk.
    path.unlink(missing_ok=True)
    path.write_bytes(start + b"\0" * (-len(start) % 32) + data)
