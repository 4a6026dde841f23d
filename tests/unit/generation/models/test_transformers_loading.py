"""Refusals of the fallback and their words; the self-check; code that a folder brings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.model_types import CHUNK, LAYERS, WINDOW, check_ids, tiny_model_type
from factories.models.run_kernels import KERNELS, cpu_device
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ModelConfig, ModelRoute
from penstock.generation.models import indexed_modules, self_check, transformers_fallback
from penstock.generation.models.recording import Recording, record
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.models.transformers_fallback import TransformersModel
from transformers import dynamic_module_utils

FALLBACK = ModelRoute("fallback")
NUMBERS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def written(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def read(folder: Path, **fields: Any) -> ModelConfig:
    return read_model_config(written(folder, **fields))


def load(
    folder: Path, route: ModelRoute = FALLBACK, *, dtype: str = "float32", quantization: str = "auto"
) -> TransformersModel:
    model = load_model(folder, dtype=dtype, quantization=quantization, device=cpu_device(), route=route)
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize(
    ("fields", "flag", "named"),
    [
        ({"model_type": "not-known"}, "MODEL", "unknown here and to transformers .*newer.*--trust-remote-code"),
        ({"model_type": "gpt2", "is_encoder_decoder": True}, "MODEL", "is_encoder_decoder is true"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "MODEL", "is_encoder_decoder is true"),
        ({"model_type": "paligemma"}, "MODEL", "'paligemma' has no causal language model in transformers"),
        ({"model_type": "vit"}, "MODEL", "'vit' has no causal language model in transformers"),
        ({"model_type": "t5"}, "MODEL", "'t5' is an encoder-decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "MODEL", "'bart' is an encoder-decoder"),
        ({"model_type": "rwkv"}, "MODEL", "'rwkv' keep a state of their own in another form"),
        ({"model_type": "xlstm"}, "MODEL", "'xlstm' keep a state of their own in another form"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "--trust-remote-code",
            "brings its own code.*--trust-remote-code runs it",
        ),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}}, "MODEL", "quantization_config"),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_a_model_that_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, fields: dict[str, Any], flag: str, named: str
) -> None:
    written(tmp_path, **fields)
    with pytest.raises(StartupError, match=named) as refused:
        read_model_config(tmp_path)
    assert refused.value.flag == flag
    assert "\n" not in refused.value.message


def test_a_known_type_needs_no_code_of_its_folder(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_gpt2.Own"}}
    assert read(tmp_path, model_type="gpt2", **NUMBERS, **code).route == "fallback"
    assert read(tmp_path, model_type="qwen2", **NUMBERS, num_key_value_heads=2, **code).route == "native"


def test_a_field_that_a_native_family_lacks_takes_the_fallback_unless_a_route_insists(tmp_path: Path) -> None:
    fields = {"model_type": "llama", **NUMBERS, "hidden_act": "gelu"}
    config = read(tmp_path, **fields)
    assert (config.route, config.route_reason) == (
        "fallback", "hidden_act 'gelu' is not supported; supported is silu",
    )  # fmt: skip
    assert read_model_config(tmp_path, FALLBACK).route_reason == ""
    with pytest.raises(StartupError, match=r"config\.json: hidden_act 'gelu' is not supported"):
        read_model_config(tmp_path, ModelRoute("native"))
    # What is wrong, and not only foreign, stays refused.
    with pytest.raises(StartupError, match="rms_norm_eps must be a number above 0"):
        read(tmp_path, model_type="llama", **NUMBERS, rms_norm_eps=0)


def test_what_neither_route_runs_is_refused_with_both_reasons(tmp_path: Path) -> None:
    fields = {"model_type": "llama", **NUMBERS, "hidden_act": "gelu"}
    both = "hidden_act 'gelu' is not supported.*the fallback cannot run it either: .*"
    with pytest.raises(StartupError, match=f"{both}.*quant_method 'hqq' is not supported") as refused:
        read(tmp_path, **fields, quantization_config={"quant_method": "hqq"})
    assert "\n" not in refused.value.message
    # A rotary embedding that transformers does not have either shows while it loads.
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] = {"rope_type": "not-known", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        StartupError, match=r"rope_type 'not-known' is not supported.*the fallback cannot run it either"
    ):
        load(folder, ModelRoute())


def test_other_names_of_fields_are_known(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="gpt2", n_embd=48, n_layer=3, n_head=4, n_positions=99, vocab_size=64)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (48, 3, 4)
    assert config.max_position_embeddings == 99
    assert config.architecture == "GPT2Config"
    config = read(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], eos_token_id=[3, 4], **NUMBERS)
    assert (config.architecture, config.eos_token_ids) == ("GPT2LMHeadModel", (3, 4))


def test_the_context_ends_where_a_rotary_embedding_would_change(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 10000.0}
    fields = {**NUMBERS, "max_position_embeddings": 4096, "original_max_position_embeddings": 512, "pad_token_id": 0}
    for changes, longest in (({}, 4096), ({"rope_parameters": rope}, 512)):
        config = read_model_config(written(tmp_path, model_type="phi3", **fields, **changes), FALLBACK)
        assert config.max_position_embeddings == longest


def test_geometry_is_recorded(tmp_path: Path) -> None:
    found = {}
    for kind in ("gemma2", "llama4_text", "deepseek_v3", "gpt_oss", "qwen2_moe"):
        model = load(tiny_model_type(tmp_path / kind, kind), ModelRoute("fallback", self_check=False))
        found[kind] = model
        assert len(model.calls) == model.config.num_layers == 4
    assert {call.window for call in found["gemma2"].calls} == {WINDOW, None}
    assert {call.softcap for call in found["gemma2"].calls} == {50.0}
    assert {call.chunk for call in found["llama4_text"].calls} == {CHUNK, None}
    assert {(call.key_width, call.value_width) for call in found["deepseek_v3"].calls} == {(16, 12)}
    assert found["deepseek_v3"].config.head_dim == 16
    assert all(call.has_sinks for call in found["gpt_oss"].calls)
    # Its layers slide, and none of them says so to its attention.
    assert WINDOW in {call.window for call in found["qwen2_moe"].calls}


def test_an_encoder_is_told_what_would_make_it_a_decoder(tmp_path: Path) -> None:
    load(tiny_model_type(tmp_path / "decoder", "bert"))
    with pytest.raises(StartupError, match=r"'bert' .* later positions, since config\.json has no is_decoder true"):
        load(tiny_model_type(tmp_path / "encoder", "bert", is_decoder=False))


@pytest.mark.parametrize("kind", ["gpt_neo", "bloom", "mvp"])
def test_the_self_check_looks_at_modules_that_attend_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def wrong(*arguments: Any, **named: Any) -> Recording:
        found = record(*arguments, **named)
        changes = {"window": 5, "slopes": None}
        return replace(found, calls=tuple(replace(call, **changes) for call in found.calls))

    folder = tiny_model_type(tmp_path, kind)
    model = load(folder)
    assert {call.window for call in model.calls} == ({None, WINDOW} if kind == "gpt_neo" else {None})
    assert all((call.slopes is not None) == (kind == "bloom") for call in model.calls)
    monkeypatch.setattr(self_check, "record", wrong)
    with pytest.raises(StartupError, match=f"self-check of model_type '{kind}' failed: layer 0 differs"):
        load(folder)


@pytest.mark.parametrize("kind", ["gemma2", "llama4_text"])
def test_the_self_check_names_the_first_layer_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def wrong(*arguments: Any, **named: Any) -> Recording:
        found = record(*arguments, **named)
        # Its first layer with a window or chunks is 0.
        return replace(found, calls=tuple(replace(call, window=None, chunk=None) for call in found.calls))

    folder = tiny_model_type(tmp_path, kind)
    load(folder)
    monkeypatch.setattr(self_check, "record", wrong)
    with pytest.raises(StartupError, match=f"self-check of model_type '{kind}' failed: layer 0 differs"):
        load(folder)
    load(folder, replace(FALLBACK, self_check=False))


def test_a_model_that_makes_much_of_a_rounding_is_judged_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many layers with sharp attention: after some of them another rounding is another answer."""
    layers = 24
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    changes = {"num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": 4}
    folder = tiny_model_type(tmp_path, "gemma4_text", dtype=torch.bfloat16, **changes)
    load(folder, dtype="bfloat16")
    load(folder, dtype="bfloat16", quantization="int8")

    def wrong(*arguments: Any, **named: Any) -> Recording:
        found = record(*arguments, **named)
        return replace(found, calls=tuple(replace(call, window=None) for call in found.calls))

    monkeypatch.setattr(self_check, "record", wrong)
    with pytest.raises(StartupError, match="self-check of model_type 'gemma4_text' failed: layer 0 differs"):
        load(folder, dtype="bfloat16")


