"""Native attention: the reference's numbers over random shapes, and the same bits however a step is composed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from factories.models.kernels import TOLERANCE, Context, Layer, Shape, assert_close, contexts, shapes
from factories.models.native import PRODUCT_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.base import Attention
from penstock.generation.attention.native import NativeAttention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.native import library
from torch import Tensor

dtypes = st.sampled_from(library.DTYPES)
lengths = st.lists(st.integers(1, 200), min_size=1, max_size=4)
# A soft cap, and whether there are sinks or slopes.
scores = st.tuples(st.sampled_from([0.0, 0.0, 0.7, 4.0]), st.sampled_from(["", "sinks", "slopes"]))


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def num_blocks(shape: Shape, lengths: list[int]) -> int:
    return sum(-(-length // shape.block_size) for length in lengths) + 2


def changed_scores(shape: Shape, softcap: float, own: str) -> dict[str, Any]:
    """Return fields of AttentionLayer."""
    return {"softcap": softcap, **({own: torch.rand(shape.heads)} if own else {})}


@settings(max_examples=30, deadline=None)
@given(
    dtype=dtypes,
    is_int8=st.booleans(),
    shape=shapes,
    lengths=lengths,
    seed=st.integers(0, 1000),
    has_norm=st.booleans(),
    scores=scores,
    data=st.data(),
)
def check_reference(
    dtype: torch.dtype,
    is_int8: bool,
    shape: Shape,
    lengths: list[int],
    seed: int,
    has_norm: bool,
    scores: tuple[float, str],
    data: st.DataObject,
) -> None:
    torch.manual_seed(seed)
    heads = changed_scores(shape, *scores)
    sequences = contexts(shape, lengths, dtype, seed)
    cuts = [data.draw(st.lists(st.integers(1, n - 1), max_size=2).map(sorted)) if n > 1 else [] for n in lengths]
    cuts = [sorted(set(own)) for own in cuts]
    # Norms as models have them: with large weights rounding errors are beyond the tolerance now and then, in torch as
    # well.
    norms = [(1 + torch.randn(shape.head_dim) / 4).to(dtype) for _ in "qk"] if has_norm else []

    def run(attention: Attention, dtype: torch.dtype) -> list[Tensor]:
        layer = Layer(attention, shape, torch.int8 if is_int8 else dtype, num_blocks(shape, lengths), seed)
        layer.with_heads(**heads)
        if norms:
            layer.with_norms(*(norm.to(dtype) for norm in norms))
        return layer.run([Context(one.qkv_TE.to(dtype)) for one in sequences], cuts)

    # In fp32, so that roundings count once; int8 is of what was rounded.
    references = run(SDPAAttention(), dtype if is_int8 else torch.float32)
    # A rounding of the input may be a whole step of int8, 1 / 127 of the largest.
    tolerance = 4e-2 if is_int8 else TOLERANCE[dtype]
    for native, reference in zip(run(NativeAttention(), dtype), references, strict=True):
        assert native.dtype is dtype
        assert_close(native.to(reference.dtype), reference, tolerance)


def test_attention_reads_and_writes_the_pool_as_the_reference_does() -> None:
    check_reference()


@settings(max_examples=40, deadline=None)
@given(
    dtype=dtypes,
    is_int8=st.booleans(),
    shape=shapes,
    lengths=lengths,
    seed=st.integers(0, 1000),
    scores=scores,
    data=st.data(),
)
def check_composition(
    dtype: torch.dtype,
    is_int8: bool,
    shape: Shape,
    lengths: list[int],
    seed: int,
    scores: tuple[float, str],
    data: st.DataObject,
) -> None:
    sequences = contexts(shape, lengths, dtype, seed)
    kv_dtype = torch.int8 if is_int8 else dtype
    heads = changed_scores(shape, *scores)

    def layer(lengths: list[int], seed: int) -> Layer:
        return Layer(NativeAttention(), shape, kv_dtype, num_blocks(shape, lengths), seed).with_heads(**heads)

    whole = [layer([n], seed).run([sequence], [[]])[0] for sequence, n in zip(sequences, lengths, strict=True)]
    # Chunks of any size, decode steps at the end, other sequences beside them, other blocks.
    cuts = []
    for n in lengths:
        decode = data.draw(st.integers(0, min(6, n - 1)))
        inner = data.draw(st.sets(st.integers(1, max(1, n - 1 - decode)), max_size=3)) if n - decode > 1 else set()
        cuts.append(sorted(inner | set(range(n - decode, n))))
    cuts = [[cut for cut in own if 0 < cut < n] for own, n in zip(cuts, lengths, strict=True)]
    together = layer(lengths, seed + 1).run(sequences, cuts)
    for found, expected in zip(together, whole, strict=True):
        assert torch.equal(found, expected)


def test_a_rows_result_does_not_depend_on_how_the_step_is_composed() -> None:
    check_composition()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [33, 100])
def test_a_window_begins_at_the_same_sums_in_every_chunk(window: int, dtype: torch.dtype) -> None:
    """Several keys are summed apart: a chunk that begins later leaves out the oldest keys of the whole."""
    shape = Shape(kv_heads=1, group=4, head_dim=64, block_size=16, window=window)

    def rows(seed: int, cuts: list[int]) -> Tensor:
        layer = Layer(NativeAttention(), shape, dtype, num_blocks(shape, [200]), seed)
        return layer.run(contexts(shape, [200], dtype, seed), [cuts])[0]

    for seed in range(4):
        whole = rows(seed, [])
        for cut in range(105, 150, 8):
            assert torch.equal(rows(seed, [cut, cut + 1]), whole), (seed, cut)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_a_nan_reaches_every_row_that_sees_it(where: str, kv_dtype: torch.dtype) -> None:
    shape = Shape(kv_heads=1, group=2, head_dim=16, block_size=4, window=None)
    (sequence,) = contexts(shape, [9], torch.float32, 0)
    first = {"query": 0, "key": 2, "value": 3}[where] * shape.head_dim
    sequence.qkv_TE[5, first] = torch.nan
    for cuts in ([], [4, 6, 7, 8]):
        found = Layer(NativeAttention(), shape, kv_dtype, 5, 0).run([sequence], [cuts])[0]
        sick = found.isnan().flatten(1).any(1)
        assert sick[5:6].all() if where == "query" else sick[5:].all()
        # In one chunk a value that is NaN may reach the rows before it, times 0.
        assert not sick[: 4 if cuts else 0].any()


@pytest.mark.parametrize("dtype", library.DTYPES)
# Whole heads are turned, blocks of 64, of 16, and nothing.
@pytest.mark.parametrize("head_dim", [256, 192, 128, 64, 48, 24])
def test_int8_values_are_stored_with_the_bits_of_torch(head_dim: int, dtype: torch.dtype) -> None:
    """So either reads what the other wrote. Of values alone: no rotary embedding changes them."""
    shape = Shape(kv_heads=2, group=1, head_dim=head_dim, block_size=4, window=None)
    (sequence,) = contexts(shape, [9], dtype, 0)
    pools = []
    for attention in (NativeAttention(), SDPAAttention()):
        layer = Layer(attention, shape, torch.int8, 5, 0)
        layer.run([sequence], [[4]])
        pools.append(layer.kv)
    one, other = pools
    assert torch.equal(one.value(0), other.value(0))
    torch.testing.assert_close(one.value_scale(0), other.value_scale(0), rtol=0, atol=0, equal_nan=True)
