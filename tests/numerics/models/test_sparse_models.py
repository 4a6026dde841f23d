"""Models whose rows attend to positions that an indexer chose: generate()'s ids, the ways to compute a row, the choice
among equals, and what the pool keeps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.modes import load_service
from factories.models.checkpoints import tiny_checkpoint
from factories.models.model_types import check_ids, tiny_model_type
from factories.models.native import PRODUCT_SETS, use_instruction_set
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import KERNELS, cpu_device
from penstock.generation.attention import chosen_rows
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.chosen_rows import split_sparse
from penstock.generation.attention.index_keys import IndexRows
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.layers import index_choice
from penstock.generation.layers.index_choice import (
    IndexChoice,
    IndexQueries,
    NativeIndexChoice,
    best_positions,
    chosen_positions,
    index_scores,
)
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.startup.load_again import load_again
from torch import Tensor

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> CausalLM:
    model = load_model(folder, dtype="float32", device=cpu_device(), **options)
    assert isinstance(model, CausalLM)
    return model


def logits(model: CausalLM, length: int, chunk: int, kv_dtype: torch.dtype | None = None) -> Tensor:
    """Return the logits of two prompts in chunks, the second of half the length."""
    ids = [5 + 7 * number % 300 for number in range(length)]
    sequences = [PagedSequence(ids), PagedSequence(ids[length // 2 :])]
    PagedDriver(model, num_blocks=length // 4 + 4, block_size=8, kv_dtype=kv_dtype).prefill(sequences, chunk)
    return torch.cat([torch.stack(sequence.logits) for sequence in sequences])


def odd_widths(source: random.Random, family: str) -> dict[str, Any]:
    """Return widths that no other width follows from."""
    heads, turned, layers = source.randint(1, 5), 2 * source.randint(1, 8), 4
    widths = {
        "hidden_size": heads * 4 * source.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "kv_lora_rank": source.randint(4, 40),
        "q_lora_rank": source.randint(5, 40),
        "qk_nope_head_dim": source.randint(2, 24),
        "qk_rope_head_dim": turned,
        "v_head_dim": source.randint(1, 24),
        "first_k_dense_replace": source.randint(0, layers),
        "index_topk": source.randint(2, 20),
        "index_head_dim": turned + source.randint(1, 20),
        "index_n_heads": source.randint(20, 70),
    }
    if family == "glm_moe_dsa":
        widths["indexer_types"] = ["full", *source.choices(["full", "shared"], k=layers - 1)]
    return widths


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_models_of_any_widths_give_the_ids_of_generate(tmp_path: Path, family: str, number: int) -> None:
    seed = random.randrange(1 << 30)
    # Shown where the test fails.
    print(f"seed {seed}")
    folder = tiny_checkpoint(tmp_path, family, seed=seed, **odd_widths(random.Random(seed), family))
    check_ids(folder, load(folder), new_tokens=24)


def test_rows_of_a_prompt_are_the_same_expanded_and_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_checkpoint(tmp_path, "glm_moe_dsa", index_topk=48))
    expanded = logits(model, 300, 200)
    by_rows = logits(model, 300, 31)
    monkeypatch.setattr(chosen_rows, "LONG_CONTEXT", 1)
    long_context = logits(model, 300, 200)
    assert (by_rows - expanded).abs().max() < 2e-5
    assert (long_context - expanded).abs().max() < 2e-5


def test_short_contexts_choose_nothing_and_long_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_checkpoint(tmp_path, "deepseek_v32", index_topk=20))
    whole, few = (load(tiny_checkpoint(tmp_path / str(most), "deepseek_v32", index_topk=most)) for most in (512, 4))
    found, most, least = (logits(one, 30, 7) for one in (model, whole, few))
    # The first 20 rows of both sequences read everything.
    dense = [*range(20), *range(30, 45)]
    assert (found - most)[dense].abs().max() < 2e-5
    assert (found - most)[20:30].abs().max() > 1e-3
    assert (found - least)[10:20].abs().max() > 1e-3


def test_of_equal_scores_the_first_positions_are_chosen() -> None:
    scores = torch.tensor([[0.0, 3.0, 0.0, -1.0, 0.0, 3.0, -torch.inf], [1.0, 1.0, 1.0, 1.0, -2.0, 1.0, 1.0]])
    assert best_positions(scores, 4).tolist() == [[0, 1, 2, 5], [0, 1, 2, 3]]
    assert best_positions(scores, 3).tolist() == [[0, 1, 5], [0, 1, 2]]
    assert best_positions(scores, 6).tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 6]]


def test_rows_whose_scores_do_not_fit_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    # The first rows have fewer positions before them than they may choose.
    queries = IndexQueries(torch.randn(78, 3, 12, generator=generator), torch.randn(78, 3, generator=generator))
    keys = torch.randn(80, 12, generator=generator).round()
    expected = chosen_positions(queries, keys, 20)
    sizes: list[int] = []

    def best(scores: Tensor, most: int) -> Tensor:
        sizes.append(scores.numel())
        return best_positions(scores, most)

    monkeypatch.setattr(index_choice, "best_positions", best)
    for most_scores in (1, 800):
        sizes.clear()
        monkeypatch.setattr(index_choice, "_MOST_SCORES", most_scores)
        assert torch.equal(chosen_positions(queries, keys, 20), expected)
        assert max(sizes) <= max(80, most_scores)


def test_scores_are_sums_of_weighted_products_above_zero() -> None:
    generator = torch.Generator().manual_seed(1)
    queries = IndexQueries(torch.randn(3, 5, 8, generator=generator), torch.randn(3, 5, generator=generator))
    keys = torch.randn(9, 8, generator=generator)
    found = index_scores(queries, keys)
    for row in range(3):
        for position in range(9):
            parts = (queries.q_THD[row] @ keys[position]).clamp_min(0)
            expected = float(parts @ queries.weight_TH[row]) if position <= 6 + row else -torch.inf
            assert float(found[row, position]) == pytest.approx(expected, abs=1e-5)
    keys[2] = torch.nan
    assert torch.isposinf(index_scores(queries, keys)[:, 2]).all()


class Step:
    """Queries and index keys of sequences in blocks that lie anywhere."""

    def __init__(
        self, heads: int, dim: int, lengths: list[int], counts: list[int], dtype: torch.dtype, block_size: int
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        blocks = [-(-length // block_size) for length in lengths]
        self.kv = KVCachePool(
            1, sum(blocks), block_size, 1, 4, dtype, CPU, has_values=False, index=IndexRows(2, dim, dtype)
        )
        keys = torch.randn(self.kv.index_key(1).shape, generator=generator)
        # Many scores are 0, many others are equal.
        keys[..., dim // 2 :] = keys[..., dim // 2 :].round()
        self.kv.index_key(1).copy_(keys)
        order = torch.randperm(sum(blocks), generator=generator).tolist()
        tables = [[order.pop() for _ in range(count)] + [0] * (max(blocks) - count) for count in blocks]
        self.metadata, _ = AttentionMetadata.build(counts, lengths, torch.tensor(tables, dtype=torch.int32), block_size)
        rows = sum(counts)
        q = torch.randn(rows, heads, dim, generator=generator)
        q[: rows // 2, :, : dim // 2] = 0.0
        self.queries = IndexQueries(q.round().to(dtype), torch.randn(rows, heads, generator=generator).round())

    def chosen(self, choice: IndexChoice, most: int) -> list[list[int]]:
        """Return the slots that each row reads."""
        split = split_sparse(self.metadata, most, self.kv.block_size)
        assert split is not None
        plan = split.singles
        assert plan is not None
        found = choice.of_singles(self.queries, 1, plan, self.kv, most)
        assert found.dtype is torch.int32
        return [slots[:count].tolist() for slots, count in zip(found, plan.lens, strict=True)]

    def of_prompts(self, choice: IndexChoice, most: int) -> list[list[list[int]]]:
        """Return the positions that each row reads, by sequence, if contexts are expanded for any number of rows."""
        split = split_sparse(replace(self.metadata, plans={}), most, self.kv.block_size, 1)
        assert split is not None
        return [
            choice.of_prompt(self.queries.select(slice(one.first, one.last)), 1, one, self.kv, most).tolist()
            for one in split.prompts
        ]


@pytest.mark.parametrize("instruction_set", PRODUCT_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_choose_the_positions_of_the_operators(instruction_set: str, dtype: torch.dtype) -> None:
    source = random.Random(3)
    for _ in use_instruction_set(instruction_set):
        for number in range(12):
            lengths = [source.choice([70, 90, 1000, 1024, 1025, 1500]) for _ in range(source.randint(1, 3))]
            counts = [source.choice([1, 1, 3, 66]) for _ in lengths]
            # Whole numbers: their sums are exact in any order. One width fills no unit of two numbers.
            dim, heads = source.choice([12, 13, 64, 128]), source.choice([1, 3, 16, 64, 70])
            step = Step(heads, dim, lengths, counts, dtype, source.choice([1, 7, 16]))
            step.kv.index_key(1).round_()
            most = source.choice([2, 9, 64, 69])
            expected = step.chosen(IndexChoice(), most)
            assert step.chosen(NativeIndexChoice(), most) == expected, (number, lengths, counts, dim, heads, most)
            assert step.of_prompts(NativeIndexChoice(), most) == step.of_prompts(IndexChoice(), most)


def test_the_pool_has_index_keys_of_layers_with_an_indexer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        tmp_path, "glm_moe_dsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"], index_head_dim=10
    )
    kv = load_service(folder, host_kv_memory="1MiB").pools.kv
    assert kv.index == IndexRows(2, 10, torch.float32)
    assert kv.bytes_per_block == kv.block_size * 4 * (3 * (20 + 8) + 2 * 10)
    assert [tuple(part.shape[:2]) for part in kv.parts] == [(3, 1), (2, 1)]


def test_an_int8_pool_keeps_index_keys_as_they_are(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path, "deepseek_v32", kv_lora_rank=48, qk_rope_head_dim=16, index_head_dim=24))
    exact, rounded = logits(model, 40, 16), logits(model, 40, 16, torch.int8)
    difference = float((exact - rounded).abs().mean() / exact.std())
    assert 0 < difference < 0.2


def test_quantised_weights_leave_the_indexer_alone(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "deepseek_v32", hidden_size=64, intermediate_size=96)
    found = []
    for quantization in ("none", "int8"):
        driver = PagedDriver(load(folder, quantization=quantization), num_blocks=4, block_size=8)
        driver.step([(PagedSequence(list(range(5, 30))), 25)])
        found.append(driver.kv.index_key(0).flatten(0, 1))
    # Of the first layer, which reads embeddings.
    torch.testing.assert_close(found[0], found[1], equal_nan=True)


def test_indexers_of_the_fallback_are_read_again(tmp_path: Path) -> None:
    folder = tiny_model_type(tmp_path, "axk2")
    loaded = load_service(folder, self_check=False)
    config = GenerationServiceConfig(
        model=str(folder), kernels=KERNELS, threads=1, dtype="float32", kv_memory="1MiB", self_check=False
    )
    fresh = load_again(config, loaded, lambda *_: None)
    assert fresh.weights.model is not loaded.weights.model
    assert fresh.weights.model.config == loaded.weights.model.config


def test_attentions_are_refused_by_name(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path, "deepseek_v32"))
    assert "indexer" in model.unsupported["output.output_attentions"]
