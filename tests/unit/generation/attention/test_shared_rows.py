"""Native attention over rows that are keys and values of all heads: the reference's numbers, and the same bits however
a step is composed and shared among threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from factories.engine.pools import unwritten_pool
from factories.models.kernels import TOLERANCE, Context, Layer, Shape, assert_close, contexts
from factories.models.native import PRODUCT_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata
from penstock.generation.attention.native import NativeAttention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.native import library
from torch import Tensor

# Numbers of a row, and those of them that outputs have: published ones, ones that fill no vector, and ones that cut a
# block of int8's turned heads.
WIDTHS = [(576, 512), (288, 256), (96, 64), (40, 24), (28, 20), (30, 15), (96, 80)]
shapes = st.builds(
    Shape,
    kv_heads=st.just(1),
    group=st.sampled_from([1, 4, 9, 16, 40, 128]),
    head_dim=st.just(0),
    block_size=st.sampled_from([1, 3, 16, 32]),
    window=st.sampled_from([None, None, None, 7, 100]),
)
lengths = st.lists(st.integers(1, 150), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


class SharedRows(Layer):
    """A layer with one row a token."""

    def __init__(
        self, attention: Attention, shape: Shape, value_dim: int, kv_dtype: torch.dtype, lengths: list[int]
    ) -> None:
        num_blocks = sum(-(-length // shape.block_size) for length in lengths) + 2
        super().__init__(attention, shape, kv_dtype, num_blocks, seed=3)
        self.kv = unwritten_pool(1, num_blocks, shape.block_size, 1, shape.head_dim, kv_dtype, has_values=False)
        self._value_dim = value_dim

    def _forward(self, qkv: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        shape, value_dim = self.shape, self._value_dim
        rows = qkv.view(len(qkv), shape.heads + 2, shape.head_dim)
        layer = AttentionLayer(
            shape.heads, 1, shape.head_dim, shape.head_dim**-0.5, window=shape.window, value_dim=value_dim
        )
        query, row = rows[:, : shape.heads].contiguous(), rows[:, shape.heads : shape.heads + 1].contiguous()
        return self._attention.forward(query, row, row, layer, metadata, self.kv)[..., :value_dim]


def cuts_of(data: st.DataObject, length: int) -> list[int]:
    """Draw the ends of chunks, with decode steps at the end."""
    decode = data.draw(st.integers(0, min(4, length - 1)))
    chunk = data.draw(st.sampled_from([7, 50, 200]))
    return [*range(chunk, length - decode, chunk), *range(length - decode, length)] if length > 1 else []


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(library.DTYPES),
    is_int8=st.booleans(),
    shape=shapes,
    widths=st.sampled_from(WIDTHS),
    lengths=lengths,
    seed=st.integers(0, 1000),
    data=st.data(),
)
def check_reference(
    dtype: torch.dtype,
    is_int8: bool,
    shape: Shape,
    widths: tuple[int, int],
    lengths: list[int],
    seed: int,
    data: st.DataObject,
) -> None:
    shape, value_dim = replace(shape, head_dim=widths[0]), widths[1]
    sequences = contexts(shape, lengths, dtype, seed)
    cuts = [sorted(set(cuts_of(data, length))) for length in lengths]

    def run(attention: Attention, dtype: torch.dtype) -> list[Tensor]:
        layer = SharedRows(attention, shape, value_dim, torch.int8 if is_int8 else dtype, lengths)
        return layer.run([Context(one.qkv_TE.to(dtype)) for one in sequences], cuts)

    references = run(SDPAAttention(), dtype if is_int8 else torch.float32)
    # A score is a sum of up to 576 products, not of 128.
    tolerance = 4e-2 if is_int8 else 2 * TOLERANCE[dtype]
    for native, reference in zip(run(NativeAttention(), dtype), references, strict=True):
        assert_close(native.to(reference.dtype), reference, tolerance)


def test_rows_are_keys_and_values_as_in_the_reference() -> None:
    check_reference()


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(library.DTYPES),
    is_int8=st.booleans(),
    shape=shapes,
    widths=st.sampled_from(WIDTHS),
    lengths=lengths,
    seed=st.integers(0, 1000),
    threads=st.sampled_from([1, 2, 5]),
    data=st.data(),
)
def check_composition(
    dtype: torch.dtype,
    is_int8: bool,
    shape: Shape,
    widths: tuple[int, int],
    lengths: list[int],
    seed: int,
    threads: int,
    data: st.DataObject,
) -> None:
    shape, value_dim = replace(shape, head_dim=widths[0]), widths[1]
    sequences = contexts(shape, lengths, dtype, seed)
    kv_dtype = torch.int8 if is_int8 else dtype

    def outputs(sequences: list[Context], cuts: list[list[int]]) -> list[Tensor]:
        counts = [len(one.qkv_TE) for one in sequences]
        return SharedRows(NativeAttention(), shape, value_dim, kv_dtype, counts).run(sequences, cuts)

    torch.set_num_threads(2)
    whole = [outputs([sequence], [[]])[0] for sequence in sequences]
    cuts = [sorted(set(cuts_of(data, length))) for length in lengths]
    torch.set_num_threads(threads)
    for alone, together in zip(whole, outputs(sequences, cuts), strict=True):
        assert torch.equal(alone, together)


def test_a_row_has_the_same_bits_in_any_step_on_any_number_of_threads() -> None:
    check_composition()
