"""`penstock inspect`: facts of tiny checkpoints, and of what does not start here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.draft_heads import DRAFT_VOCAB, eagle3_folder
from factories.models.gguf_converter import convert
from factories.models.model_types import tiny_model_type
from factories.models.native import use_native
from factories.servers.hub import running_hub
from penstock.cli import inspect_model as inspecting
from penstock.cli.inspect_drafts import drafts_line
from penstock.cli.inspect_model import inspect_model, measured_bandwidth, run_inspect
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import StartupError
from penstock.generation.attention.kv_cache import kv_bytes_per_block
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.device_registry import open_device
from penstock.generation.models.registry import load_model
from safetensors.torch import load_file, save_file


def facts_of(folder: Path) -> dict[str, Any]:
    return inspect_model(str(folder), measures=False)


def written(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None = None) -> Path:
    """Write a model of headers: any type, few bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
        save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_figures_are_those_of_the_loaded_model(tmp_path: Path, family: str, quantization: str) -> None:
    folder = tiny_checkpoint(tmp_path, family, hidden_size=64, intermediate_size=128)
    facts = facts_of(folder)
    device = open_device("cpu")
    device.start(num_threads=1, kernels="torch")
    model = load_model(folder, device=device, quantization=quantization, map_embeddings=False)
    assert facts["parameters"] == model.config.num_parameters
    assert facts["starts"], facts["why"]
    config = model.config
    block = kv_bytes_per_block(config.num_layers, 1, config.num_kv_heads, config.head_dim, model.dtype)
    assert facts["kv_bytes_per_token"] == block
    assert facts["context"] == config.max_position_embeddings
    # Scales of small matrices weigh more than the estimate's share.
    assert facts["memory"]["weights_bytes"][quantization] == pytest.approx(model.num_bytes, rel=0.12)


@pytest.mark.kernels
@pytest.mark.parametrize(("architecture", "model_type"), [("qwen2moe", "qwen2_moe"), ("lfm2", "lfm2")])
def test_a_gguf_file_is_described_by_its_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, model_type: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = {"use_sliding_window": False, "layer_types": ["full_attention"] * 4} if architecture == "qwen2moe" else {}
    source = tiny_model_type(tmp_path / "source", model_type, **fields)
    path = convert(source, tmp_path / "tiny.gguf", architecture)
    facts = facts_of(path)
    assert facts["starts"], facts["why"]
    use_native()
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(Path(facts["folder"]), device=device, map_embeddings=False)
    assert facts["parameters"] == model.config.num_parameters
    assert facts["memory"]["weights_bytes"]["none"] == pytest.approx(model.num_bytes, rel=0.12)
    assert set(facts["stored"]["dtypes"]) == {"F32", "Q8_0"}
    assert facts["quantization"] == {"method": "gguf", "bits": None}
    # Transformers' modules run it, and that is said.
    assert ("transformers" in facts["why"]) == (architecture == "lfm2")


def test_the_embedded_model_in_words_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run_inspect(None, {"measure": "false"})
    shown = capsys.readouterr().out
    for text in ("penstock-demo (qwen2, Qwen2ForCausalLM)", "4.2 M", "eos <|im_end|>", "starts here:   yes"):
        assert text in shown
    run_inspect(str(demo_folder()), {"json": "true", "measure": "false"})
    facts = json.loads(capsys.readouterr().out)
    assert (facts["vocab_size"], facts["tokenizer_tokens"], facts["chat_template"]) == (4096, 4096, True)
    assert facts["speed"] is None


def test_speed_is_an_estimate_from_the_bytes_that_a_token_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured_bandwidth(1 << 22, 1) > 0
    monkeypatch.setattr(inspecting, "measured_bandwidth", lambda: 1e6)
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16"}
    tensors = {"model.embed_tokens.weight": (100, 10), "lm_head.weight": (100, 10), "model.norm.weight": (10,)}
    tensors |= {f"model.layers.0.mlp.experts.{index}.up_proj.weight": (50, 10) for index in range(8)}
    folder = written(tmp_path, config, tensors)
    speed = inspect_model(str(folder))["speed"]
    assert speed["read_bytes_per_token"]["none"] == 2 * (1000 + 2 * 500 + 10)
    assert speed["read_bytes_per_token"]["int8"] == 1000 + 2 * 500 + 2 * 10
    assert speed["tokens_per_second"]["none"] == round(1e6 / 4020, 1)
    run_inspect(str(folder), {})
    shown = capsys.readouterr().out
    assert "an estimate" in shown
    assert "2 of 8 a token" in shown


