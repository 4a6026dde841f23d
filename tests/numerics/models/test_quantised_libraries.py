"""Checkpoints that the libraries themselves make: logits against the library's own dequantised reference.

Each needs its library, which no service does: `pip install --target FOLDER --no-deps …`, and FOLDER on PYTHONPATH. The
last real run is in dev/log/quantised.md.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from factories.models.checkpoints import reference_model, tiny_checkpoint
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.quantised import grouped, words
from penstock.common.checkpoint import resolve_model
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.quantisers
PROMPT = list(range(5, 45))
# Mean error of a logit in standard deviations of the logits: of rounding, and of activations in int8.
EXACT, WHOLE = 2e-3, 0.06


def base(folder: Path, family: str = "qwen2") -> Path:
    return tiny_checkpoint(folder / "base", family, hidden_size=128, intermediate_size=256)


def logits(model: CausalLM) -> Tensor:
    sequence = PagedSequence(list(PROMPT))
    PagedDriver(model, num_blocks=16, block_size=8).step([(sequence, len(PROMPT))])
    return torch.stack(sequence.logits)


def expected(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].float()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().mean() / exact.std())


def check(folder: Path, reference: Tensor, form: str, count: int = 14) -> None:
    """Compare the model with every number, and as it is served."""
    dense = logits(load_model(folder, dtype="float32", quantization="none", device=CPUDevice()))
    kept = load_model(folder, dtype="float32", device=CPUDevice())
    figures = error(dense, reference), error(logits(kept), reference)
    print(f"{kept.config.checkpoint_format}: {figures[0]:.1e} with every number, {figures[1]:.1e} as {form}")
    assert dict(kept.config.weight_forms)[form] == count
    assert figures[0] <= EXACT
    assert figures[1] <= (EXACT if form == "float32" else WHOLE)


def dense_reference(folder: Path, source: Path, weights: dict[str, Tensor]) -> Tensor:
    """Logits of transformers with these weights, which a library dequantised."""
    tensors = load_file(source / "model.safetensors")
    assert weights.keys() <= tensors.keys()
    folder.mkdir()
    save_file({**tensors, **weights}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return expected(reference_model(folder).float())


AO = ["Int8WeightOnly", "Int8DynamicActivationInt8Weight", "Float8WeightOnly", "IntxWeightOnly"]


@pytest.mark.parametrize("name", AO)
def test_torchao(tmp_path: Path, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    options: dict[str, Any] = {}
    if name == "IntxWeightOnly":
        options = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}
    config = TorchAoConfig(getattr(quantization, f"{name}Config")(**options))
    source = base(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
    folder = tmp_path / "quantised"
    model.save_pretrained(folder)
    weights = {
        f"{module}.weight": one.weight.dequantize().float()
        for module, one in model.named_modules()
        if hasattr(getattr(one, "weight", None), "dequantize") and type(one.weight).__name__.endswith("Tensor")
    }
    weights = {
        module: value.detach().clone() for module, value in weights.items() if "layers" in module and "proj" in module
    }
    assert len(weights) == 14
    form = {"Float8WeightOnly": "float32", "IntxWeightOnly": "int4"}.get(name, "int8")
    check(folder, dense_reference(tmp_path / "dense", source, weights), form)


SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None, "int4"),
    "W4A16-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
        "int4-asymmetric",
    ),
    "W8A8": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token", "dynamic": True},
        "int8",
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        "float32",
    ),
    "MXFP4A16": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
        None,
        "float32",
    ),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None, "float32"),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None, "float32"),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        None,
        "float32",
    ),
}


@pytest.mark.parametrize("name", list(SCHEMES))
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kind, weight_args, input_args, form = SCHEMES[name]
    args = QuantizationArgs(**weight_args)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=input_args and QuantizationArgs(**input_args)
    )
    compressor = BaseCompressor.load_from_registry(kind)
    source = base(tmp_path)
    stored: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for tensor, value in load_file(source / "model.safetensors").items():
        if "proj.weight" not in tensor:
            stored[tensor] = value
            continue
        module = tensor.removesuffix(".weight")
        low, high = _extremes(value, args)
        whole = (
            {"weight_global_scale": generate_gparam(low.amin(), high.amax())} if args.strategy == "tensor_group" else {}
        )
        scale, zero = calculate_qparams(low, high, args, global_scale=whole.get("weight_global_scale"))
        state = {"weight": value, "weight_scale": scale, "weight_zero_point": zero, **whole}
        packed = compressor.compress(dict(state), scheme)
        stored |= {f"{module}.{key}": one.contiguous().clone() for key, one in packed.items()}
        means = _nvfp4_numbers(packed, args) if whole else compressor.decompress(dict(packed), scheme)["weight"]
        weights[tensor] = means.float()
    assert quantize is not None
    folder = tmp_path / "quantised"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    (folder / "config.json").write_text(json.dumps(config))
    check(folder, dense_reference(tmp_path / "dense", source, weights), form)


def _nvfp4_numbers(packed: dict[str, Tensor], args: Any) -> Tensor:
    """Return what `decompress` does, in float32: it rounds its numbers to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes = packed["weight_packed"]
    numbers = unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], dtype=torch.float32)
    scale, whole = packed["weight_scale"].float(), packed["weight_global_scale"]
    return dequantize(x_q=numbers, scale=scale, args=args, global_scale=whole, dtype=torch.float32)


