"""A packed folder gives the bits of the checkpoint that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.packed import load, packed, use_packing
from factories.models.paged import PagedDriver, PagedSequence
from penstock.generation.models.decoder import CausalLM

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "hidden_size": 64}),
    ("mistral", {"sliding_window": 12, "tie_word_embeddings": True}),
]
FORMATS = [(dtype, kind) for dtype in ("bfloat16", "float32") for kind in ("none", "int8", "int8-groups", "int4")]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_packing(monkeypatch)


def logits(model: CausalLM) -> torch.Tensor:
    """Return the logits of a prompt in chunks, beside another one."""
    sequences = [PagedSequence(list(range(5, 45))), PagedSequence(list(range(VOCAB_SIZE - 1, VOCAB_SIZE - 20, -1)))]
    PagedDriver(model, num_blocks=16, block_size=8).prefill(sequences, 16)
    return torch.cat([torch.stack(sequence.logits) for sequence in sequences])


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize(("family", "config"), CASES, ids=[f"{family}{len(config)}" for family, config in CASES])
def test_logits_and_ids_are_those_of_the_checkpoint(
    tmp_path: Path, family: str, config: dict[str, Any], dtype: str, quantization: str
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", family, **config)
    direct = load(folder, dtype=dtype, quantization=quantization)
    mapped = load(packed(folder, tmp_path / "packed", dtype=dtype, quantization=quantization))
    whole = load(folder, dtype=dtype, quantization=quantization, compact_weights="off")
    assert direct.config == mapped.config
    # A packed folder's weights are whole.
    assert (direct.dtype, whole.num_bytes) == (mapped.dtype, mapped.num_bytes)
    assert (direct._fused is None) == (mapped._fused is None)
    assert torch.equal(logits(direct), logits(mapped))
    greedy = [PagedDriver(one, num_blocks=16, block_size=8).greedy([[7, 8, 9]], 12, 8) for one in (direct, mapped)]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize("quantization", ["none", "int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    ["glm4", "gemma2", "qwen2_moe", "deepseek_v3", "qwen3_next", pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def test_another_order_of_heads_other_norms_and_experts_are_packed(
    tmp_path: Path, family: str, quantization: str
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", family)
    direct = load(folder, dtype="bfloat16", quantization=quantization)
    mapped = load(packed(folder, tmp_path / "packed", dtype="bfloat16", quantization=quantization))
    whole = load(folder, dtype="bfloat16", quantization=quantization, compact_weights="off")
    assert whole.num_bytes == mapped.num_bytes
    assert torch.equal(logits(direct), logits(mapped))


def test_embeddings_that_are_said_to_be_one_and_are_two_stay_two(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(packed(folder, tmp_path / "packed"))))
