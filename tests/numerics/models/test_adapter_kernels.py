"""LoRA adapters on the C++ kernels: the merged model's numbers, and a row's bits whatever is beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.sequences import params
from factories.engine.sequences import sequence as new_sequence
from factories.models.adapters import LAYER_TARGETS, lora_folder, merged_checkpoint, read_adapter
from factories.models.checkpoints import FAMILIES, VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.native import PRODUCT_SETS, use_instruction_set
from factories.models.paged import PagedDriver, PagedSequence
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.layers.lora import AdapterWeights, NativeAdapter
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner
from safetensors.torch import load_file

FORMATS = ("none", "int8", "int4")
RANKS = (1, 4, 5, 8, 16, 24, 33, 64)
WHOLE = (*LAYER_TARGETS, "lm_head")


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def native(folder: Path, quantization: str = "none", dtype: str = "bfloat16") -> CausalLM:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype=dtype, quantization=quantization, device=device)
    assert model._fused is not None
    return model


def weights_of(folder: Path, model: CausalLM) -> AdapterWeights:
    weights = read_adapter(folder, model).weights
    assert isinstance(weights, NativeAdapter)
    return weights


def adapters_of(tmp_path: Path, checkpoint: Path, model: CausalLM) -> list[AdapterWeights | None]:
    """Eight adapters of mixed ranks and targets, one with a head of its own, and none."""
    targets = (
        LAYER_TARGETS,
        WHOLE,
        ("q_proj", "v_proj"),
        ("up_proj",),
        ("k_proj", "o_proj"),
        ("down_proj", "gate_proj"),
    )
    made: list[AdapterWeights | None] = [None]
    for number, rank in enumerate(RANKS):
        folder = lora_folder(
            tmp_path / f"adapter-{rank}",
            checkpoint,
            rank=rank,
            seed=rank,
            targets=targets[number % len(targets)],
            saved=("lm_head",) if number == 3 else (),
        )
        made.append(weights_of(folder, model))
    return made


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def logits(
    model: CausalLM, work: list[tuple[list[int], AdapterWeights | None]], *, max_chunk: int = 16, together: bool = True
) -> list[torch.Tensor]:
    """Return the logits of every position of every prompt."""
    sequences = [PagedSequence(list(ids), adapter=adapter) for ids, adapter in work]
    driver = PagedDriver(model, num_blocks=160, block_size=8)
    for group in [sequences] if together else [[sequence] for sequence in sequences]:
        driver.prefill(group, max_chunk)
    return [torch.stack(sequence.logits) for sequence in sequences]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rank", [4, 8, 16, 33, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_the_merged_model_in_float32(tmp_path: Path, family: str, rank: int) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family)
    folder = lora_folder(tmp_path / "adapter", checkpoint, rank=rank, seed=rank, targets=WHOLE, strength=0.2)
    model = native(checkpoint, dtype="float32")
    ids = prompts(2)[1]
    (found,) = logits(model, [(ids, weights_of(folder, model))])
    reference = reference_model(merged_checkpoint(tmp_path / "merged", checkpoint, folder))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)
    assert not torch.allclose(logits(model, [(ids, None)])[0], expected, atol=0.05)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_saved_head_takes_the_place_of_any_head(tmp_path: Path, quantization: str) -> None:
    """Whatever rounding the model's own head has had is gone with it; that of activations stays."""
    checkpoint = tiny_checkpoint(tmp_path / "model")
    folder = lora_folder(tmp_path / "adapter", checkpoint, targets=("v_proj",), saved=("lm_head",))
    model = native(checkpoint, quantization, "float32")
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    head = load_file(folder / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    found = model.compute_logits(hidden, model.adapter_batch([weights_of(folder, model)], [5]))
    torch.testing.assert_close(found, hidden @ head.T, atol=1e-5 if quantization == "none" else 0.04, rtol=0)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eight_adapters_in_a_batch_give_the_bits_of_each_alone(tmp_path: Path, quantization: str, dtype: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    model = native(checkpoint, quantization, dtype)
    adapters = adapters_of(tmp_path, checkpoint, model)
    work = list(zip(prompts(2 * len(adapters)), adapters * 2, strict=True))
    alone = logits(model, work, max_chunk=1, together=False)
    for found, expected in zip(logits(model, work), alone, strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, expected)
    # Those without an adapter are what they are without any beside them.
    plain = logits(model, [one for one in work if one[1] is None])
    for found, (expected, _) in zip(
        plain, [pair for pair in zip(alone, work, strict=True) if pair[1][1] is None], strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(("family", "config"), [("qwen3", {}), ("llama", {"attention_bias": True, "mlp_bias": True})])
def test_the_same_bits_layer_by_layer_and_on_two_threads(
    tmp_path: Path, family: str, config: dict[str, Any], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family, **config)
    model = native(checkpoint, quantization)
    adapters = adapters_of(tmp_path, checkpoint, model)
    work = list(zip(prompts(len(adapters)), adapters, strict=True))
    together = logits(model, work)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = logits(model, work)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(model, "_fused", None)
    single = logits(model, work)
    for one, other, third in zip(together, shared, single, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def greedy(model: CausalLM, work: list[tuple[list[int], AdapterWeights | None]], *, fast: bool) -> list[list[int]]:
    """Return nine greedy tokens of each prompt by the runner; the last eight steps are steady, if it is `fast`."""
    config = model.config
    kv = KVCachePool(config.num_layers, 100, 8, config.num_kv_heads, config.head_dim, model.dtype, model.device)
    runner = ModelRunner(model, kv)
    if not fast:
        runner._fast_path.takes = lambda *_: False  # type: ignore[method-assign]
    sequences = []
    for number, (ids, _) in enumerate(work):
        one = new_sequence(ids, params(), seq_id=number)
        one.block_table = list(range(number * 7, number * 7 + 7))
        sequences.append(one)
    adapters = tuple(
        None if weights is None else Adapter(str(number), Path(), str(number), 1, (), 0, weights)
        for number, (_, weights) in enumerate(work)
    )
    steady = 0
    for _ in range(9):
        entries = tuple(
            ScheduledSequence(one, one.num_computed_tokens, one.num_tokens - one.num_computed_tokens, (one,))
            for one in sequences
        )
        sampled = runner.execute(SchedulerOutput(entries, adapters=adapters if any(adapters) else None)).sampled
        steady += runner._steady is not None
        for one in sequences:
            one.num_computed_tokens = one.num_tokens
            one.token_ids.append(sampled[one.seq_id].token_id)
    assert steady == (8 if fast else 0)
    return [one.token_ids[-9:] for one in sequences]


@pytest.mark.parametrize("quantization", FORMATS)
def test_steady_decoding_draws_what_logits_say(tmp_path: Path, quantization: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    model = native(checkpoint, quantization)
    adapters = adapters_of(tmp_path, checkpoint, model)
    work = list(zip(prompts(len(adapters)), adapters, strict=True))
    found = greedy(model, work, fast=True)
    assert found == greedy(model, work, fast=False)
    assert found == [greedy(model, [one], fast=True)[0] for one in work]
    assert found != greedy(model, [(ids, None) for ids, _ in work], fast=True)


def test_only_wanted_rows_have_results(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    model = native(checkpoint)
    adapters = adapters_of(tmp_path, checkpoint, model)
    counts = [5] * len(adapters)
    tables = torch.arange(len(adapters), dtype=torch.int32)[:, None]
    metadata, positions = AttentionMetadata.build(counts, counts, tables, 8)
    ids = torch.randint(VOCAB_SIZE, (sum(counts),), generator=torch.Generator().manual_seed(2))
    batch = model.adapter_batch(adapters, counts)
    results = []
    wanted = torch.tensor([0, 4, 7, 14, 21, 22, 39, 44])
    for rows in (None, wanted):
        found = model.forward_and_draw(ids.clone(), positions, metadata, new_pool(model), rows, adapters=batch)
        results.append(found)
    (every, drawn), (some, drawn_some) = results
    assert torch.equal(every[wanted], some)
    assert torch.equal(drawn[wanted], drawn_some)


def new_pool(model: CausalLM) -> KVCachePool:
    config = model.config
    return KVCachePool(config.num_layers, 16, 8, config.num_kv_heads, config.head_dim, model.dtype, model.device)


def test_adapters_of_other_rows_or_of_another_model_raise(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    model, other = native(checkpoint), native(tiny_checkpoint(tmp_path / "other", hidden_size=64))
    weights = weights_of(lora_folder(tmp_path / "adapter", checkpoint), model)
    metadata, positions = AttentionMetadata.build([2], [2], torch.zeros(1, 1, dtype=torch.int32), 8)
    for where, counts in ((model, [3]), (other, [2])):
        batch = where.adapter_batch([weights], counts)
        with pytest.raises(RuntimeError, match="adapter"):
            where.forward(torch.tensor([1, 2]), positions, metadata, new_pool(where), adapters=batch)


def test_matrices_out_of_their_bounds_raise() -> None:
    make = torch.classes.penstock.Adapter
    a, b, scale = torch.zeros(4, 8), torch.zeros(64 * 4, dtype=torch.uint8), torch.ones(4)
    for half in ([0, 0, 5], [0, 2, 3], [-1, 0, 1], [0, -1, 1], [64, 0, 4]):
        with pytest.raises(RuntimeError, match="out of its bounds"):
            make([a, b, torch.tensor([half]), scale], False)
    with pytest.raises(RuntimeError, match="whole granules"):
        make([torch.zeros(3, 8).bfloat16(), b, torch.tensor([[0, 0, 1]]), torch.ones(3)], True)
