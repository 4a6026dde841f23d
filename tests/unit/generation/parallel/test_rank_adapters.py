"""Adapters by their numbers: a rank makes them of parts and drops them; rank 0's batch is of the wholes."""

from __future__ import annotations

import gc
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.layers.lora import DOWN, OUTPUT, QKV, AdapterBatch, DenseAdapter, EmbeddingPart, LoraPart
from penstock.generation.models.decoder import CausalLM
from penstock.generation.parallel.leader_adapters import HeldAdapter, LeaderAdapter, LeaderBatch
from penstock.generation.parallel.rank_adapters import RankAdapters
from penstock.generation.parallel.rank_messages import (
    FAILED,
    NO_MEMORY,
    READY,
    AdapterPartOrder,
    encode_adapter,
    encode_forget,
    kind_of,
)
from penstock.generation.weights.sharding import Shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model")))


class Rank:
    """Adapters of a rank, with what it answers and rank 0's way to send."""

    def __init__(self, model: Any) -> None:
        self.answers: SimpleQueue[bytes] = SimpleQueue()
        self.adapters = RankAdapters(model, model.config, Shard(0, 1), self.answers.put)

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self.adapters.take(*kind_of(message))

    def part(self, number: int, site: int | None, inputs: int, outputs: int) -> list[bytes]:
        a, b = torch.randn(2, inputs), torch.randn(outputs, 2)
        return list(AdapterPartOrder(number, site, 0, 1.0, a, b).encoded())

    def complete(self, number: int) -> bytes:
        self.send(encode_adapter(number))
        return self.answers.get(timeout=30)

    def settle(self) -> None:
        """Return once all before this is done."""
        assert self.complete(1 << 30) == READY
        self.send(encode_forget([1 << 30]))


def spans(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32)


def test_a_rank_has_adapters_until_they_are_forgotten(model: CausalLM) -> None:
    config = model.config
    queries = config.num_heads * config.head_dim
    rank = Rank(model)
    adapters = rank.adapters
    assert adapters.batch(None) is None
    rank.send(*rank.part(4, QKV, config.hidden_size, queries))
    rank.send(*rank.part(4, None, config.vocab_size, config.hidden_size))
    assert rank.complete(4) == READY
    rank.send(*rank.part(5, DOWN, config.intermediate_size, config.hidden_size))
    assert rank.complete(5) == READY
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
    rank.send(encode_forget([4, 99]))
    rank.settle()
    gc.collect()
    assert kept[0]() is None
    assert kept[1]() is not None
    assert adapters.batch(spans((5, 4))) is not None
    rank.send(encode_forget([5]))
    rank.settle()
    gc.collect()
    assert kept[1]() is None


@pytest.mark.parametrize("way", ["in a part", "after a part", "another one comes"])
def test_an_adapter_that_was_given_up_leaves_nothing(model: CausalLM, way: str) -> None:
    config = model.config
    rank = Rank(model)
    messages = rank.part(6, QKV, config.hidden_size, config.num_heads * config.head_dim)
    rank.send(*messages[: -1 if way == "in a part" else None])
    down = rank.part(7, DOWN, config.intermediate_size, config.hidden_size)
    if way == "another one comes":
        rank.send(*down)
    rank.send(encode_forget([6]))
    if way != "another one comes":
        rank.send(encode_adapter(1 << 30), encode_forget([1 << 30]))
        assert rank.answers.get(timeout=30) == READY
        assert rank.adapters._coming is None
        rank.send(*down)
    assert rank.complete(7) == READY
    batch = rank.adapters.batch(spans((7, 1)))
    assert batch is not None
    assert [batch.changes_site(site) for site in (QKV, DOWN)] == [False, True]
    rank.settle()
    assert rank.adapters._coming is None


class Refusing:
    """A model of which each adapter that changes more than its embedding fails, or waits."""

    def __init__(self, model: CausalLM, error: Exception | None) -> None:
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.error, self.may_go_on = error, threading.Event()
        self.adapter_batch = model.adapter_batch

    def adapter_weights(self, sites: Any, embedding: Any) -> DenseAdapter:
        if sites and self.error is not None:
            raise self.error
        if sites:
            assert self.may_go_on.wait(30)
        return DenseAdapter(sites, embedding)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (MemoryError(), NO_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."), NO_MEMORY),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), NO_MEMORY),
        (RuntimeError("a kernel refused it"), FAILED),
        (KeyError(3), FAILED),
    ],
)
def test_an_error_of_one_adapter_is_its_answer(model: CausalLM, error: Exception, answer: bytes) -> None:
    config = model.config
    rank = Rank(Refusing(model, error))
    rank.send(*rank.part(1, DOWN, config.intermediate_size, config.hidden_size))
    assert rank.complete(1) == answer
    # In a part of it: no site has these columns. What follows of it is passed over.
    first, *rest = rank.part(2, DOWN, config.intermediate_size, config.hidden_size)
    rank.send(first, *rest, *(2 * rest))
    rank.send(*rank.part(2, DOWN, config.intermediate_size, config.hidden_size))
    assert rank.complete(2) == answer
    rank.send(*rank.part(3, None, config.vocab_size, config.hidden_size))
    assert rank.complete(3) == READY
    assert list(rank.adapters._complete) == [3]


def test_pieces_that_do_not_fit_are_an_error_of_their_adapter(model: CausalLM) -> None:
    config = model.config
    rank = Rank(model)
    head, first, second = rank.part(1, DOWN, config.intermediate_size, config.hidden_size)
    rank.send(head, first + first, second)
    rank.send(*rank.part(1, DOWN, config.intermediate_size, config.hidden_size))
    assert rank.complete(1) == FAILED
    rank.send(head, first, second)
    assert rank.complete(1) == READY


def test_steps_go_on_while_an_adapter_is_packed(model: CausalLM) -> None:
    config = model.config
    slow = Refusing(model, None)
    rank = Rank(slow)
    rank.send(*rank.part(0, None, config.vocab_size, config.hidden_size))
    assert rank.complete(0) == READY
    rank.send(*rank.part(1, DOWN, config.intermediate_size, config.hidden_size), encode_adapter(1))
    # What the messages of steps need, on their thread.
    assert rank.adapters.batch(spans((0, 2))) is not None
    assert rank.answers.empty()
    slow.may_go_on.set()
    assert rank.answers.get(timeout=30) == READY


def test_the_batch_of_rank_0_changes_what_any_rank_changes() -> None:
    embedding = EmbeddingPart(torch.randn(7, 2), torch.randn(3, 2), 1.0)
    own = DenseAdapter({QKV: [LoraPart(0, torch.randn(2, 3), torch.randn(4, 2), 1.0)]}, embedding)
    # Site 9 is in another rank only.
    one = LeaderAdapter(HeldAdapter(11), own, frozenset({QKV, 9}), 2 * own.num_bytes)
    two = LeaderAdapter(HeldAdapter(3), DenseAdapter({}, None), frozenset({DOWN}), 0)
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
