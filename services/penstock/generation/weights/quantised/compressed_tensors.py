"""compressed-tensors, as llm-compressor writes it: groups of modules, each with a scheme of its own.

pack-quantized: weight_packed int32 (outputs, words), whole numbers counted from the lowest; int-quantized: weight int8
(outputs, inputs); float-quantized: weight float8 likewise. weight_scale is (1), (outputs, 1), (outputs, groups) or
(blocks of outputs, blocks of inputs). 4-bit floats are compressed_fp4.py's. Schemes that quantise activations: our int8
product quantises them row by row, for any such scheme; otherwise they stay unquantised, or have a byte for 32 inputs
beside blocks of MXFP4, which is nearer to the original model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, INT8
from penstock.generation.layers.linear.native import GROUP
from penstock.generation.weights.quantised.base import (
    FLOATS,
    UNQUANTISED,
    GroupedMatrix,
    Part,
    QuantFormat,
    ScaledMatrix,
    StoredFiles,
    StoredMatrix,
    check_bits,
    lying,
    one_of,
    refuse,
    unpacked,
)
from penstock.generation.weights.quantised.compressed_fp4 import FP4_KINDS, Fp4Kind

_PACKED, _INT, _FLOAT, _NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE, *FP4_KINDS, "mixed-precision")
_FLOAT8 = ("F8_E4M3",)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Stored format of a group's modules."""

    targets: tuple[str, ...]
    is_packed: bool
    is_float: bool
    bits: int
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    description: str
    # Of 4-bit floats; None: it has others.
    fp4: Fp4Kind | None = None

    @property
    def lowest(self) -> int:
        """Lowest whole number."""
        return -(1 << (self.bits - 1))

    def scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales of such a matrix."""
        outputs, inputs = shape
        if self.strategy == "block":
            return -(-outputs // self.block[0]), -(-inputs // self.block[1])
        return {"tensor": (1, 1), "channel": (outputs, 1), "group": (outputs, -(-inputs // max(self.group, 1)))}[
            self.strategy
        ]


class CompressedTensors(QuantFormat):
    method = "compressed-tensors"

    def __init__(self, config: ConfigReader) -> None:
        kind = str(one_of(config, "format", _FORMATS, "dense"))
        one_of(config, "quantization_status", ("compressed",), "compressed")
        refuse(
            config, "kv_cache_scheme", "scales of keys and values", "--kv-cache-dtype int8 needs none; " + UNQUANTISED
        )
        refuse(config, "transform_config", "rotated weights")
        sparsity = config.mapping("sparsity_config")
        if sparsity is not None and sparsity.values:
            one_of(sparsity, "format", ("dense",), "dense")
        groups = config.mapping("config_groups")
        if groups is None or not groups.values:
            raise config.error("config_groups", "is missing")
        self._schemes = [_scheme(_nested(groups, name), kind) for name in groups.values]
        self._ignored = _names(config, "ignore")
        words = dict.fromkeys(scheme.description for scheme in self._schemes)
        self.description = f"compressed-tensors {' and '.join(words)}"
        first = self._schemes[0]
        if first.fp4 is not None:
            # One without blocks is dequantised.
            self.form = first.fp4.name if first.fp4.group == GROUP else ""
        elif not first.is_float and first.bits <= 4 and first.group % 32 == 0:
            self.form = INT4 if first.symmetric else INT4_ASYMMETRIC
        elif not first.is_float and first.symmetric and first.strategy in ("channel", "tensor"):
            self.form = INT8

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        scheme = self._scheme(module)
        if f"{module}.weight_packed" not in files and _is_plain(f"{module}.weight", files):
            # On the list `ignore`, or, like an embedding, without a target.
            return None
        if scheme is None:
            raise lying(
                module, "weight", f"is quantised, but quantization_config.config_groups has no target for {module}"
            )
        parts = _whole_parts(scheme, module, shape, files) if scheme.fp4 is None else scheme.fp4.parts(shape)
        # Scales of activations, calibrated beforehand, which nothing here needs.
        for name in ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"):
            if f"{module}.{name}" in files:
                stored = f"{module}.{name}"
                parts[name] = Part(files.shape(stored), (files.stored_as(stored),), is_required=False)
        return parts

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        scheme = self._scheme(module)
        if scheme is None:
            raise lying(module, "weight", "has no scheme")
        if scheme.fp4 is not None:
            return scheme.fp4.open(module, shape, tensors)
        scale = tensors["weight_scale"].float().reshape(scheme.scales(shape))
        if scheme.is_float:
            block = (1, shape[1]) if scheme.strategy == "channel" else scheme.block
            return ScaledMatrix(tensors["weight"], scale, block)
        if not scheme.is_packed:
            check_bits(module, "weight", tensors["weight"], scheme.bits)
        order = tensors.get("weight_g_idx")
        if order is not None:
            if int(order.max()) >= scale.shape[1]:
                raise lying(
                    module, "weight_g_idx", f"names a group outside of the {scale.shape[1]} that weight_scale has"
                )
            regular = torch.arange(shape[1]) // max(scheme.group, 1)
            order = None if int(order.min()) < 0 or torch.equal(order.long(), regular) else order.long()
        if scale.shape[0] == 1:
            scale = scale.expand(shape[0], -1)
        return GroupedMatrix(
            shape=shape,
            unpack=_packed_rows(module, shape, tensors, scheme) if scheme.is_packed else _int8_rows(tensors["weight"]),
            lowest=0 if scheme.is_packed else scheme.lowest,
            levels=2**scheme.bits,
            scale=scale,
            zero=_zeros(shape, tensors, scheme),
            group=scheme.group if scheme.strategy == "group" else shape[1],
            group_of_input=order,
        )

    def _scheme(self, module: str) -> _Scheme | None:
        """Return the scheme of a module that is not ignored: a target is a name, `re:` and an expression, or a class.
        A name goes before a class."""
        if any(_means(target, module) for target in self._ignored):
            return None
        named = (one for one in self._schemes if any(_means(target, module) for target in one.targets))
        of_class = (one for one in self._schemes if "Linear" in one.targets)
        return next(named, next(of_class, None))


def _scheme(group: ConfigReader, kind: str) -> _Scheme:
    """Read a group. Raises StartupError naming the field that is not supported."""
    weights = group.mapping("weights")
    if weights is None:
        raise group.error("weights", f"is missing: {UNQUANTISED}")
    kind = str(one_of(group, "format", _FORMATS[:-1], kind)) if group.has("format") or kind == _FORMATS[-1] else kind
    refuse(group, "output_activations", "quantised outputs")
    if kind in FP4_KINDS:
        return _fp4_scheme(group, weights, FP4_KINDS[kind])
    is_float = one_of(weights, "type", ("int", "float"), "int") == "float"
    is_packed = kind == _PACKED
    if is_packed and is_float:
        raise weights.error("type", f"'float' is not supported in {kind}: {UNQUANTISED}")
    bits = int(str(one_of(weights, "num_bits", (4, 8, 2) if is_packed else (8,) if is_float else (8, 4), 8)))
    group_size = weights.values.get("group_size")
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    has_blocks = is_float
    strategies = ("tensor", "channel", "block") if has_blocks else ("group", "channel", "tensor")
    strategy = str(one_of(weights, "strategy", strategies, default))
    size = weights.integer("group_size") if strategy == "group" else 0
    block = _block(weights) if strategy == "block" else (1, 1)
    symmetric = weights.boolean("symmetric", True)
    one_of(weights, "dynamic", (False,), False)
    inputs = group.mapping("input_activations")
    if inputs is not None:
        one_of(inputs, "num_bits", (8,), 8)
    activations = _activation_words(inputs)
    words = {"group": f"groups of {size}", "channel": "a scale a row", "tensor": "one scale", "block": "blocks"}
    kind_word = f"{'fp' if is_float else 'int'}{bits}{'' if is_float else ' symmetric' if symmetric else ' asymmetric'}"
    description = f"{kind_word}, {words[strategy]}{activations}"
    targets = _names(group, "targets")
    return _Scheme(targets, is_packed, is_float, bits, symmetric, strategy, size, block, description)


def _activation_words(inputs: ConfigReader | None) -> str:
    return "" if inputs is None else f", activations of {inputs.values.get('num_bits', 8)} bits"


def _fp4_scheme(group: ConfigReader, weights: ConfigReader, fp4: Fp4Kind) -> _Scheme:
    """Read a group of 4-bit floats. Raises StartupError naming the field that is not supported."""
    one_of(weights, "type", ("float",), "int")
    one_of(weights, "num_bits", (4,), 8)
    one_of(weights, "strategy", (fp4.strategy,), fp4.strategy)
    one_of(weights, "group_size", (fp4.group,), None)
    one_of(weights, "symmetric", (True,), True)
    one_of(weights, "dynamic", (False,), False)
    description = f"{fp4.name}, groups of {fp4.group}{_activation_words(group.mapping('input_activations'))}"
    return _Scheme(_names(group, "targets"), True, True, 4, True, fp4.strategy, fp4.group, (1, 1), description, fp4=fp4)


def _whole_parts(scheme: _Scheme, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part]:
    """Return the tensors of a matrix of whole numbers or short floats, but for the scales of activations."""
    parts = {"weight_scale": Part(_vector_or(scheme, shape, files, f"{module}.weight_scale"))}
    words = -(-shape[1] * scheme.bits // 32)
    if scheme.is_packed:
        parts["weight_packed"] = Part((shape[0], words), ("I32",))
        parts["weight_shape"] = Part((2,), ("I64", "I32"), is_required=False)
    else:
        parts["weight"] = Part(shape, _FLOAT8 if scheme.is_float else ("I8",))
    zeros: tuple[int, ...] = scheme.scales(shape)
    if scheme.is_packed and not scheme.symmetric:
        parts["weight_zero_point"] = Part((-(-zeros[0] * scheme.bits // 32), zeros[1]), ("I32",))
    elif f"{module}.weight_zero_point" in files:
        zeros = _vector_or(scheme, shape, files, f"{module}.weight_zero_point")
        kinds = ("I8", "I32", *_FLOAT8, *FLOATS)
        parts["weight_zero_point"] = Part(zeros, kinds, is_required=not scheme.symmetric)
    elif not scheme.symmetric:
        parts["weight_zero_point"] = Part(zeros, ("I8",))
    parts["weight_g_idx"] = Part((shape[1],), ("I32", "I64"), is_required=False)
    return parts


def _block(weights: ConfigReader) -> tuple[int, int]:
    value = weights.values.get("block_structure")
    if isinstance(value, str):
        value = [int(part) for part in value.split("x") if part.isdecimal()]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(one, int) and one > 0 for one in value):
        raise weights.error(
            "block_structure", f"must be two whole numbers, found {weights.values.get('block_structure')!r}"
        )
    return value[0], value[1]


def _names(config: ConfigReader, field: str) -> tuple[str, ...]:
    value = config.values.get(field) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise config.error(field, "must be a list of names")
    for one in value:
        if one.startswith("re:"):
            try:
                re.compile(one[3:])
            except re.error as error:
                raise config.error(field, f"has {one!r}, which is not an expression: {error}") from error
    return tuple(value)


def _nested(groups: ConfigReader, name: str) -> ConfigReader:
    found = groups.mapping(name)
    if found is None:
        raise groups.error(name, "must be an object")
    return found


def _means(target: str, module: str) -> bool:
    """True when a target names the module, or a folder of modules that has it."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target


