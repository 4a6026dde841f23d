"""Formats of quantised matrices: numbers, forms, and refusals that name the field or the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models import quantised as made
from factories.models.native import use_native
from factories.models.quantised import CASES, EIGHT_BITS, FOUR_BITS, Pair
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ConfigReader
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.layers.layer_kernels import NativeKernels
from penstock.generation.layers.linear.base import WholeRows, WholeWeight
from penstock.generation.layers.linear.int4 import Int4LinearMethod
from penstock.generation.layers.linear.int8 import Int8LinearMethod
from penstock.generation.layers.linear.native import Format, NativeLinearMethod
from penstock.generation.models.registry import checkpoint_weights, load_model, read_model_config
from penstock.generation.startup.memory_check import check_weights
from penstock.generation.weights.files import least_weight_bytes
from penstock.generation.weights.quantised.base import unpacked
from penstock.generation.weights.quantised.gguf import block_numbers
from penstock.generation.weights.quantised.table import FORMATS, open_checkpoint, read_format
from safetensors.torch import load_file, save_file

MODULE = "model.layers.0.self_attn.q_proj"
Q_WEIGHT = f"{MODULE}.weight"
SHAPE = (64, 96)
# Whole numbers of a byte with a scale for some multiple of 32 inputs, and 4-bit floats with a power of two for 32.
IN_BLOCKS = {"gptq-8": "Q8_0", "w8a16-groups": "Q8_0", "mxfp4": "MXFP4"}


class Files:
    """One matrix's tensors, as a format sees them."""

    def __init__(self, found: made.Quantised) -> None:
        kinds = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8", torch.float16: "F16"}
        self.kinds = {**kinds, torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
        self.tensors = {f"{MODULE}.{name}": tensor for name, tensor in found.tensors.items()}
        self.metadata = found.metadata

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self.tensors[tensor].shape)

    def stored_as(self, tensor: str) -> str:
        return self.kinds[self.tensors[tensor].dtype]


def reader(config: dict[str, Any]) -> ConfigReader:
    return ConfigReader({"quantization_config": config}, "config.json")


@pytest.mark.parametrize("case", list(CASES))
def test_rows_are_the_numbers_that_are_meant(case: str) -> None:
    (config, quantise), form = CASES[case]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    found = quantise(MODULE, weight)
    assert found is not None
    files, format = Files(found), read_format(reader(config))
    assert format is not None
    parts = format.parts(MODULE, SHAPE, files)
    assert parts is not None
    assert {name for name, part in parts.items() if part.is_required} <= found.tensors.keys() <= parts.keys()
    for name, tensor in found.tensors.items():
        assert tuple(tensor.shape) == parts[name].shape
        assert files.stored_as(f"{MODULE}.{name}") in parts[name].dtypes
    matrix = format.open(MODULE, SHAPE, found.tensors)
    assert matrix.form == ("" if form == "float32" else form)
    # Pieces that begin and end anywhere.
    rows = torch.cat([matrix.rows(*span) for span in ((0, 3), (3, 50), (50, 64))])
    assert torch.allclose(rows, found.dense, rtol=1e-6, atol=0)
    assert matrix.block_type == IN_BLOCKS.get(case, "")
    if matrix.block_type:
        assert torch.equal(block_numbers(matrix.block_type, matrix.block_rows(5, 40)), matrix.rows(5, 40))
    if matrix.form:
        assert torch.allclose(meant(matrix.whole_rows(5, 40), matrix.form), found.dense[5:40], rtol=1e-6, atol=0)