def test_the_self_check_cuts_a_window_that_only_modules_know(tmp_path: Path) -> None:
    # Longer than a third of the check's tokens.
    model = load(tiny_model_type(tmp_path, "doge", sliding_window=30))
    assert {call.window for call in model.calls} == {30}


def test_layers_with_other_heads_start(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    model = load(tiny_model_type(tmp_path, "step3p7", layer_types=kinds, num_sliding_attention_heads=6))
    assert [call.num_heads for call in model.calls] == [4, 6, 4, 6]
    assert model.config.num_heads == 6


def test_the_self_check_looks_at_the_positions_that_an_indexer_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than the check has tokens.
    folder = tiny_model_type(tmp_path, "axk2", index_topk=64)
    model = load(folder)
    assert model.config.index is not None
    assert (model.config.index.most, model.config.index.num_layers) == (64, model.config.num_layers)
    assert "indexer" in model.unsupported["output.output_attentions"]
    monkeypatch.setattr(indexed_modules, "_plan", lambda *_: [])
    with pytest.raises(StartupError, match="self-check of model_type 'axk2' failed: layer 0 differs"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("qwen4_exp_text", {}, "it makes attention masks by itself"),
        (
            "minimax_m3_vl_text",
            {"layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2)},
            "its attention takes block_indices",
        ),
    ],
)
def test_indexers_that_do_not_choose_single_positions_are_refused(
    tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str
) -> None:
    tiny_model_type(tmp_path, model_type, **fields)
    with pytest.raises(StartupError, match=reason) as refused:
        load(tmp_path)
    assert refused.value.flag == "MODEL"


@pytest.mark.parametrize("floor_scale", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_llama_4_scales_its_queries_by_the_positions_of_each_sequence(tmp_path: Path, floor_scale: int) -> None:
    """Modules take positions from a cache's length: rows of a step have those of their own sequences."""
    folder = tiny_model_type(tmp_path, "llama4_text", floor_scale=floor_scale, attn_scale=0.8)
    check_ids(folder, load(folder))


def test_the_self_check_goes_past_the_length_from_which_on_scores_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_type(tmp_path, "llama4_text", attn_scale=0.8)
    model = load(folder)
    assert {module.floor_scale for module in model.causal.modules() if hasattr(module, "floor_scale")} == {8192}
    monkeypatch.setattr(transformers_fallback, "give_positions", lambda _: None)
    with pytest.raises(StartupError, match="self-check of model_type 'llama4_text' failed: layer 1 differs"):
        load(folder)


@pytest.mark.parametrize("kind", ["ministral3", "llama4_text"])
def test_every_length_is_cut_and_put_back(tmp_path: Path, kind: str) -> None:
    causal = load(tiny_model_type(tmp_path, kind), replace(FALLBACK, self_check=False)).causal

    def lengths() -> set[float]:
        rope = causal.config.rope_parameters
        found = {rope[self_check._ROPE_LENGTH]} if self_check._ROPE_SCALING in rope else set()
        return found | {module.floor_scale for module in causal.modules() if hasattr(module, "floor_scale")}

    (usual,) = lengths()
    assert usual > 1000
    with self_check._small_sizes(causal, 16):
        assert lengths() == {16}
    assert lengths() == {usual}


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight \(1 tensors\)"):
        load(folder)


def test_code_of_a_folder_runs_by_its_flag_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    values = json.loads((folder / "config.json").read_text())
    values["model_type"] = "penstock-own"
    values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'penstock-own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(StartupError, match="--trust-remote-code"):
        load(folder, ModelRoute())
    model = load(folder, ModelRoute(trust_remote_code=True))
    assert type(model.causal).__name__ == "OwnForCausalLM"
    assert not (tmp_path / "model" / "modules").exists()


def test_linear_layers_are_those_of_the_device(tmp_path: Path) -> None:
    model = load(tiny_model_type(tmp_path, "cohere"))
    kinds = [type(module).__name__ for module in model.causal.modules()]
    # Of four layers with seven each, and the head.
    assert kinds.count("LinearModule") == 4 * 7 + 1
    assert "Linear" not in kinds


def test_transposed_linear_layers_are_those_of_the_device(tmp_path: Path) -> None:
    model = load(tiny_model_type(tmp_path, "gpt2"))
    kinds = [type(module).__name__ for module in model.causal.modules()]
    assert kinds.count("LinearModule") == 4 * 4 + 1
    assert "Conv1D" not in kinds


@pytest.mark.parametrize(("quantization", "is_swapped"), [("int8", True), ("none", KERNELS == "native")])
def test_experts_are_those_of_the_device_where_that_gains(tmp_path: Path, quantization: str, is_swapped: bool) -> None:
    folder = tiny_model_type(tmp_path, "mixtral")
    model = load_model(folder, dtype="float32", quantization=quantization, device=cpu_device(), route=FALLBACK)
    assert isinstance(model, TransformersModel)
    kinds = [type(module).__name__ for module in model.causal.modules()]
    assert kinds.count("ExpertModule") == (4 if is_swapped else 0)
    dense = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert (model.num_bytes < 0.6 * dense) == (quantization == "int8")


@pytest.mark.parametrize(("kind", "count"), [("llama", 4 * 2 + 1), ("gemma2", 4 * 4 + 1), ("cohere", 0)])
def test_norms_that_give_the_same_are_those_of_the_device(tmp_path: Path, kind: str, count: int) -> None:
    model = load(tiny_model_type(tmp_path, kind))
    kinds = [type(module).__name__ for module in model.causal.modules()]
    assert kinds.count("NormModule") == count