def _vector_or(scheme: _Scheme, shape: tuple[int, int], files: StoredFiles, name: str) -> tuple[int, ...]:
    """Return the shape of scales; a single one may be stored as a vector or a number."""
    scales = scheme.scales(shape)
    is_flat = name in files and len(files.shape(name)) < 2 and 1 in scales
    return files.shape(name) if is_flat and _size(files.shape(name)) == _size(scales) else scales


def _is_plain(name: str, files: StoredFiles) -> bool:
    return name in files and files.stored_as(name) in FLOATS


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _packed_rows(
    module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor], scheme: _Scheme
) -> Callable[[int, int], Tensor]:
    said = tensors.get("weight_shape")
    if said is not None and tuple(said.tolist()) != shape:
        raise lying(module, "weight_shape", f"says {said.tolist()}, config.json asks for {list(shape)}")
    packed, bits = tensors["weight_packed"], scheme.bits
    return lambda first, last: unpacked(packed[first:last], bits)[:, : shape[1]].contiguous()


def _int8_rows(weight: Tensor) -> Callable[[int, int], Tensor]:
    return lambda first, last: weight[first:last].clone()


def _zeros(shape: tuple[int, int], tensors: Mapping[str, Tensor], scheme: _Scheme) -> Tensor | int:
    """Return the zeros, counted like the numbers: packed ones from 0, others from the lowest."""
    zero = tensors.get("weight_zero_point")
    if zero is None or scheme.symmetric:
        return -scheme.lowest if scheme.is_packed else 0
    rows, groups = scheme.scales(shape)
    if scheme.is_packed:
        zero = unpacked(zero.T, scheme.bits)[:, :rows].T
    return zero.to(torch.int32).reshape(rows, groups).expand(shape[0], -1).contiguous()
