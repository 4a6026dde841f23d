"""Adapters by their numbers: a rank makes them of parts and drops them; rank 0's batch is of the wholes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.layers.lora import DOWN, OUTPUT, QKV, AdapterBatch, DenseAdapter, EmbeddingPart, LoraPart
from penstock.generation.models.decoder import CausalLM
from penstock.generation.parallel.adapters import LeaderAdapter, LeaderBatch, RankAdapters
from penstock.generation.parallel.messages import AdapterPartOrder
from penstock.generation.weights.sharding import Shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model")))


def part(number: int, site: int | None, inputs: int, outputs: int) -> AdapterPartOrder:
    return AdapterPartOrder(number, site, 0, 1.0, torch.randn(2, inputs), torch.randn(outputs, 2))


def spans(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32)


def test_a_rank_has_adapters_until_they_are_forgotten(model: CausalLM) -> None:
    config = model.config
    queries = config.num_heads * config.head_dim
    adapters = RankAdapters(model, config, Shard(0, 1))
    assert adapters.batch(None) is None
    adapters.add_part(part(4, QKV, config.hidden_size, queries))
    adapters.add_part(part(4, None, config.vocab_size, config.hidden_size))
    adapters.complete(4)
    adapters.add_part(part(5, DOWN, config.intermediate_size, config.hidden_size))
    adapters.complete(5)
    batch = adapters.batch(spans((4, 2), (-1, 1), (5, 1)))
    assert batch is not None
    assert [batch.changes_site(site) for site in (QKV, DOWN, DOWN + 1)] == [True, True, False]
    assert batch.changes_embedding
    # Steps of the same rows have one batch.
    assert adapters.batch(spans((4, 2), (-1, 1), (5, 1))) is batch
    other = adapters.batch(spans((5, 4)))
    assert other is not None
    assert not other.changes_embedding
    kept = weakref.ref(adapters._complete[4]), weakref.ref(adapters._complete[5])
    del batch, other
    adapters.forget([4, 99])
    gc.collect()
    assert kept[0]() is None
    assert kept[1]() is not None
    assert adapters.batch(spans((5, 4))) is not None
    # One that never became complete.
    adapters.add_part(part(6, QKV, config.hidden_size, queries))
    adapters.add_part(part(6, None, config.vocab_size, config.hidden_size))
    adapters.forget([5, 6])
    gc.collect()
    assert kept[1]() is None
    assert not any((adapters._sites, adapters._embeddings, adapters._complete))


def test_the_batch_of_rank_0_changes_what_any_rank_changes() -> None:
    embedding = EmbeddingPart(torch.randn(7, 2), torch.randn(3, 2), 1.0)
    own = DenseAdapter({QKV: [LoraPart(0, torch.randn(2, 3), torch.randn(4, 2), 1.0)]}, embedding)
    # Site 9 is in another rank only.
    one = LeaderAdapter(11, own, frozenset({QKV, 9}), 2 * own.num_bytes)
    two = LeaderAdapter(3, DenseAdapter({}, None), frozenset({DOWN}), 0)
    made: list[tuple[list[object], list[int]]] = []

    def make(adapters: object, counts: object) -> AdapterBatch:
        made.append((list(adapters), list(counts)))  # type: ignore[call-overload]
        return AdapterBatch.__new__(LeaderBatch)

    batch = LeaderBatch([one, None, two, one], [2, 1, 1, 3], make)
    assert batch.spans.tolist() == [[11, 2], [-1, 1], [3, 1], [11, 3]]
    assert [batch.changes_site(site) for site in (QKV, OUTPUT, DOWN, 9)] == [True, False, True, True]
    assert batch.changes_embedding
    some = batch.select([3, 0, 6, 2])
    assert some.spans.tolist() == [[3, 1], [11, 1], [11, 1], [-1, 1]]
    assert made[1] == ([two.own, own, own, None], [1, 1, 1, 1])
    none = batch.select([2])
    assert not none.changes_embedding
    assert not none.changes_site(9)