def _extremes(value: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Least and largest number of each part that has a scale."""
    if args.strategy == "tensor":
        return value.amin().view(1), value.amax().view(1)
    if args.strategy == "channel":
        return value.amin(1, keepdim=True), value.amax(1, keepdim=True)
    if args.strategy in ("group", "tensor_group"):
        parts = value.unflatten(1, (-1, args.group_size))
        return parts.amin(2), parts.amax(2)
    rows, columns = args.block_structure
    parts = value.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return parts.amin((1, 3)), parts.amax((1, 3))


@pytest.mark.parametrize("kind", ["int8", "nf4", "nf4-nested", "fp4"])
def test_bitsandbytes(tmp_path: Path, kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind[:3],
            bnb_4bit_use_double_quant=kind.endswith("nested"),
            bnb_4bit_compute_dtype=torch.float32,
        )
    source = base(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    folder = tmp_path / "quantised"
    model.save_pretrained(folder)
    weights = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            weights[f"{name}.weight"] = functional.dequantize_4bit(
                module.weight.data, module.weight.quant_state
            ).float()
        elif type(module).__name__ == "Linear8bitLt":
            scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            weights[f"{name}.weight"] = module.weight.data.float() * (scale.float() / 127)[:, None]
    weights = {name: value.reshape(-1).view(_shape(source, name)).clone() for name, value in weights.items()}
    check(folder, dense_reference(tmp_path / "dense", source, weights), "int8" if kind == "int8" else "float32")


def _shape(source: Path, name: str) -> torch.Size:
    return load_file(source / "model.safetensors")[name].shape


def gptqmodel_pack() -> Any:
    """Return GPTQModel's own function that packs a layer. The package itself has extensions to compile: its source is
    enough, unpacked, with its folder on PYTHONPATH."""
    spec = importlib.util.find_spec("gptqmodel")
    if spec is None or spec.origin is None:
        pytest.skip("the source of gptqmodel is not there")
    path = Path(spec.origin).parent / "nn_modules" / "qlinear" / "__init__.py"
    tree = ast.parse(path.read_text())
    function = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "pack_original")
    limits = types.SimpleNamespace(threadpool_limits=contextlib.nullcontext)
    names = {"t": torch, "np": np, "nn": torch.nn, "math": math, "transformers": transformers, "THREADPOOLCTL": limits}
    names |= {"_ConvNd": torch.nn.Conv2d}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names["pack_original"]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (3, False), (2, False)])
def test_gptq(tmp_path: Path, bits: int, symmetric: bool, version: str) -> None:
    pack = gptqmodel_pack()
    source = base(tmp_path)
    stored: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for tensor, value in load_file(source / "model.safetensors").items():
        if "proj.weight" not in tensor:
            stored[tensor] = value
            continue
        found = grouped(value, bits, 32, symmetric=symmetric)
        linear = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
        linear.weight.data = found.dense
        made = torch.nn.Module()
        made.bits, made.maxq, made.planar = bits, 2**bits - 1, False
        made.pack_dtype_bits, made.pack_factor = 32, 32 // bits
        made.pack_np_math_dtype, made.pack_np_dtype = np.uint32, np.int32
        pack(made, linear, found.scale.float(), found.zero.float(), found.group_of_input.int())
        if version == "gptq":
            # As the library does on its way to the first version: in whole words, but for 3 bits.
            ones = sum(1 << shift for shift in range(0, 32, bits))
            made.qzeros = made.qzeros - ones if bits != 3 else words(found.zero.T - 1, 3)
        module = tensor.removesuffix(".weight")
        names = ("qweight", "qzeros", "scales", "g_idx")
        stored |= {f"{module}.{name}": getattr(made, name).contiguous() for name in names}
        weights[tensor] = found.dense
    folder = tmp_path / "quantised"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "checkpoint_format": version,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    form = "int4" if bits < 4 or symmetric else "int4-asymmetric"
    check(folder, dense_reference(tmp_path / "dense", source, weights), form if bits <= 4 else "float32")


def test_awq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("awq")
    if spec is None:
        pytest.skip("autoawq is not installed")
    # Its own package imports all that training needs.
    package = types.ModuleType("awq")
    package.__path__ = list(spec.submodule_search_locations or ())
    monkeypatch.setitem(sys.modules, "awq", package)
    packing = importlib.import_module("awq.utils.packing_utils")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    source = base(tmp_path)
    stored: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for tensor, value in load_file(source / "model.safetensors").items():
        if "proj.weight" not in tensor:
            stored[tensor] = value.half()
            continue
        module = tensor.removesuffix(".weight")
        parts = value.unflatten(1, (-1, 32))
        low, high = parts.amin(2), parts.amax(2)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        linear = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
        linear.weight.data = value.half()
        made = gemm.WQLinear_GEMM.from_linear(linear, 4, 32, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        stored |= {f"{module}.{name}": getattr(made, name).clone() for name in ("qweight", "qzeros", "scales")}
        dense = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, 32)
        weights[tensor] = dense.T.float().contiguous()
    folder = tmp_path / "quantised"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    check(folder, dense_reference(tmp_path / "dense", source, weights), "int4-asymmetric")


def test_fp8_of_transformers(tmp_path: Path) -> None:
    """Made by transformers' own quantiser of fine-grained fp8."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Settings:
        weight_block_size = (64, 64)
        scale_fmt = "float"

    class Quantiser:
        quantization_config = Settings()
        pre_quantized = False

    source = base(tmp_path)
    stored: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for tensor, value in load_file(source / "model.safetensors").items():
        if "proj.weight" not in tensor:
            stored[tensor] = value
            continue
        made = Fp8Quantize(Quantiser()).convert({tensor: value})
        stored |= made
        scales = made[f"{tensor}_scale_inv"]
        weights[tensor] = Fp8Dequantize(Quantiser())._dequantize_one(made[tensor], scales, torch.float32)
    folder = tmp_path / "quantised"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    (folder / "config.json").write_text(json.dumps(config))
    check(folder, dense_reference(tmp_path / "dense", source, weights), "float32")


@pytest.mark.parametrize("most_bits", [None, 5.5])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_what_quantize_writes_is_read_by_compressed_tensors(
    tmp_path: Path, has_zeros: bool, most_bits: float | None
) -> None:
    """transformers with the package compressed-tensors, as vLLM reads these folders with it."""
    pytest.importorskip("compressed_tensors")
    from factories.models.byte_tokenizer import save_byte_tokenizer
    from penstock.generation.quantise.quantiser import QuantiseSettings, quantise

    source = base(tmp_path, "llama")
    save_byte_tokenizer(source)
    folder = tmp_path / "quantised"
    quantise(source, folder, QuantiseSettings(32, has_zeros, tokens=640, context=64, most_bits=most_bits))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == (1 if most_bits is None else 2)
    # The library gives its numbers in the scales' dtype, bfloat16.
    dense = logits(load_model(folder, dtype="float32", quantization="none", device=CPUDevice()))
    if has_zeros and most_bits is not None:
        # transformers 5.24 knows one form of dense layers where it dequantises.
        weights = by_compressed_tensors(folder, config)
        assert error(dense, dense_reference(tmp_path / "dense", source, weights)) < 0.02
        return
    # Without it compressed-tensors 0.20.1 expects zeros that are not packed, on any file with zeros.
    settings = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if has_zeros else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    assert error(dense, expected(model.eval())) < 0.02


def by_compressed_tensors(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of the modules that a folder's groups name, as the library's own compressor dequantises them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = {name: value for file in folder.glob("model-*.safetensors") for name, value in load_file(file).items()}
    parsed = QuantizationConfig.model_validate({key: config[key] for key in ("config_groups", "format", "ignore")})
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    found = {}
    for scheme in parsed.config_groups.values():
        for module in scheme.targets:
            parts = {name[len(module) + 1 :]: stored[name] for name in stored if name.startswith(f"{module}.")}
            found[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"].contiguous()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Written by the library's writer with its quantisers, read back by transformers through the library's reader."""
    library = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = base(tmp_path, family)
    path = tmp_path / "tiny.gguf"
    _write(library, path, source, family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    reference = expected(model.eval())
    folder = resolve_model(str(path))
    check(folder, reference, "int4", count=8)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_blocks(kind: str) -> None:
    library = pytest.importorskip("gguf")
    from penstock.common.gguf_file import TYPES
    from penstock.generation.weights.quantised.gguf import _NUMBERS

    number = library.GGMLQuantizationType[kind]
    stored = TYPES[int(number)]
    random = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (64, stored.num_bytes), dtype=torch.uint8, generator=random)
    found = _NUMBERS[kind](blocks).reshape(64, -1)
    exact = torch.from_numpy(library.dequantize(blocks.numpy(), number))
    assert (stored.numbers, stored.num_bytes) == library.GGML_QUANT_SIZES[number]
    assert torch.allclose(found, exact, rtol=1e-5, atol=1e-5, equal_nan=True)


def _write(library: Any, path: Path, source: Path, family: str) -> None:
    config = json.loads((source / "config.json").read_text())
    writer = library.GGUFWriter(path, family)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(320)
    writer.add_rope_dimension_count(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(320)])
    kinds = library.GGMLQuantizationType
    names = library.get_tensor_name_map(library.MODEL_ARCH[family.upper()], 2)
    for name, value in load_file(source / "model.safetensors").items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        data = value.float()
        heads = {"q": 4, "k": 2}.get(name.split("_proj")[0][-1]) if family == "llama" and "self_attn" in name else None
        if heads is not None:
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        array = data.numpy()
        kind = kinds.F32
        if value.dim() == 2:
            # Several types, as real files have them; two layers, seven matrices each.
            kind = kinds.Q8_0 if "down" in name or "embed" in name else kinds.Q5_0 if "up" in name else kinds.Q4_0
            kind = kinds.Q4_1 if "gate" in name else kinds.F16 if "lm_head" in name else kind
        writer.add_tensor(ours, library.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
