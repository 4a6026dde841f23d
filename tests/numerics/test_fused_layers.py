"""All layers in one call of the kernels: the bits of the layers one by one, whatever the batch, chunks and threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.native import INSTRUCTION_SETS, use_instruction_set
from factories.paged import PagedDriver, PagedSequence
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.capture import AttentionCapture, CapturedRow
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.kv_cache import KVCachePool

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen3", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 12}),
]
FORMATS = ("none", "int8", "int4")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def native(folder: Path, quantization: str) -> CausalLM:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype="bfloat16", quantization=quantization, device=device)
    assert model._fused is not None
    return model


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def logits(
    model: CausalLM, ids: list[list[int]], *, max_chunk: int, together: bool, kv_dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Of every position of every prompt."""
    sequences = [PagedSequence(list(prompt)) for prompt in ids]
    driver = PagedDriver(model, num_blocks=64, block_size=8, kv_dtype=kv_dtype)
    for group in [sequences] if together else [[sequence] for sequence in sequences]:
        driver.prefill(group, max_chunk)
    return [torch.stack(sequence.logits) for sequence in sequences]


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(("family", "config"), CASES, ids=[family for family, _ in CASES])
def test_the_same_bits_as_layer_by_layer(
    tmp_path: Path, family: str, config: dict[str, Any], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(tiny_checkpoint(tmp_path, family, **config), quantization)
    ids = prompts(6)
    # int8 weights with int8 keys and values, so that both are in some case.
    options: dict[str, Any] = {"max_chunk": 16, "together": True}
    options["kv_dtype"] = torch.int8 if quantization == "int8" else None
    fused = logits(model, ids, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = logits(model, ids, **options)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(model, "_fused", None)
    single = logits(model, ids, **options)
    for one, other, third in zip(fused, shared, single, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(tmp_path: Path, quantization: str) -> None:
    model = native(tiny_checkpoint(tmp_path), quantization)
    ids = prompts(4)
    together = logits(model, ids, max_chunk=7, together=True)
    alone = logits(model, ids, max_chunk=1, together=False)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("family", "config"), CASES, ids=[family for family, _ in CASES])
def test_rows_get_the_same_bits_beside_one_whose_attention_is_wanted(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    model = native(tiny_checkpoint(tmp_path, family, **config), "none")
    ids = prompts(2)
    lengths = [len(prompt) for prompt in ids]
    blocks = torch.arange(2 * 5, dtype=torch.int32).view(2, 5)
    metadata, positions = AttentionMetadata.build(lengths, lengths, blocks, 8)
    capture = AttentionCapture(model.attention, [CapturedRow(lengths[0] - 1, 0, lengths[0])])
    hidden, pools = [], []
    for attention in (None, capture):
        facts = model.config
        kv = KVCachePool(facts.num_layers, 10, 8, facts.num_kv_heads, facts.head_dim, model.dtype, torch.device("cpu"))
        hidden.append(model.forward(torch.tensor([*ids[0], *ids[1]]), positions, metadata, kv, attention=attention))
        pools.append(kv.tensors[0])
    assert torch.equal(*hidden)
    assert torch.equal(*pools)
    weights = capture.weights(0)
    assert weights.shape == (2, 4, lengths[0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4))


def test_what_is_not_all_native_goes_layer_by_layer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    assert load_model(folder, dtype="bfloat16", device=CPUDevice())._fused is None


def test_heads_larger_than_the_kernels_take_are_torchs(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", head_dim=264, num_hidden_layers=1)
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype="bfloat16", device=device)
    (found,) = logits(model, prompts(1), max_chunk=8, together=True)
    assert found.isfinite().all()
