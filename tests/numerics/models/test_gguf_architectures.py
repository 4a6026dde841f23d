"""GGUF files of every architecture, as llama.cpp's converter writes them, give the ids of transformers' generate()."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import request, run
from factories.engine.model_engine import model_engine
from factories.models.gguf_converter import convert, round_weights
from factories.models.model_types import VOCAB_SIZE, check_ids, greedy_ids, reference_of, tiny_model_type
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import cpu_device
from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.errors import StartupError
from penstock.common.gguf_architectures import ARCHITECTURES
from penstock.common.gguf_folder import config_of
from penstock.common.gguf_parts import link_parts, read_gguf
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
from penstock.generation.startup.memory_check import stored_weight_bytes
from safetensors.torch import load_file

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
MINISTRAL = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
}
FALCON = {
    "mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.5, "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [1.3, 0.6], "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5, "attention_bias": False,
}  # fmt: skip
# One is longer than a window.
PROMPTS, NEW_TOKENS = ([5, 9, 120, 31, 7], [(37 * place) % (VOCAB_SIZE - 3) + 3 for place in range(41)]), 16
# Architecture, Hugging Face's model type, and its fields.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama", "mixtral", {"sliding_window": None}),
    ("qwen2", "qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}),
    ("qwen3", "qwen3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4, "attention_bias": False}),
    ("gemma2", "gemma2", {"attention_bias": False, "tie_word_embeddings": True}),
    ("gemma3", "gemma3_text", {"attention_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 7,
                               "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}),
    ("phi3", "phi3", {"sliding_window": None}),
    ("phi3", "phi3", {"sliding_window": 12, "rope_parameters": LONGROPE}),
    ("qwen2moe", "qwen2_moe", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}),
    ("qwen3moe", "qwen3_moe", {"use_sliding_window": False, "norm_topk_prob": True, "attention_bias": False}),
    ("gpt-oss", "gpt_oss", {}),
    ("mistral3", "mistral", {"sliding_window": None}),
    ("mistral3", "ministral3", {"sliding_window": None, "rope_parameters": MINISTRAL}),
    ("glm4", "glm4", {}),
    ("granite", "granite", {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.4,
                            "logits_scaling": 3.0}),
    ("olmo2", "olmo2", {}),
    ("olmo2", "olmo3", {}),
    ("command-r", "cohere", {"tie_word_embeddings": True, "logit_scale": 0.2}),
    ("command-r", "cohere", {"tie_word_embeddings": True, "logit_scale": 0.2, "use_qk_norm": True}),
    ("cohere2", "cohere2", {"tie_word_embeddings": True, "logit_scale": 0.2, "attention_bias": False,
                             "layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    ("smollm3", "smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 1, 1, 0]}),
    ("gemma4", "gemma4_text", {"attention_bias": False, "tie_word_embeddings": True, "final_logit_softcapping": 5.0,
                               "num_experts": None}),
    ("gemma4", "gemma4_text", {"attention_bias": False, "tie_word_embeddings": True, "enable_moe_block": True,
                               "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    ("qwen35", "qwen3_5_text", DELTA),
    ("qwen35moe", "qwen3_5_moe_text", DELTA),
    ("lfm2", "lfm2", {}),
    ("falcon-h1", "falcon_h1", FALCON),
    ("deepseek2", "deepseek_v2", {"attention_bias": False, "mlp_bias": False, "q_lora_rank": None}),
    ("deepseek2", "deepseek_v3", {"attention_bias": False}),
]  # fmt: skip


def model_folder(path: Path) -> Path:
    """The folder that a start makes of a file, without its tokenizer."""
    folder = path.parent / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(read_gguf(path))))
    link_parts(path, folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "model_type", "fields"), [pytest.param(*case, id="-".join(case[:2])) for case in CASES]
)
def test_a_file_gives_the_ids_of_generate(
    tmp_path: Path, architecture: str, model_type: str, fields: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    source = tiny_model_type(tmp_path / "source", model_type, **fields)
    # Factors of the converter would be rounded with them.
    quantised = architecture != "falcon-h1"
    if quantised:
        round_weights(source)
    folder = model_folder(convert(source, tmp_path / "tiny.gguf", architecture, quantised=quantised))
    model = load_model(folder, dtype="float32", quantization="none", device=cpu_device())
    # What an engine does with such a model is seen by those of its Hugging Face folder; a file's tensors may differ.
    reference = reference_of(source)
    for prompt in PROMPTS:
        answer = run(model_engine(model), request(prompt, request_id="0", max_new_tokens=NEW_TOKENS))["0"]
        assert answer.ids == {0: greedy_ids(reference, prompt, NEW_TOKENS)}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("architecture", "model_type", "fields"),
    [("gpt-oss", "gpt_oss", {}), ("qwen3moe", "qwen3_moe", {"use_sliding_window": False, "attention_bias": False})],
)
def test_experts_stay_in_their_blocks(
    tmp_path: Path, architecture: str, model_type: str, fields: dict[str, Any]
) -> None:
    """Stacked with gate and value in turns, or one by one."""
    use_native()
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    source = tiny_model_type(tmp_path / "source", model_type, **fields)
    folder = model_folder(convert(source, tmp_path / "tiny.gguf", architecture, experts="MXFP4"))

    def logits(**options: Any) -> tuple[torch.Tensor, dict[str, int]]:
        loaded = load_model(folder, dtype="float32", device=device, **options)
        sequence = PagedSequence(list(range(5, 35)))
        PagedDriver(loaded, num_blocks=8, block_size=8).step([(sequence, 30)])
        return torch.stack(sequence.logits), dict(loaded.config.weight_forms)

    exact, dense = logits(quantization="none")
    found, forms = logits()
    assert set(dense) == {"float32"}
    # A router is exact.
    assert set(forms) == {"q8_0", "mxfp4", "float32"}
    # Down of each of four experts in four layers; gate and up are one tensor, or two.
    assert forms["mxfp4"] == 4 * 4 * (2 if architecture == "gpt-oss" else 3)
    # Activations are a byte each, and some change the choice of experts; in a wrong order it would be near 1.
    assert float((found - exact).abs().mean() / exact.std()) < 0.2


def test_every_architecture_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(ARCHITECTURES)
    # And every model type of a row, with its variants.
    rows = [row for one in ARCHITECTURES.values() for row in (one, *(other for _, other in one.variants))]
    assert {case[1] for case in CASES} == {row.model_type for row in rows}


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes", "named"),
    [
        ("qwen3", "qwen3", {"attention.sliding_window": 16}, "has qwen3.attention.sliding_window"),
        ("qwen3", "qwen3", {"nextn_predict_layers": 1}, "has qwen3.nextn_predict_layers"),
        ("qwen3", "qwen3", {"attention.value_length": 8}, "has qwen3.attention.value_length 8"),
        ("qwen3", "qwen3", {"attention.causal": False}, "has qwen3.attention.causal false"),
        ("gemma2", "gemma2", {"attention.sliding_window": None}, "has no gemma2.attention.sliding_window"),
        ("qwen2moe", "qwen2_moe", {"expert_used_count": None}, "has no qwen2moe.expert_used_count"),
        ("deepseek2", "deepseek_v2", {"rope.dimension_count": None}, "has no deepseek2.rope.dimension_count"),
        ("lfm2", "lfm2", {"attention.head_count_kv": [1, 0]}, "has lfm2.attention.head_count_kv of 2 entries"),
    ],
)
def test_a_fact_that_is_not_read_is_named(
    tmp_path: Path, architecture: str, model_type: str, changes: dict[str, Any], named: str
) -> None:
    source = tiny_model_type(tmp_path / "source", model_type)
    path = convert(source, tmp_path / "tiny.gguf", architecture, changes=changes)
    with pytest.raises(StartupError) as refused:
        config_of(read_gguf(path))
    assert named in refused.value.message


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and the first of its three files, alone in their folder."""
    where = tmp_path_factory.mktemp("parts")
    source = tiny_model_type(where / "source", "llama")
    round_weights(source)
    (where / "split").mkdir()
    return source, convert(source, where / "split" / "tiny.gguf", "llama", parts=3)


