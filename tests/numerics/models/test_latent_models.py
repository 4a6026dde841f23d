"""Models with compressed keys and values: one row a token in the pool, whatever the widths, and what is refused."""

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
from factories.models.native import use_native
from factories.models.packed import native_device
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.layers import latent_prompts
from penstock.generation.layers.head_products import HeadProducts
from penstock.generation.layers.latent_attention import LatentAttention
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.loader import build_model, copied_bytes
from penstock.generation.models.model_parts import ReplacedWeights
from penstock.generation.models.registry import load_model
from penstock.generation.weights.checkpoint_weights import CheckpointWeights
from penstock.generation.weights.quantised.table import open_checkpoint
from penstock.generation.weights.sharding import Shard
from penstock.generation.weights.tensor_names import site_linears
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def load(folder: Path, **options: Any) -> CausalLM:
    model = load_model(folder, dtype="float32", device=cpu_device(), **options)
    assert isinstance(model, CausalLM)
    return model


def logits(model: CausalLM, kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the logits of two prompts in chunks."""
    sequences = [PagedSequence(list(range(5, 45))), PagedSequence(list(range(300, 280, -1)))]
    PagedDriver(model, num_blocks=16, block_size=8, kv_dtype=kv_dtype).prefill(sequences, 16)
    return torch.cat([torch.stack(sequence.logits) for sequence in sequences])


def odd_widths(source: random.Random) -> dict[str, Any]:
    """Return widths that no other width follows from; the first two even, as transformers' DeepSeek V2 needs them."""
    heads = source.randint(1, 5)
    return {
        "hidden_size": heads * 4 * source.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": 3,
        "kv_lora_rank": 2 * source.randint(2, 20),
        "q_lora_rank": source.choice([None, source.randint(5, 40)]),
        "qk_nope_head_dim": 2 * source.randint(1, 12),
        "qk_rope_head_dim": 2 * source.randint(1, 8),
        "v_head_dim": source.randint(1, 24),
        "first_k_dense_replace": source.randint(0, 3),
    }


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("number", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_models_of_any_widths_give_the_ids_of_generate(tmp_path: Path, family: str, number: int) -> None:
    seed = random.randrange(1 << 30)
    # Shown where the test fails.
    print(f"seed {seed}")
    folder = tiny_checkpoint(tmp_path, family, seed=seed, **odd_widths(random.Random(seed)))
    check_ids(folder, load(folder), new_tokens=24)


def test_the_pool_has_one_row_a_token_for_all_heads(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3)
    loaded = load_service(folder)
    kv = loaded.pools.kv
    config = json.loads((folder / "config.json").read_text())
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert kv.bytes_per_block == 3 * kv.block_size * row * 4
    assert kv.tensors[0].shape[1] == 1
    assert (kv.num_kv_heads, kv.head_dim) == (1, row)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_a_long_context_takes_no_mask_of_all_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype | None
) -> None:
    model = load(tiny_checkpoint(tmp_path, "youtu"))

    def run() -> torch.Tensor:
        sequence = PagedSequence([5 + number % 300 for number in range(420)])
        PagedDriver(model, num_blocks=64, block_size=8, kv_dtype=kv_dtype).prefill([sequence], 200)
        return torch.stack(sequence.logits)

    expected, sizes, whole = run(), list[int](), latent_prompts._mask

    def noted(count: int, length: int, *rest: Any) -> torch.Tensor:
        sizes.append(count * length)
        return whole(count, length, *rest)

    monkeypatch.setattr(latent_prompts, "_mask", noted)
    monkeypatch.setattr(latent_prompts, "_MOST_MASK", 30_000)
    assert (run() - expected).abs().max() < 2e-5
    assert len(sizes) > 4
    assert max(sizes) <= 30_000


def test_an_int8_pool_is_near_the_models_own_numbers(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path, "youtu", kv_lora_rank=48, qk_rope_head_dim=16))
    exact, rounded = logits(model), logits(model, torch.int8)
    difference = float((exact - rounded).abs().mean() / exact.std())
    assert 0 < difference < 0.05


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 0.5)])
def test_quantised_weights_are_near_the_models_own_numbers(tmp_path: Path, quantization: str, most: float) -> None:
    folder = tiny_checkpoint(tmp_path, "youtu", hidden_size=64, intermediate_size=96)
    exact, rounded = logits(load(folder)), logits(load(folder, quantization=quantization))
    difference = float((exact - rounded).abs().mean() / exact.std())
    assert 0 < difference < most


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    expected = logits(load(tiny_checkpoint(tmp_path / "one", "deepseek_v3")))
    assert torch.equal(logits(load(tiny_checkpoint(tmp_path / "other", "kimi_k2"))), expected)


