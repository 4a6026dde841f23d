"""Models with a gated delta rule: ids of transformers at any widths, from any folder that has them; what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.modes import load_service
from factories.models.checkpoints import tiny_checkpoint
from factories.models.model_types import check_ids
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.core.delta_heads import DELTA_TYPES
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.weights.sharding import Shard
from penstock.generation.weights.tensor_names import site_linears
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
FAMILIES = [DELTA_TYPES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in DELTA_TYPES[1:])]
PROMPTS = ([5 + 7 * number % 300 for number in range(70)], list(range(300, 280, -1)))


def load(folder: Path, **options: Any) -> CausalLM:
    model = load_model(folder, **{"dtype": "float32", **options}, device=cpu_device())
    assert isinstance(model, CausalLM)
    return model


def logits(model: CausalLM) -> torch.Tensor:
    """Return the logits of two prompts in chunks."""
    sequences = [PagedSequence(list(prompt)) for prompt in PROMPTS]
    PagedDriver(model, num_blocks=16, block_size=8).prefill(sequences, 16)
    return torch.cat([torch.stack(sequence.logits) for sequence in sequences])


def odd_widths(source: random.Random) -> dict[str, Any]:
    """Return widths that no other width follows from, below and above a vector's and some vectors'."""
    key_heads = source.randint(1, 3)
    return {
        # transformers' grouped products of experts take rows of whole 16 bytes.
        "hidden_size": 4 * source.randint(5, 15),
        "num_attention_heads": 4,
        "num_key_value_heads": source.choice([1, 2, 4]),
        "head_dim": 8 * source.randint(1, 4),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * source.randint(1, 3),
        "linear_key_head_dim": source.randint(2, 40),
        "linear_value_head_dim": source.randint(2, 70),
        "linear_conv_kernel_dim": source.randint(2, 5),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": source.choice([0.25, 0.5, 1.0]),
            "mrope_section": [1, 1, 0],
        },
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_models_of_any_widths_give_the_ids_of_generate(tmp_path: Path, family: str, number: int) -> None:
    seed = random.randrange(1 << 30)
    # Shown where the test fails.
    print(f"seed {seed}")
    folder = tiny_checkpoint(tmp_path, family, seed=seed, **odd_widths(random.Random(seed)))
    check_ids(folder, load(folder), new_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("family", DELTA_TYPES)
def test_64_ids_are_those_of_generate(tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=2)
    check_ids(folder, load(folder))


def test_only_layers_that_attend_have_keys_in_the_pool(tmp_path: Path) -> None:
    loaded = load_service(tiny_checkpoint(tmp_path, "qwen3_5_text"))
    kv = loaded.pools.kv
    assert (kv.num_layers, loaded.weights.model.config.num_layers) == (1, 4)
    assert kv.states is not None
    # Of three layers: rows of the convolution, and matrices of the heads.
    channels = 2 * 2 * 12 + 4 * 20
    assert kv.states.bytes_per_slot == 3 * 4 * (3 * channels + 4 * 12 * 20)


def test_a_folder_of_a_model_that_also_sees_starts_with_its_text_part(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3_5_text", tie_word_embeddings=True)
    expected = logits(load(folder))
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}}
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps({**whole, **tied, "text_config": text}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value for name, value in load_file(folder / WEIGHTS).items()
    }
    others = {"model.visual.pos_embed.weight": torch.zeros(2, 3), "mtp.norm.weight": torch.zeros(3)}
    save_file(tensors | others, folder / WEIGHTS)
    assert read_model_config(folder).model_type == "qwen3_5_text"
    assert torch.equal(logits(load(folder)), expected)
    save_file(tensors | {"model.norm.weight": torch.zeros(48)}, folder / WEIGHTS)
    with pytest.raises(StartupError, match=r"has both model\.language_model\.norm\.weight and model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_experts_may_be_stacked(tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    expected = logits(load(folder))
    tensors = load_file(folder / WEIGHTS)
    for layer in range(4):
        own = f"model.layers.{layer}.mlp.experts."
        if f"{own}0.gate_proj.weight" not in tensors:
            continue
        gate, up, down = (
            torch.stack([tensors.pop(f"{own}{number}.{name}_proj.weight") for number in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{own}gate_up_proj": torch.cat((gate, up), dim=1), f"{own}down_proj": down}
    save_file(tensors, folder / WEIGHTS)
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.2), ("int4", 0.8)])
def test_quantised_weights_are_near_the_models_own_numbers(tmp_path: Path, quantization: str, most: float) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3_5_text", hidden_size=64, intermediate_size=96, linear_value_head_dim=16)
    exact, rounded = logits(load(folder)), logits(load(folder, quantization=quantization))
    difference = float((exact - rounded).abs().mean() / exact.std())
    assert 0 < difference < most


def test_more_processes_are_refused_by_name(tmp_path: Path) -> None:
    config = load(tiny_checkpoint(tmp_path, "qwen3_5_text")).config
    with pytest.raises(StartupError, match=r"--tensor-parallel 2 is not possible.*keep a state of each sequence"):
        Shard(0, 2).check(config)


def test_adapters_may_change_attention_outputs_and_plain_mlps(tmp_path: Path) -> None:
    config = load(tiny_checkpoint(tmp_path, "qwen3_5_text")).config
    names = [[None if one is None else one.name for one in site_linears(config, layer)] for layer in (2, 3)]
    assert names[0] == [None, "linear_attn.out_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert names[1] == ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