def meant(rows: WholeRows, form: str) -> torch.Tensor:
    if form == "int8":
        return rows.values.float() * rows.scale[:, None]
    scale = rows.scale.repeat_interleave(32, dim=1)[:, : rows.values.shape[1]]
    if form == "int4":
        assert rows.offset is None
        return (rows.values.float() - 8) * scale
    assert rows.offset is not None
    return rows.values.float() * scale + rows.offset.repeat_interleave(32, dim=1)[:, : rows.values.shape[1]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_are_unpacked_in_their_order(bits: int) -> None:
    values = torch.randint(0, 2**bits, (5, 96), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpacked(made.words(values, bits), bits).long(), values)


class Whole(WholeWeight):
    """Random whole numbers in pieces, and x that no rounding changes."""

    def __init__(self, form: str, outputs: int, inputs: int) -> None:
        random = torch.Generator().manual_seed(outputs)
        self.shape, self.dtype, self.form = (outputs, inputs), torch.float32, form
        low, high = (-128, 128) if form == "int8" else (0, 16)
        self.values = torch.randint(low, high, self.shape, generator=random).to(torch.int8)
        groups = () if form == "int8" else (-(-inputs // 32),)
        # Powers of two: bfloat16 has them.
        self.scale = torch.exp2(torch.randint(-3, 3, (outputs, *groups), generator=random).float())
        # Zeros from 0 to 15; those of one row are all 8.
        zero = torch.randint(0, 16, self.scale.shape, generator=random)
        zero[0] = 8
        self.offset = -zero * self.scale if form == "int4-asymmetric" else None
        self.x = torch.randint(-127, 128, (7, inputs), generator=random).float()
        self.x[:, ::32] = 127

    def whole_pieces(self) -> Any:
        kind = torch.int8 if self.form == "int8" else torch.uint8
        for first in range(0, self.shape[0], 19):
            part = slice(first, first + 19)
            offset = None if self.offset is None else self.offset[part]
            yield WholeRows(self.values[part].to(kind), self.scale[part], offset)

    @property
    def product(self) -> torch.Tensor:
        rows = WholeRows(self.values, self.scale, self.offset)
        return (self.x.double() @ meant(rows, self.form).double().T).float()


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (50, 80), (3, 6)])
@pytest.mark.parametrize("form", ["int8", "int4", "int4-asymmetric"])
def test_a_product_has_the_very_whole_numbers(form: str, outputs: int, inputs: int) -> None:
    weight = Whole(form, outputs, inputs)
    method = Int8LinearMethod() if form == "int8" else Int4LinearMethod()
    bias = torch.randn(outputs)
    if form == "int8":
        assert torch.allclose(method.whole(weight, bias)(weight.x), weight.product + bias, rtol=1e-5, atol=1e-2)
    else:
        # x and the result are rounded to bfloat16.
        assert torch.allclose(method.whole(weight, bias)(weight.x), weight.product + bias, rtol=1e-2, atol=1e2)


@pytest.mark.kernels
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (50, 80), (6, 6)])
@pytest.mark.parametrize("form", ["int8", "int4", "int4-asymmetric"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernels_product_has_the_very_whole_numbers(form: str, outputs: int, inputs: int, gated: bool) -> None:
    use_native()
    weight = Whole(form, outputs, inputs)
    method = NativeLinearMethod(Format.INT8 if form == "int8" else Format.INT4)
    bias = torch.randn(outputs)
    linear = method.whole(weight, bias, NativeKernels() if gated else None)
    exact = weight.product + bias
    if gated:
        gate, value = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * value
    assert torch.allclose(linear(weight.x), exact, rtol=1e-5, atol=1e-3 * float(exact.abs().max()))
    assert linear.quantised_as == form


def pair(tmp_path: Path, case: str = "gptq", **options: Any) -> Pair:
    return made.quantised_pair(tmp_path, *CASES[case][0], layers=1, **options)


def refusal(folder: Path) -> str:
    """Message of the load, which names MODEL."""
    with pytest.raises(StartupError) as caught:
        load_model(folder, device=CPUDevice())
    assert caught.value.flag == "MODEL"
    return caught.value.message


GROUP_0 = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("case", "path", "value", "named"),
    [
        ("gptq", ("bits",), 5, "quantization_config.bits 5 is not supported; supported are 4, 8, 2, 3"),
        ("gptq", ("group_size",), 0, "quantization_config.group_size must be"),
        ("gptq", ("checkpoint_format",), "marlin", "quantization_config.checkpoint_format 'marlin'"),
        ("gptq", ("pack_dtype",), "int16", "quantization_config.pack_dtype 'int16'"),
        ("gptq", ("dynamic",), {"-:.*": {}}, "quantization_config.dynamic"),
        (
            "gptq",
            ("quant_method",),
            "hqq",
            "quant_method 'hqq' is not supported; supported are gptq",
        ),
        ("awq", ("version",), "gemv", "quantization_config.version 'gemv'"),
        ("awq", ("bits",), 3, "quantization_config.bits 3"),
        ("awq", ("zero_point",), False, "quantization_config.zero_point False"),
        ("w8a8", ("format",), "mxfp8-quantized", "quantization_config.format 'mxfp8-quantized'"),
        ("w8a8", ("format",), "nvfp4-pack-quantized", "group_0.weights.type 'int'"),
        ("nvfp4", (*GROUP_0, "weights", "group_size"), 32, "group_0.weights.group_size 32"),
        ("nvfp4", (*GROUP_0, "weights", "strategy"), "group", "group_0.weights.strategy 'group'"),
        ("mxfp4", (*GROUP_0, "weights", "symmetric"), False, "group_0.weights.symmetric False"),
        ("mxfp4", (*GROUP_0, "weights", "num_bits"), 8, "group_0.weights.num_bits 8"),
        ("w8a8", ("quantization_status",), "frozen", "quantization_config.quantization_status 'frozen'"),
        ("w8a8", ("kv_cache_scheme",), {"num_bits": 8}, "quantization_config.kv_cache_scheme"),
        ("w8a8", ("transform_config",), {"r1": {}}, "quantization_config.transform_config"),
        ("w8a8", ("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config.format 'sparse-24-bitmask'"),
        ("w8a8", (*GROUP_0, "output_activations"), {"num_bits": 8}, "config_groups.group_0.output_activations"),
        ("w8a8", (*GROUP_0, "input_activations", "num_bits"), 4, "group_0.input_activations.num_bits 4"),
        ("w8a8", (*GROUP_0, "weights", "num_bits"), 3, "group_0.weights.num_bits 3"),
        ("w8a8", (*GROUP_0, "weights", "strategy"), "tensor_group", "group_0.weights.strategy 'tensor_group'"),
        ("w8a8", (*GROUP_0, "weights", "dynamic"), True, "group_0.weights.dynamic True"),
        ("w8a8", (*GROUP_0, "targets"), ["re:("], "group_0.targets has 're:('"),
        ("fp8", ("weight_block_size",), [128], "quantization_config.weight_block_size"),
        ("fp8", ("activation_scheme",), "token", "quantization_config.activation_scheme 'token'"),
        ("nf4", ("bnb_4bit_quant_type",), "int4", "quantization_config.bnb_4bit_quant_type 'int4'"),
        ("nf4", ("load_in_8bit",), True, "quantization_config.load_in_8bit"),
        ("bitsandbytes-int8", ("llm_int8_has_fp16_weight",), True, "llm_int8_has_fp16_weight True"),
    ],
)
def test_an_unsupported_variant_is_named_by_its_field(case: str, path: tuple[str, ...], value: Any, named: str) -> None:
    config = json.loads(json.dumps(CASES[case][0][0]))
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(StartupError) as caught:
        read_format(reader(config))
    assert named in caught.value.message
    assert caught.value.flag == "MODEL"
    # Each says what would help.
    assert any(word in caught.value.message for word in ("unquantised", "must be", "expression"))


@pytest.mark.parametrize(
    ("case", "tensor", "change", "named"),
    [
        ("gptq", "qzeros", None, "lacks tensor {}.qzeros that config.json with its quantization_config asks for"),
        ("gptq", "scales", lambda t: t[:1], "tensor {}.scales has shape [1, 64]"),
        ("gptq", "qweight", lambda t: t[:, :32], "tensor {}.qweight has shape [8, 32]"),
        ("gptq", "qweight", lambda t: t.long(), "tensor {}.qweight is stored as I64; supported are I32"),
        ("gptq", "g_idx", lambda t: t + 5, "tensor {}.g_idx names a group outside of the 2 that scales has"),
        ("gptq", "scales", lambda t: t * float("nan"), "tensor {}.weight has a NaN"),
        ("awq", "scales", None, "lacks tensor {}.scales"),
        ("w4a16", "weight_scale", None, "lacks tensor {}.weight_scale"),
        ("w4a16", "weight_shape", lambda t: t + 1, "tensor {}.weight_shape says [65, 65]"),
        ("w4a16-asymmetric", "weight_zero_point", None, "lacks tensor {}.weight_zero_point"),
        ("w8a8", "weight_scale", lambda t: t[:5], "tensor {}.weight_scale has shape [5, 1]"),
        ("nvfp4", "weight_global_scale", None, "lacks tensor {}.weight_global_scale"),
        ("nvfp4", "weight_global_scale", lambda t: t * 0, "tensor {}.weight_global_scale is 0"),
        (
            "nvfp4",
            "weight_scale",
            lambda t: t.float(),
            "tensor {}.weight_scale is stored as F32; supported are F8_E4M3",
        ),
        ("mxfp4", "weight_scale", lambda t: t | 255, "tensor {}.weight_scale has an exponent of 255"),
        ("mxfp4", "weight_packed", lambda t: t[:, :9], "tensor {}.weight_packed has shape [64, 9]"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t[:1], "tensor {}.weight_scale_inv has shape [1, 2]"),
        ("fp8-blocks", "weight_scale_inv", None, "lacks tensor {}.weight_scale_inv"),
        ("bitsandbytes-int8", "SCB", None, "lacks tensor {}.SCB"),
        ("nf4", "weight.absmax", lambda t: t[1:], "tensor {}.weight.absmax has 63 numbers for blocks of 64"),
        ("nf4", "weight.quant_map", None, "lacks tensor {}.weight.quant_map"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:9], "bitsandbytes__nf4 is not JSON"),
        ("nf4-nested", "weight.nested_absmax", None, "lacks tensor {}.weight.nested_absmax"),
        ("nf4", "weight", lambda t: t[:7], "tensor {}.weight has shape [7, 1]"),
        ("torchao-int8", "_weight_scale", lambda t: t[:, 0], "tensor {}._weight_scale has shape [64]"),
    ],
)
def test_a_tensor_that_lies_is_named(tmp_path: Path, case: str, tensor: str, change: Any, named: str) -> None:
    folder = pair(tmp_path, case).folder
    stored = load_file(folder / made.WEIGHTS)
    value = stored.pop(f"{MODULE}.{tensor}")
    if change is not None:
        stored[f"{MODULE}.{tensor}"] = change(value).contiguous()
    config = json.loads((folder / "config.json").read_text())
    metadata = {}
    if config["quantization_config"]["quant_method"] == "torchao":
        facts = {"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}
        wide = {"_type": "Int8Tensor", "_data": {"block_size": [1, 128]}}
        names = {name.removesuffix("._weight_qdata") for name in stored if name.endswith("_qdata")}
        metadata = {f"{name}.weight": json.dumps(wide if "down" in name else facts) for name in names}
    save_file(stored, folder / made.WEIGHTS, metadata=metadata)
    assert named.format(MODULE) in refusal(folder)


def test_a_torchao_class_in_the_order_of_a_gpu_is_named(tmp_path: Path) -> None:
    folder = pair(tmp_path, "torchao-int8").folder
    stored = load_file(folder / made.WEIGHTS)
    facts = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, 32]}})
    save_file(stored, folder / made.WEIGHTS, metadata={Q_WEIGHT: facts})
    assert f"tensor {Q_WEIGHT} is a torchao Int4TilePackedTo4dTensor" in refusal(folder)