def test_a_split_model_is_found_by_its_folder_and_by_its_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[Path, Path]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, first = parts
    assert len(list(first.parent.iterdir())) == 3
    folder = resolve_model(str(first))
    assert resolve_model(str(first.parent), allow_hub=False) == folder
    assert model_name(first) == "tiny"
    assert stored_weight_bytes(folder) == sum(part.stat().st_size for part in first.parent.iterdir())
    check_ids(source, load_model(folder, dtype="float32", quantization="none", device=cpu_device()), new_tokens=8)


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    names = [path.name for path in sorted(parts[1].parent.iterdir())]

    def refusal(number: int) -> str:
        with pytest.raises(StartupError) as refused:
            read_gguf(tmp_path / names[number])
        return refused.value.message

    for name in names[:2]:
        shutil.copy(parts[1].parent / name, tmp_path)
    assert f"is part 1 of 3, and {names[2]} is not beside it" in refusal(0)
    assert f"is part 2 of 3: give the first, {names[0]}" in refusal(1)
    shutil.copy(tmp_path / names[1], tmp_path / names[2])
    assert "is not part 3 of 3" in refusal(0)
    shutil.copy(parts[1].parent / names[2], tmp_path)
    assert len(read_gguf(tmp_path / names[0]).tensors) == len(load_file(parts[0] / "model.safetensors"))
    (tmp_path / names[0]).rename(tmp_path / "other.gguf")
    with pytest.raises(StartupError, match="they are found by their names"):
        read_gguf(tmp_path / "other.gguf")
