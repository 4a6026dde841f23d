"""Quantised checkpoints mean the numbers that their format documents, and run in the form that is promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models import quantised as made
from factories.models.emulated_npu import EmulatedNPU
from factories.models.native import use_native
from factories.models.packed import use_packing
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.quantised import CASES, FOUR_BITS
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.pack import pack
from safetensors.torch import load_file, save_file

PROMPT = list(range(5, 45))
# Mean error of a logit in standard deviations of the logits. Of activations in int8: a scale a row, or a group of 32.
WORST = {"int8": 0.06, "int4": 0.03, "int4-asymmetric": 0.03, "float32": 1e-5}
# Without the kernels int4 has scales in bfloat16, and x too.
WORST_TORCH = {**WORST, "int4": 0.04, "int4-asymmetric": 0.04}


class _NativeCPU(CPUDevice):
    """The CPU with the kernels that the test loaded."""

    def __init__(self) -> None:
        super().__init__()
        use_native()
        self.instruction_set = torch.ops.penstock.instruction_set("")


def logits(model: CausalLM) -> torch.Tensor:
    sequence = PagedSequence(list(PROMPT))
    PagedDriver(model, num_blocks=16, block_size=8).step([(sequence, len(PROMPT))])
    return torch.stack(sequence.logits)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).abs().mean() / exact.std())


def load(folder: Path, device: type[CPUDevice] = CPUDevice, **options: Any) -> CausalLM:
    return load_model(folder, device=device(), **{"dtype": "float32", **options})


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "case", ["gptq", "gptq-asymmetric", "awq", "w8a8", "nvfp4", "fp8-blocks", "nf4-nested", "torchao-int8"]
)
def test_logits_are_those_of_the_numbers_that_it_means(tmp_path: Path, case: str) -> None:
    (config, quantise), form = CASES[case]
    pair = made.quantised_pair(tmp_path, config, quantise, layers=1)
    exact = logits(load(pair.dense))
    plain = load(pair.folder, quantization="none")
    assert error(logits(plain), exact) <= WORST["float32"]
    assert plain.config.weight_forms == (("float32", 7),)
    kept = load(pair.folder)
    assert kept.config.weight_forms == ((form, 7),)
    assert error(logits(kept), exact) <= WORST_TORCH[form]
    assert str(config["quant_method"]) in kept.config.checkpoint_format


@pytest.mark.thinned(6)
@pytest.mark.parametrize("case", CASES)
def test_the_fallback_computes_with_the_same_numbers(tmp_path: Path, case: str) -> None:
    (config, quantise), _ = CASES[case]
    pair = made.quantised_pair(tmp_path, config, quantise, layers=1)
    route = ModelRoute(route="fallback")
    model = load(pair.folder, route=route)
    assert error(logits(model), logits(load(pair.dense))) <= WORST["float32"]
    assert model.config.weight_forms == (("float32", 7),)
    assert model.config.checkpoint_format == load(pair.folder).config.checkpoint_format
    assert load(pair.folder, route=route, quantization="int8").config.weight_forms == (("int8", 7),)


def test_the_fallback_names_a_quantised_matrix_that_is_no_linear_layer(tmp_path: Path) -> None:
    (config, quantise), _ = CASES["gptq"]
    pair = made.quantised_pair(tmp_path, config, quantise, layers=1, family="qwen3_moe")
    with pytest.raises(StartupError, match="experts") as raised:
        load(pair.folder, route=ModelRoute(route="fallback"))
    assert raised.value.flag == "MODEL"


@pytest.mark.thinned(2)
@pytest.mark.kernels
@pytest.mark.parametrize("family", ["phi3", "glm4", "gemma2", "qwen3_moe", "olmo2"])
@pytest.mark.parametrize("case", ["gptq", "w8a8", "awq"])
def test_every_order_and_gate_of_a_family_holds_for_whole_numbers(tmp_path: Path, family: str, case: str) -> None:
    """Rows of q and k in another order, other gates, experts: as whole numbers and as the numbers that they mean."""
    (config, quantise), form = CASES[case]
    pair = made.quantised_pair(tmp_path, config, quantise, family=family, layers=2)
    exact = logits(load(pair.dense))
    assert error(logits(load(pair.folder, quantization="none")), exact) <= WORST["float32"]
    kept = load(pair.folder)
    assert {name for name, _ in kept.config.weight_forms} == {form}
    # A little noise sends a row to other experts. Rows in a wrong order are off by more than a deviation.
    worst = WORST_TORCH[form] * (2 if family == "qwen3_moe" else 1)
    assert error(logits(kept), exact) <= worst
    native = load(pair.folder, _NativeCPU)
    assert native.config.weight_forms == kept.config.weight_forms
    assert error(logits(native), exact) <= worst


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_blocks_of_float8_hold_where_keys_and_values_are_compressed(tmp_path: Path, family: str) -> None:
    """As DeepSeek publishes them: the rows of a token and of a query are no whole blocks, and are in another order."""
    (config, quantise), form = CASES["fp8-blocks"]
    pair = made.quantised_pair(tmp_path, config, quantise, family=family, layers=2)
    model = load(pair.folder)
    assert {name for name, _ in model.config.weight_forms} == {form}
    assert error(logits(model), logits(load(pair.dense))) <= WORST["float32"]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "form"), [("gptq-8", "q8_0"), ("mxfp4", "mxfp4")])
def test_a_scale_for_each_32_inputs_runs_in_blocks(tmp_path: Path, case: str, form: str, dtype: str) -> None:
    """Eight bits, or 4-bit floats, which int8's and int4's products have not: as GGUF's blocks, at their size."""
    (config, quantise), _ = CASES[case]
    pair = made.quantised_pair(tmp_path, config, quantise)
    exact = logits(load(pair.dense))
    model = load(pair.folder, _NativeCPU, dtype=dtype)
    assert model.config.weight_forms == ((form, 14),)
    assert model.can_draw
    assert error(logits(model), exact) <= WORST["int4"] + (0 if dtype == "float32" else 0.03)
    assert load(pair.folder, _NativeCPU, quantization="none").config.weight_forms == (("float32", 14),)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("gptq", "float32"),
        ("w8a8", "bfloat16"),
        ("gptq-3", "bfloat16"),
        ("awq", "float32"),
        ("gptq-asymmetric-64", "bfloat16"),
    ],
)
def test_the_kernels_have_the_same_whole_numbers(tmp_path: Path, case: str, dtype: str) -> None:
    (config, quantise), form = CASES[case]
    pair = made.quantised_pair(tmp_path, config, quantise)
    exact = logits(load(pair.dense))
    model = load(pair.folder, _NativeCPU, dtype=dtype)
    assert model.config.weight_forms == ((form, 14),)
    # All layers in one call.
    assert model.can_draw
    assert error(logits(model), exact) <= WORST[form] + (0 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("case", ["gptq", "gptq-asymmetric-64", "awq", "w8a8"])
def test_an_npus_products_have_the_same_whole_numbers(tmp_path: Path, case: str) -> None:
    (config, quantise), form = CASES[case]
    pair = made.quantised_pair(tmp_path, config, quantise)
    device = EmulatedNPU()
    device.start(num_threads=1)
    model = load_model(pair.folder, device=device, dtype="bfloat16")
    assert model.config.weight_forms == ((form, 14),)
    assert error(logits(model), logits(load(pair.dense))) <= WORST[form] + 0.03


def test_float16_checkpoints_run_in_bfloat16_where_whole_numbers_are_kept(tmp_path: Path) -> None:
    pair = made.quantised_pair(tmp_path, *made.gptq(4, 32))
    assert load(pair.folder, dtype="auto").dtype is torch.bfloat16
    half = load(pair.folder, dtype="float16")
    assert half.config.weight_forms == (("float16", 14),)


def test_shards_may_part_a_matrix(tmp_path: Path) -> None:
    pair = made.quantised_pair(tmp_path, *made.gptq(4, 32, symmetric=False), shards=True)
    assert error(logits(load(pair.folder, quantization="none")), logits(load(pair.dense))) <= WORST["float32"]


@pytest.mark.kernels
def test_modules_that_are_not_converted_stay_as_they_are(tmp_path: Path) -> None:
    ignored = ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj")
    pair = made.quantised_pair(tmp_path, *made.compressed("pack-quantized", FOUR_BITS, ignore=ignored))
    exact = logits(load(pair.dense))
    for device in (CPUDevice, _NativeCPU):
        model = load(pair.folder, device)
        # One of three that are a single product is not quantised, so all three become numbers.
        assert model.config.weight_forms == (("float32", 2), ("int4", 10))
        # All layers in one call, whatever their forms.
        assert model.can_draw == (device is _NativeCPU)
        assert error(logits(model), exact) <= WORST_TORCH["int4"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantization_asked_for_holds_for_all(tmp_path: Path, quantization: str) -> None:
    pair = made.quantised_pair(tmp_path, *made.awq(16), layers=1)
    model = load(pair.folder, quantization=quantization)
    assert model.config.weight_forms == ((quantization, 7),)
    assert torch.equal(logits(model), logits(load(pair.dense, quantization=quantization)))


def test_a_product_of_both_forms_has_zeros_throughout(tmp_path: Path) -> None:
    """One of q, k and v happens to have the zeros of symmetric numbers."""
    config, asymmetric = made.gptq(4, 32, symmetric=False)
    _, symmetric = made.gptq(4, 32)
    pair = made.quantised_pair(
        tmp_path,
        config,
        lambda module, weight: (symmetric if "k_proj" in module or "down" in module else asymmetric)(module, weight),
        layers=1,
    )
    model = load(pair.folder)
    assert model.config.weight_forms == (("int4", 1), ("int4-asymmetric", 6))
    assert error(logits(model), logits(load(pair.dense))) <= WORST_TORCH["int4"]


@pytest.mark.kernels
@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_pack_takes_a_form_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    pair = made.quantised_pair(tmp_path, *CASES[case][0])
    use_packing(monkeypatch)
    with pytest.raises(StartupError, match=rf"{case} of 4 bits.*--quantization int4, int8 or none") as caught:
        pack(pair.folder, tmp_path / "packed")
    assert caught.value.flag == "--quantization"
    pack(pair.folder, tmp_path / "packed", dtype="float32", quantization="int4")
    packed, kept = load(tmp_path / "packed", _NativeCPU), load(pair.folder, _NativeCPU, quantization="int4")
    assert torch.equal(logits(packed), logits(kept))


@pytest.mark.kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_pack_knows_a_head_that_is_whole_numbers_from_one_that_was_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    config, quantise = CASES["w8a8" if quantization == "int8" else "w4a16"][0]
    groups = {"group_0": config["config_groups"]["group_0"]}
    head_config, quantise_head = CASES["w8a8"][0]
    groups["group_1"] = {**head_config["config_groups"]["group_0"], "targets": ["lm_head"], "format": "int-quantized"}
    groups["group_0"] = {**groups["group_0"], "targets": [r"re:model\..*"], "format": config["format"]}
    pair = made.quantised_pair(tmp_path, {**config, "ignore": [], "config_groups": groups}, quantise)
    tensors = load_file(pair.folder / made.WEIGHTS)
    head = quantise_head("lm_head", tensors.pop("lm_head.weight").float())
    assert head is not None
    tensors |= {f"lm_head.{suffix}": tensor.contiguous() for suffix, tensor in head.tensors.items()}
    save_file(tensors, pair.folder / made.WEIGHTS, metadata={"format": "pt"})
    use_packing(monkeypatch)
    pack(pair.folder, tmp_path / "packed", dtype="float32", quantization=quantization)
    kept = load(pair.folder, _NativeCPU, quantization=quantization)
    assert kept._lm_head.quantised_as == "int8"
    assert torch.equal(logits(load(tmp_path / "packed", _NativeCPU)), logits(kept))
