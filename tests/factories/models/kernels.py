"""Steps of attention alone, on random projections, for comparing its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from factories.engine.pools import unwritten_pool
from hypothesis import strategies as st
from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata
from torch import Tensor

# Largest difference of a result, relative to the largest of the reference: a few roundings of the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
# Positions of which cosines and sines are computed together: a multiple of any vector.
TABLE = 256


def assert_close(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Assert that shape and dtype are the same, and the numbers nearly."""
    assert found.shape == expected.shape
    assert found.dtype is expected.dtype
    limit = (tolerance or TOLERANCE[expected.dtype]) * max(1.0, float(expected.float().abs().max()))
    largest = float((found.float() - expected.float()).abs().max())
    assert largest <= limit, f"{largest:.3g} of {limit:.3g}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's attention and its pool."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([2, 6, 16, 32, 64, 80, 128, 256, 512]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    window=st.sampled_from([None, None, 1, 7, 64, 100]),
)


@dataclass(frozen=True, slots=True)
class Context:
    """One sequence: the fused projections of all its tokens."""

    qkv_TE: Tensor


def contexts(shape: Shape, lengths: list[int], dtype: torch.dtype, seed: int) -> list[Context]:
    """Make random projections of as many sequences."""
    generator = torch.Generator().manual_seed(seed)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return [Context(torch.randn(length, width, generator=generator).to(dtype)) for length in lengths]


class Layer:
    """One layer of a model that is nothing but attention, over a pool that is NaN where nothing was written."""

    def __init__(self, attention: Attention, shape: Shape, kv_dtype: torch.dtype, num_blocks: int, seed: int) -> None:
        self.shape = shape
        self.kv = unwritten_pool(1, num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, kv_dtype)
        self._attention = attention
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        self._blocks: dict[int, list[int]] = {}
        self._heads: dict[str, Any] = {}

    def with_heads(self, **fields: Any) -> Layer:
        """Set fields of AttentionLayer: norms, a soft cap, sinks."""
        self._heads |= fields
        return self

    def with_norms(self, q_norm: Tensor, k_norm: Tensor) -> Layer:
        """Qwen3's norms of the heads."""
        return self.with_heads(q_norm=q_norm, k_norm=k_norm)

    def step(self, chunks: dict[int, tuple[Tensor, int, int]]) -> dict[int, Tensor]:
        """Compute rows [first, last) of each sequence from its projections; return their outputs."""
        size = self.shape.block_size
        for name, (_, _, last) in chunks.items():
            own = self._blocks.setdefault(name, [])
            own += [self._free.pop() for _ in range(-(-last // size) - len(own))]
        tables = torch.zeros((len(chunks), max(len(self._blocks[name]) for name in chunks)), dtype=torch.int32)
        for row, name in enumerate(chunks):
            tables[row, : len(self._blocks[name])] = torch.tensor(self._blocks[name])
        counts = [last - first for _, first, last in chunks.values()]
        metadata, positions = AttentionMetadata.build(counts, [last for _, _, last in chunks.values()], tables, size)
        qkv = torch.cat([rows[first:last] for rows, first, last in chunks.values()])
        out = self._forward(qkv, positions, metadata)
        return dict(zip(chunks, out.split(counts), strict=True))

    def _forward(self, qkv: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        shape = self.shape
        # A table, as models have one: on arm64 torch's sine of a number depends on where in the tensor it stands.
        every = torch.arange(int(positions.max()) // TABLE * TABLE + TABLE)
        angles = every[:, None] / 100.0 ** torch.linspace(0, 1, shape.head_dim // 2)
        cos, sin = (part.to(qkv.dtype)[positions][:, None] for part in (angles.cos(), angles.sin()))
        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        layer = AttentionLayer(*sizes, shape.head_dim**-0.5, window=shape.window, eps=1e-6, **self._heads)
        return self._attention.forward_qkv(qkv, cos, sin, layer, metadata, self.kv)

    def run(self, sequences: list[Context], cuts: list[list[int]]) -> list[Tensor]:
        """Compute all rows of each sequence, in the chunks between its cuts; step i computes the i-th chunk of each."""
        spans = [list(pairwise([0, *own, len(x.qkv_TE)])) for own, x in zip(cuts, sequences, strict=True)]
        outputs: list[list[Tensor]] = [[] for _ in sequences]
        for number in range(max(map(len, spans))):
            chunks: dict[int, Any] = {
                name: (sequences[name].qkv_TE, *own[number]) for name, own in enumerate(spans) if number < len(own)
            }
            for name, rows in self.step(chunks).items():
                outputs[name].append(rows)
        return [torch.cat(rows) for rows in outputs]
