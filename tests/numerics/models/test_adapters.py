"""LoRA adapters: the logits of a model with the adapter merged into its weights, for every family, rank and target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.adapters import LAYER_TARGETS, lora_folder, merged_checkpoint, read_adapter
from factories.models.checkpoints import FAMILIES, VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.errors import InvalidArgument
from penstock.generation.layers.lora import AdapterWeights
from penstock.generation.models.decoder import CausalLM
from torch import Tensor

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 264, 33, 83]
CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 2e-4}


def logits_of(model: CausalLM, work: list[tuple[list[int], AdapterWeights | None]], max_chunk: int = 9) -> list[Tensor]:
    """Return the logits of every position of every prompt, computed together."""
    sequences = [PagedSequence(list(ids), adapter=adapter) for ids, adapter in work]
    PagedDriver(model, num_blocks=80, block_size=8).prefill(sequences, max_chunk)
    return [torch.stack(sequence.logits) for sequence in sequences]


def adapted(model: CausalLM, folder: Path) -> Tensor:
    weights = read_adapter(folder, model).weights
    assert isinstance(weights, AdapterWeights)
    return logits_of(model, [(PROMPT, weights)])[0]


def merged(tmp_path: Path, checkpoint: Path, folder: Path) -> Tensor:
    reference = reference_model(merged_checkpoint(tmp_path / f"merged-{folder.name}", checkpoint, folder))
    with torch.inference_mode():
        result: Tensor = reference(torch.tensor([PROMPT])).logits[0].float()
    return result


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rank", [4, 8, 16, 33, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_the_merged_model(tmp_path: Path, family: str, rank: int) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family)
    folder = lora_folder(tmp_path / "adapter", checkpoint, rank=rank, seed=rank)
    model = load_tiny(checkpoint)
    found, expected = adapted(model, folder), merged(tmp_path, checkpoint, folder)
    plain = logits_of(model, [(PROMPT, None)])[0]
    assert not torch.allclose(plain, expected, atol=0.1)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("glm4", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gemma2", (*LAYER_TARGETS, "lm_head")),
        ("granite", LAYER_TARGETS),
        ("olmo2", LAYER_TARGETS),
        ("cohere2", LAYER_TARGETS),
        ("mixtral", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("youtu", ("o_proj", "gate_proj", "up_proj", "down_proj")),
        ("deepseek_v3", ("o_proj",)),
        ("qwen3_5_text", (*LAYER_TARGETS, "out_proj")),
    ],
)
def test_families_with_other_layers_have_adapters(tmp_path: Path, family: str, targets: tuple[str, ...]) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family, tie_word_embeddings="lm_head" in targets)
    folder = lora_folder(tmp_path / "adapter", checkpoint, targets=targets, strength=0.3)
    model = load_tiny(checkpoint)
    found, expected = adapted(model, folder), merged(tmp_path, checkpoint, folder)
    assert not torch.allclose(logits_of(model, [(PROMPT, None)])[0], expected, atol=0.01)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "targets", "named"),
    [
        ("qwen3_moe", ("gate_proj",), r"mlp\.experts\.0\.gate_proj"),
        ("gemma3_text", ("embed_tokens",), "multiplies its embedding"),
        ("youtu", ("o_proj", "q_b_proj"), r"self_attn\.q_b_proj"),
        ("deepseek_v2", ("o_proj", "kv_b_proj"), r"self_attn\.kv_b_proj"),
        ("qwen3_5_text", ("o_proj", "in_proj_z"), r"linear_attn\.in_proj_z"),
    ],
)
def test_experts_and_scaled_embeddings_have_none(
    tmp_path: Path, family: str, targets: tuple[str, ...], named: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family)
    folder = lora_folder(tmp_path / "adapter", checkpoint, targets=targets)
    with pytest.raises(InvalidArgument, match=named) as caught:
        read_adapter(folder, load_tiny(checkpoint))
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"ranks": {"q_proj": 4, "down_proj": 13}, "alpha_pattern": {"k_proj": 3.5, "up_proj": 1}},
        {"targets": ("v_proj",)},
        {"targets": ("q_proj", "gate_proj"), "rank": 3},
        {"targets": ("up_proj", "k_proj"), "rank": 5},
        {"targets": ("lm_head",)},
        {"targets": ("embed_tokens",), "strength": 0.1},
        {"targets": (*LAYER_TARGETS, "lm_head", "embed_tokens"), "strength": 0.1},
        {"saved": ("lm_head", "embed_tokens")},
        {"saved": ("embed_tokens",), "targets": ("v_proj",)},
    ],
    ids=str,
)
def test_scales_patterns_and_targets(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings="lm_head" in str(options))
    folder = lora_folder(tmp_path / "adapter", checkpoint, **options)
    torch.testing.assert_close(
        adapted(load_tiny(checkpoint), folder), merged(tmp_path, checkpoint, folder), atol=1e-3, rtol=1e-3
    )


def test_rows_of_a_batch_have_their_own_adapters_or_none(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", "llama")
    model = load_tiny(checkpoint)
    folders = [
        lora_folder(tmp_path / f"a{rank}", checkpoint, rank=rank, seed=rank, targets=targets)
        for rank, targets in ((4, LAYER_TARGETS), (16, ("q_proj",)), (64, (*LAYER_TARGETS, "lm_head", "embed_tokens")))
    ]
    adapters: list[AdapterWeights | None] = [None]
    for folder in folders:
        weights = read_adapter(folder, model).weights
        assert isinstance(weights, AdapterWeights)
        adapters.append(weights)
    draw = torch.Generator().manual_seed(1)
    work = [
        (torch.randint(VOCAB_SIZE, (3 + 5 * number,), generator=draw).tolist(), adapters[number % len(adapters)])
        for number in range(8)
    ]
    together = logits_of(model, work)
    for one, found in zip(work, together, strict=True):
        torch.testing.assert_close(found, logits_of(model, [one])[0], **CLOSE)