def test_layers_for_drafts_are_not_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "deepseek_v3")
    expected = logits(load(folder))
    tensors = load_file(folder / WEIGHTS)
    further = {name.replace("layers.1.", "layers.2."): value.clone() for name, value in tensors.items()}
    save_file({**further, **tensors, "model.layers.2.eh_proj.weight": torch.randn(48, 96)}, folder / WEIGHTS)
    assert torch.equal(logits(load(folder)), expected)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.randn(48, 96)}, folder / WEIGHTS)
    with pytest.raises(StartupError, match=r"unexpected.*model\.layers\.3\.eh_proj"):
        load(folder)


def test_more_processes_are_refused_by_name(tmp_path: Path) -> None:
    config = load(tiny_checkpoint(tmp_path, "youtu")).config
    with pytest.raises(StartupError, match=r"--tensor-parallel 2 is not possible.*one compressed row a token"):
        Shard(0, 2).check(config)


def test_adapters_may_change_the_output_and_plain_mlps(tmp_path: Path) -> None:
    # A layer without experts, then one with them.
    config = load(tiny_checkpoint(tmp_path, "deepseek_v3")).config
    names = [[None if one is None else one.name for one in site_linears(config, layer)] for layer in (0, 1)]
    assert names[0] == [None, "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert names[1] == [None, "self_attn.o_proj", None, None]


def made_anew(model: CausalLM, folder: Path, names: set[str]) -> CausalLM:
    """Return the model with some tensors read again, as WriteWeights makes it."""
    device = native_device()
    source = open_checkpoint(folder)
    fresh = CheckpointWeights(source, device, model.dtype, "none", is_tied=False, map_embeddings=False)
    assert model.parts is not None
    return build_model(model.config, ReplacedWeights(model.parts, model.mapped_bytes, fresh, names), device)


def key_products(model: CausalLM) -> list[HeadProducts]:
    return [layer.attention.keys for layer in model.layers if isinstance(layer.attention, LatentAttention)]


@pytest.mark.usefixtures("native")
def test_packed_copies_count_and_are_made_once(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "deepseek_v3")
    model = load_model(folder, dtype="float32", device=native_device())
    assert isinstance(model, CausalLM)
    parts = model.parts
    assert parts is not None
    assert parts.head is not None
    head, table = parts.head
    tensors = [*parts.tensors.values(), *([] if table is None else [table])]
    of_parts = sum(one.num_bytes for one in (*parts.linears.values(), head)) + sum(one.nbytes for one in tensors)
    assert model.num_bytes == of_parts + copied_bytes(model.layers)
    assert copied_bytes(model.layers) > 0
    # With a new norm it has the copies that it had; with a new matrix that has its own.
    products = key_products(model)
    assert key_products(made_anew(model, folder, {"model.norm.weight"})) == products
    first, *others = key_products(made_anew(model, folder, {"model.layers.0.self_attn.kv_b_proj.weight"}))
    assert first is not products[0]
    assert others == products[1:]


@pytest.fixture
def native() -> None:
    """Skip where the kernels were not built."""
    use_native()
