"""Attention for transformers' modules equals dense attention written out, for every kind of call and mix of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from factories.engine.pools import unwritten_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention import transformers_interface
from penstock.generation.attention.base import AttentionLayer, AttentionMetadata
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.attention.transformers_interface import (
    AttentionCall,
    BoundLayers,
    PagedStep,
    UnsupportedAttention,
)

BLOCK = 4
SCALE = 0.3


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one whole sequence: q, k (heads, T, width), v."""
    groups = call.num_heads // call.num_kv_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * SCALE
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    row, key = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])[None]
    seen = key <= row
    if call.slopes is not None:
        scores = scores + call.slopes.view(-1, 1, 1) * (key - row)
    if call.biases is not None:
        scores = scores + call.biases[:, None, : q.shape[1]]
    if call.window is not None:
        seen &= key > row - call.window
    if call.chunk is not None:
        seen &= key // call.chunk == row // call.chunk
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, q.shape[1], 1)), -1)
    return scores.softmax(-1)[..., : q.shape[1]] @ v


calls = st.builds(
    lambda kv_heads, groups, key, value, window, chunk, softcap, sinks: AttentionCall(
        kv_heads * groups, kv_heads, key, value, window, chunk, softcap, sinks
    ),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([4, 8]),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([None, 1, 5, 40]),
    st.sampled_from([None, None, 3, 8]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(
    call=calls,
    adds=st.sampled_from([None, "slopes", "biases"]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_paged_attention_is_dense_attention(
    call: AttentionCall, adds: str | None, lengths: list[int], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    sinks = torch.randn(call.num_heads, generator=draw) if call.has_sinks else None
    if adds == "slopes":
        call = replace(call, slopes=torch.rand(call.num_heads, generator=draw))
    elif adds == "biases":
        call = replace(call, biases=torch.randn(call.num_heads, 20, generator=draw))

    def rows(heads: int, width: int) -> list[torch.Tensor]:
        return [torch.randn(heads, length, width, generator=draw) for length in lengths]

    queries = rows(call.num_heads, call.key_width)
    keys, values = rows(call.num_kv_heads, call.key_width), rows(call.num_kv_heads, call.value_width)
    each = zip(queries, keys, values, strict=True)
    wanted = [dense(q, k, v, call, sinks) for q, k, v in each]
    # A pool of wider heads than the call has, as beside other layers.
    counts = [-(-length // BLOCK) for length in lengths]
    kv = unwritten_pool(1, sum(counts), BLOCK, 3, 10, torch.float32)
    free = torch.randperm(sum(counts), generator=draw).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    done = [0] * len(lengths)
    while any(one < length for one, length in zip(done, lengths, strict=True)):
        left = [length - one for one, length in zip(done, lengths, strict=True)]
        work = [
            (row, min(count, int(torch.randint(1, 9, (), generator=draw)))) for row, count in enumerate(left) if count
        ]
        spans = [(row, slice(done[row], done[row] + count)) for row, count in work]
        metadata, _ = AttentionMetadata.build(
            [count for _, count in work],
            [span.stop for _, span in spans],
            tables[[row for row, _ in work]],
            BLOCK,
        )
        step = PagedStep((call,), metadata, kv, SDPAAttention())
        q, k, v = (torch.cat([x[row][:, span] for row, span in spans], 1)[None] for x in (queries, keys, values))
        found = step.attend(q, k, v, SCALE, call.softcap, sinks)
        assert found.shape == (1, q.shape[2], call.num_heads, call.value_width)
        first = 0
        for row, span in spans:
            count = span.stop - span.start
            ours = found[0, first : first + count].transpose(0, 1)
            assert torch.allclose(ours, wanted[row][:, span], rtol=1e-4, atol=1e-5)
            first += count
            done[row] += count


def test_long_queries_are_computed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    call = AttentionCall(2, 1, 4, 4, chunk=40, softcap=3.0)
    q, k, v = torch.randn(2, 50, 4), torch.randn(1, 50, 4), torch.randn(1, 50, 4)
    kv = unwritten_pool(1, 13, BLOCK, 1, 4, torch.float32)
    monkeypatch.setattr(transformers_interface, "_MOST_SCORES", 700)
    metadata, _ = AttentionMetadata.build([50], [50], torch.arange(13, dtype=torch.int32)[None], BLOCK)
    found = PagedStep((call,), metadata, kv, SDPAAttention()).attend(q[None], k[None], v[None], SCALE, 3.0, None)
    assert torch.allclose(found[0].transpose(0, 1), dense(q, k, v, call, None), rtol=1e-4, atol=1e-5)
    (plan,) = metadata.plans.values()
    assert len(plan) > 1  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [None, 4])
def test_sequences_with_as_many_rows_may_come_as_a_batch(chunk: int | None) -> None:
    call = AttentionCall(4, 2, 4, 6, chunk=chunk)
    q, k, v = (torch.randn(3, heads, 5, width) for heads, width in ((4, 4), (2, 4), (2, 6)))
    kv = unwritten_pool(1, 6, BLOCK, 2, 6, torch.float32)
    metadata, _ = AttentionMetadata.build([5] * 3, [5] * 3, torch.arange(6, dtype=torch.int32).view(3, 2), BLOCK)
    found = PagedStep((call,), metadata, kv, SDPAAttention()).attend(q, k, v, SCALE, None, None)
    assert found.shape == (3, 5, 4, 6)
    for ours, *own in zip(found, q, k, v, strict=True):
        assert torch.allclose(ours.transpose(0, 1), dense(*own, call, None), rtol=1e-4, atol=1e-5)


class NotesLayers(SDPAAttention):
    """Attention that keeps the facts of its calls."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []

    def forward(self, q_THD: Any, k_TKD: Any, v_TKD: Any, layer: AttentionLayer, *step: Any) -> torch.Tensor:
        self.layers.append(layer)
        return super().forward(q_THD, k_TKD, v_TKD, layer, *step)


def test_a_layers_facts_are_made_once_for_all_steps() -> None:
    kv = unwritten_pool(1, 2, BLOCK, 1, 4, torch.float32)
    metadata, _ = AttentionMetadata.build([2], [2], torch.tensor([[0]], dtype=torch.int32), BLOCK)
    attention, layers = NotesLayers(), BoundLayers()
    sinks, others, x = torch.zeros(1), torch.ones(1), torch.zeros(1, 1, 2, 4)
    for scale, softcap, sinks_H in ((1.0, None, sinks), (1.0, None, sinks), (2.0, None, sinks), (2.0, 3.0, others)):
        step = PagedStep((AttentionCall(1, 1, 4, 4),), metadata, kv, attention, layers=layers)
        step.attend(x, x, x, scale, softcap, sinks_H)
    one, again, other, last = attention.layers
    assert one is again
    assert (one.scale, other.scale, last.scale, last.softcap, last.sinks) == (1.0, 2.0, 2.0, 3.0, others)


def test_a_call_that_was_not_recorded_is_refused() -> None:
    kv = unwritten_pool(1, 2, BLOCK, 1, 4, torch.float32)
    metadata, _ = AttentionMetadata.build([2], [2], torch.tensor([[0]], dtype=torch.int32), BLOCK)
    step = PagedStep((AttentionCall(1, 1, 4, 4),), metadata, kv, SDPAAttention())
    x = torch.zeros(1, 1, 2, 4)
    step.attend(x, x, x, SCALE, None, None)
    with pytest.raises(UnsupportedAttention, match="more often"):
        step.attend(x, x, x, SCALE, None, None)
    with pytest.raises(UnsupportedAttention, match="masks by itself"):
        transformers_interface.check_arguments(torch.zeros(1), {})
    with pytest.raises(UnsupportedAttention, match="position_bias"):
        transformers_interface.check_arguments(None, {"position_bias": torch.zeros(1)})