def test_a_file_cut_short_and_a_tensor_too_many_are_named(tmp_path: Path) -> None:
    folder = pair(tmp_path).folder
    stored = load_file(folder / made.WEIGHTS)
    save_file({**stored, "model.layers.0.mlp.extra.qweight": torch.zeros(1)}, folder / made.WEIGHTS)
    assert "unexpected tensor model.layers.0.mlp.extra.qweight" in refusal(folder)
    content = (folder / made.WEIGHTS).read_bytes()
    (folder / made.WEIGHTS).write_bytes(content[: len(content) // 2])
    assert "is not a complete safetensors file" in refusal(folder)


def test_numbers_of_more_bits_than_the_scheme_has_are_named() -> None:
    config, quantise = made.compressed("int-quantized", {**FOUR_BITS, "strategy": "channel", "group_size": -1})
    format, found = read_format(reader(config)), quantise(MODULE, torch.randn(SHAPE))
    assert format is not None
    assert found is not None
    assert format.open(MODULE, SHAPE, found.tensors).form == "int4"
    found.tensors["weight"][3, 4] = 9
    with pytest.raises(StartupError, match=r"q_proj.weight has numbers from -8 to 9, which are not of 4 bits"):
        format.open(MODULE, SHAPE, found.tensors)


def test_groups_of_modules_may_have_schemes_of_their_own() -> None:
    config, _ = made.compressed("mixed-precision", FOUR_BITS)
    config["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": FOUR_BITS, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*down_proj"], "weights": EIGHT_BITS, "format": "int-quantized"},
    }
    format = read_format(reader(config))
    assert format is not None
    weight = torch.randn(SHAPE)
    for module, (kind, scheme) in {
        MODULE: ("pack-quantized", FOUR_BITS),
        "model.layers.0.mlp.down_proj": ("int-quantized", EIGHT_BITS),
    }.items():
        found = made.compressed(kind, scheme)[1](module, weight)
        assert found is not None
        files = Files(found)
        files.tensors = {f"{module}.{name}": tensor for name, tensor in found.tensors.items()}
        assert format.parts(module, SHAPE, files) is not None
        assert torch.allclose(format.open(module, SHAPE, found.tensors).rows(0, 64), found.dense, rtol=1e-6)


def test_estimates_of_memory_know_the_form(tmp_path: Path) -> None:
    folders = {case: pair(tmp_path / case, case).folder for case in ("gptq", "awq") if not (tmp_path / case).mkdir()}
    for case, folder in folders.items():
        config = read_model_config(folder)
        weights = checkpoint_weights(folder, config, CPUDevice(), "auto", "auto", map_embeddings=False)
        weights.head_and_table()
        matrices = 64 * (64 + 32 + 32 + 64 + 3 * 128)
        needed = 2 * 320 * 64 * 2 + int(matrices * (0.625 if case == "gptq" else 0.75))
        check_weights(1, config, "auto", int(1.01 * needed))
        with pytest.raises(StartupError, match="of memory is free"):
            check_weights(1, config, "auto", int(0.99 * needed))
        # Nothing is certain of it before it is read.
        assert least_weight_bytes(folder, "auto", "auto", map_embeddings=True) == 0


def test_all_formats_are_told_apart_by_their_method() -> None:
    assert sorted(FORMATS) == [
        *("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq", "mxfp4", "torchao")
    ]
    assert read_format(ConfigReader({}, "config.json")) is None


def test_a_checkpoint_without_quantised_matrices_is_read_as_it_is(tmp_path: Path) -> None:
    folder = made.quantised_pair(tmp_path, {"quant_method": "fp8"}, lambda module, weight: None, layers=1).folder
    assert open_checkpoint(folder).dtype(Q_WEIGHT) is torch.float16
    assert load_model(folder, device=CPUDevice()).config.weight_forms == ()
