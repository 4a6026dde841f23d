"""Paged attention equals the textbook formula for any lengths, blocks, heads and windows."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.base import AttentionLayer, AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.sdpa import MAX_BATCHED_QUERY, SMALL_CONTEXT, SDPAAttention
from torch import Tensor

HEAD_DIM = 8
SCALE = 0.3


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def textbook(q_THD: Tensor, k_CKD: Tensor, v_CKD: Tensor, window: int | None) -> Tensor:
    """Causal attention of the newest T of C positions, in float64."""
    rows, context = q_THD.shape[0], k_CKD.shape[0]
    groups = q_THD.shape[1] // k_CKD.shape[1]
    k = k_CKD.double().repeat_interleave(groups, 1)
    v = v_CKD.double().repeat_interleave(groups, 1)
    scores = torch.einsum("thd,chd->htc", q_THD.double(), k) * SCALE
    query = torch.arange(context - rows, context).unsqueeze(1)
    key = torch.arange(context)
    hidden = (key > query) if window is None else (key > query) | (key <= query - window)
    return torch.einsum("htc,chd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def run(lengths: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int, window: int | None) -> None:
    """Attend (query_len, kv_len) sequences at once over a pool of NaN and compare each with the textbook."""
    torch.manual_seed(0)
    needed = [-(-kv_len // block_size) for _, kv_len in lengths]
    pool = KVCachePool(2, sum(needed) + 3, block_size, kv_heads, HEAD_DIM, torch.float32, torch.device("cpu"))
    for layer in range(2):
        pool.key(layer).fill_(float("nan"))
        pool.value(layer).fill_(float("nan"))
    ids = list(range(pool.num_blocks))
    random.Random(0).shuffle(ids)
    tables = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    keys = [torch.randn(kv_len, kv_heads, HEAD_DIM) for _, kv_len in lengths]
    values = [torch.randn(kv_len, kv_heads, HEAD_DIM) for _, kv_len in lengths]
    for row, ((query_len, kv_len), count) in enumerate(zip(lengths, needed, strict=True)):
        tables[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        old = kv_len - query_len
        position = torch.arange(old)
        blocks = tables[row].long()[position // block_size]
        pool.key(1)[blocks, position % block_size] = keys[row][:old]
        pool.value(1)[blocks, position % block_size] = values[row][:old]
    metadata, _ = AttentionMetadata.build([q for q, _ in lengths], [kv for _, kv in lengths], tables, block_size)
    queries = [torch.randn(query_len, heads, HEAD_DIM) for query_len, _ in lengths]
    new_keys = torch.cat([key[-q:] for key, (q, _) in zip(keys, lengths, strict=True)])
    new_values = torch.cat([value[-q:] for value, (q, _) in zip(values, lengths, strict=True)])
    layer = AttentionLayer(heads, kv_heads, HEAD_DIM, SCALE, 1, window)
    out = SDPAAttention().forward(torch.cat(queries), new_keys, new_values, layer, metadata, pool)
    for found, q, k, v in zip(out.split([q for q, _ in lengths]), queries, keys, values, strict=True):
        torch.testing.assert_close(found.double(), textbook(q, k, v, window), atol=1e-5, rtol=1e-5)


sequences = st.integers(1, 70).flatmap(lambda kv: st.tuples(st.integers(1, kv), st.just(kv)))


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(sequences, min_size=1, max_size=6),
    block_size=st.integers(1, 20),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.none() | st.integers(1, 40),
)
def test_any_mix_of_sequences(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], window: int | None
) -> None:
    run(lengths, block_size, *heads, window)


def test_decode_rows_of_very_different_contexts() -> None:
    run([(1, n) for n in (3, 4 * SMALL_CONTEXT, 2, SMALL_CONTEXT, 4 * SMALL_CONTEXT - 5, 1)], 16, 4, 2, None)


def test_short_and_long_queries_beside_decode_rows() -> None:
    run([(MAX_BATCHED_QUERY, 50), (1, 9), (MAX_BATCHED_QUERY + 1, 50), (1, 30), (40, 40)], 7, 4, 2, 12)


def test_a_layer_reuses_the_plan_of_the_layer_before_it() -> None:
    pool = KVCachePool(2, 4, 4, 1, HEAD_DIM, torch.float32, torch.device("cpu"))
    metadata, _ = AttentionMetadata.build([2], [2], torch.tensor([[3]], dtype=torch.int32), 4)
    rows = torch.randn(2, 1, HEAD_DIM)
    for layer in range(2):
        SDPAAttention().forward(rows, rows, rows, AttentionLayer(1, 1, HEAD_DIM, SCALE, layer), metadata, pool)
    assert len(metadata.plans) == 1


def test_metadata_gives_positions_and_slots_of_every_row() -> None:
    tables = torch.tensor([[5, 2, 0], [1, 4, 3]], dtype=torch.int32)
    metadata, positions = AttentionMetadata.build([2, 3], [5, 9], tables, 4)
    assert positions.tolist() == [3, 4, 6, 7, 8]
    assert metadata.slot_mapping.tolist() == [5 * 4 + 3, 2 * 4 + 0, 4 * 4 + 2, 4 * 4 + 3, 3 * 4 + 0]
    assert metadata.query_start.tolist() == [0, 2, 5]
    assert (metadata.num_seqs, metadata.num_rows, metadata.max_context_len) == (2, 5, 9)


@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [([], []), ([1], [1, 2]), ([0, 1], [1, 1]), ([3, 1], [2, 1]), ([1, 1], [1, 9])],
    ids=["none", "unequal", "no row", "more rows than context", "table too short"],
)
def test_contradicting_lengths_are_refused(query_lens: list[int], kv_lens: list[int]) -> None:
    with pytest.raises(ValueError):
        AttentionMetadata.build(query_lens, kv_lens, torch.zeros(2, 2, dtype=torch.int32), 4)