@pytest.mark.parametrize(
    ("config", "why", "helps"),
    [
        (
            {"model_type": "from_tomorrow", "transformers_version": "9.1.0"},
            "model_type 'from_tomorrow' is unknown",
            "transformers>=9.1.0",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "model_type 't5' is an encoder-decoder",
            "transformers itself",
        ),
        ({"model_type": "rwkv", "hidden_size": 64}, "keep a state of their own", "a release of Penstock"),
        (
            {**json.loads((demo_folder() / "config.json").read_text()), "quantization_config": {"quant_method": "hqq"}},
            "quantization_config",
            "--quantization int8 or int4",
        ),
    ],
    ids=["unknown", "encoder-decoder", "known to transformers", "quantised"],
)
def test_what_does_not_start_is_told_with_what_helps(
    tmp_path: Path, config: dict[str, Any], why: str, helps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, config, {"model.layers.0.x.weight": (8, 8)})
    facts = facts_of(folder)
    assert not facts["starts"]
    assert why in facts["why"]
    assert helps in " ".join(facts["advice"])
    run_inspect(str(folder), {"measure": "false"})
    assert "starts here:   no: " in capsys.readouterr().out


LATENT = {"kv_lora_rank": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 2}, 2 * 2 * 2 * 16 * 2),
        ({"layers_block_type": ["mamba", "hybrid", "attention"]}, 2 * 2 * 4 * 16 * 2),
        ({"num_hidden_layers": 9, "full_attention_interval": 4}, 2 * 2 * 4 * 16 * 2),
        ({"model_type": "mamba2"}, None),
        ({"text_config": {"num_key_value_heads": 1, "head_dim": 8}}, 3 * 2 * 1 * 8 * 2),
        ({**LATENT, "model_type": "deepseek_v3"}, 3 * 8 * 2),
        ({**LATENT, "model_type": "deepseek_v32", "index_head_dim": 6}, 3 * (8 + 6) * 2),
        ({**LATENT, "model_type": "glm_moe_dsa", "index_head_dim": 6, "index_topk_pattern": "FSF"}, (24 + 12) * 2),
        (LATENT, 3 * 4 * 20 * 2),
        ({**LATENT, "model_type": "deepseek_v2", "quantization_config": {"quant_method": "gguf"}}, 3 * 4 * 20 * 2),
    ],
    ids=[
        "linear attention",
        "hybrid",
        "every fourth",
        "states",
        "text of several parts",
        "one row",
        "index keys",
        "shared choices",
        "expanded",
        "expanded gguf",
    ],
)
def test_kv_bytes_of_layers_that_have_them(tmp_path: Path, config: dict[str, Any], bytes_per_token: int | None) -> None:
    shape = {
        "model_type": "x",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    folder = written(tmp_path, {**shape, **config}, {"model.layers.0.x.weight": (8, 8)})
    assert facts_of(folder)["kv_bytes_per_token"] == bytes_per_token


def test_int8_leaves_index_keys_as_they_are(tmp_path: Path) -> None:
    facts = facts_of(tiny_checkpoint(tmp_path, "deepseek_v32", index_head_dim=16))
    shown = dict(inspecting._lines(facts))["KV"]
    assert facts["kv_index_bytes_per_token"] == 2 * 16 * 4
    assert shown == "352 B a token; half of 224 B or less with --kv-cache-dtype int8"


def test_layers_that_keep_a_window_are_told_apart(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 4 + ["full_attention"] * 2
    shape = {"num_attention_heads": 4, "hidden_size": 64, "dtype": "bfloat16", "max_position_embeddings": 4096}
    config = {"model_type": "x", "num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 256, **shape}
    facts = facts_of(written(tmp_path, config, {"model.layers.0.x.weight": (8, 8)}))
    each = 2 * 64 * 2
    assert facts["kv_groups"] == [
        {"layers": 2, "window": 0, "chunk": 0, "bytes_per_token": 2 * each},
        {"layers": 4, "window": 256, "chunk": 0, "bytes_per_token": 4 * each},
    ]
    assert facts["memory"]["context_bytes"] == (2 * 4096 + 4 * 256) * each


def test_layers_of_several_sizes_count_with_their_own(tmp_path: Path) -> None:
    """Of five layers of Gemma 4, the last two read the keys of earlier ones; those that see all have heads twice as
    wide."""
    folder = tiny_checkpoint(tmp_path, "gemma4_text")
    facts = facts_of(folder)
    heads, dim, wide, item = 2, 16, 32, 4
    full, sliding = 2 * heads * wide * item, 2 * heads * dim * item
    assert facts["kv_bytes_per_token"] == full + 2 * sliding
    assert facts["kv_groups"] == [
        {"layers": 1, "window": 0, "chunk": 0, "bytes_per_token": full},
        {"layers": 2, "window": 9, "chunk": 0, "bytes_per_token": 2 * sliding},
    ]
    assert facts["memory"]["context_bytes"] == full * facts["context"] + 2 * sliding * 16


def test_too_large_a_model_is_told_to_be_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    weights = facts_of(folder)["memory"]["weights_bytes"]
    monkeypatch.setattr(inspecting, "host_memory", lambda: (weights["none"], weights["int8"] + 1))
    facts = facts_of(folder)
    assert (facts["starts"], facts["advice"]) == (False, ["--quantization int8"])
    monkeypatch.setattr(inspecting, "host_memory", lambda: (10, 10))
    assert "more memory" in facts_of(folder)["advice"][0]


def test_of_a_hubs_model_only_headers_come(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with running_hub(files, tmp_path / "cache") as hub:
        command = [sys.executable, "-m", "penstock.cli.main", "inspect", hub.repo, "--json", "--no-measure"]
        environment = {**os.environ, **hub.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert not list(hub.cache.rglob("*.safetensors"))
    facts, here = json.loads(done.stdout), facts_of(folder)
    for name in ("parameters", "kv_bytes_per_token", "stored", "starts"):
        assert facts[name] == here[name]


def test_pickles_and_folders_without_a_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "pickles", {"model_type": "llama"})
    (folder / "pytorch_model.bin").write_bytes(bytes(1000))
    facts = facts_of(folder)
    assert facts["stored"]["bytes"] == 1000
    assert (facts["starts"], facts["advice"]) == (False, ["save it again with transformers' save_pretrained()"])
    with pytest.raises(StartupError, match="MODEL"):
        facts_of(tmp_path / "nothing")


def test_a_draft_head_is_told_from_a_model_and_so_are_layers_for_drafts(tmp_path: Path) -> None:
    head = facts_of(eagle3_folder(tmp_path / "head"))
    assert head["drafts"] == {"kind": "EAGLE-3", "is_model": False, "scored_ids": DRAFT_VOCAB}
    assert (head["starts"], head["why"]) == (False, "it is a draft head, not a model")
    carrying = tiny_checkpoint(tmp_path / "model", "deepseek_v3")
    assert facts_of(carrying)["drafts"] is None
    tensors = load_file(carrying / "model.safetensors")
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.zeros(48, 96)}, carrying / "model.safetensors")
    drafts = facts_of(carrying)["drafts"]
    assert drafts == {"kind": "multi-token prediction", "is_model": True, "layers": 1, "usable": True}


def test_layers_for_drafts_that_are_not_read_are_not_advised(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3_5_text")
    tensors = load_file(folder / "model.safetensors")
    for name, is_read in (("mtp.fc.weight", True), ("model.mtp_layers.0.input_proj.weight", False)):
        save_file({**tensors, name: torch.zeros(48, 96)}, folder / "model.safetensors")
        facts = facts_of(folder)
        assert facts["drafts"]["usable"] is is_read
        assert ("--draft-head checkpoint" in drafts_line(facts["drafts"])) is is_read
