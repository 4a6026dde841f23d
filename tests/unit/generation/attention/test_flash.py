"""Attention of a GPU: what goes to FlashAttention, what goes to torch's general operators, and that both agree."""

from __future__ import annotations

import pytest
import torch
from factories.models import emulated_cuda
from penstock.generation.attention.base import AttentionMetadata, HeadWeights, turned
from penstock.generation.attention.cuda import FlashAttention, FlashLimits, TurnAndWrite
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.sdpa import SDPAAttention

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
LOOSE = emulated_cuda.EmulatedCUDA.limits


def step(
    attention: FlashAttention | SDPAAttention, dtype: torch.dtype, pool: torch.dtype, **options: object
) -> torch.Tensor:
    """A prompt, a decoding sequence and a chunk behind a context, on a pool of random keys and values."""
    generator = torch.Generator().manual_seed(0)
    kv = KVCachePool(1, 12, BLOCK, KV_HEADS, DIM, pool, torch.device("cpu"))
    if pool is not torch.int8:
        kv.tensors[0].copy_(torch.randn(kv.tensors[0].shape, generator=generator))
    tables = torch.tensor([[3, 1, 0, 0], [5, 2, 7, 0], [4, 6, 8, 9]], dtype=torch.int32)
    metadata, _ = AttentionMetadata.build([9, 1, 5], [9, 20, 30], tables, BLOCK)
    q, k, v = (torch.randn(15, heads, DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    window = options.pop("window", None)
    return attention.forward(q, k, v, 0, metadata, kv, 0.3, window, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 4, 12, 40])
def test_it_gives_what_the_general_operators_give(window: int | None) -> None:
    emulated_cuda.install()
    before = emulated_cuda.calls[0]
    found = step(FlashAttention(LOOSE), torch.float32, torch.float32, window=window)
    assert emulated_cuda.calls[0] == before + 1
    torch.testing.assert_close(found, step(SDPAAttention(), torch.float32, torch.float32, window=window))


@pytest.mark.parametrize(
    ("limits", "dtype", "pool", "options"),
    [
        (LOOSE, torch.float32, torch.float32, {"softcap": 20.0}),
        (LOOSE, torch.float32, torch.float32, {"sinks": torch.ones(HEADS)}),
        (LOOSE, torch.float32, torch.int8, {}),
        (FlashLimits(), torch.float32, torch.float32, {}),
        # Blocks of another size than the operator's tiles.
        (FlashLimits(), torch.bfloat16, torch.bfloat16, {}),
    ],
)
def test_what_it_has_not_goes_to_the_general_operators(
    limits: FlashLimits, dtype: torch.dtype, pool: torch.dtype, options: dict[str, object]
) -> None:
    emulated_cuda.install()
    before = emulated_cuda.calls[0]
    found = step(FlashAttention(limits), dtype, pool, **options)
    assert emulated_cuda.calls[0] == before
    assert torch.equal(found, step(SDPAAttention(), dtype, pool, **options))


def projected(attention: FlashAttention, heads: HeadWeights, pool: torch.dtype = torch.float32) -> torch.Tensor:
    """The same from the fused projection, where keys are turned on their way into the pool."""
    generator = torch.Generator().manual_seed(0)
    kv = KVCachePool(1, 12, BLOCK, KV_HEADS, DIM, pool, torch.device("cpu"))
    tables = torch.tensor([[3, 1], [5, 2]], dtype=torch.int32)
    metadata, _ = AttentionMetadata.build([9, 1], [9, 1], tables, BLOCK)
    qkv = torch.randn(10, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
    angles = torch.randn(10, 1, DIM // 2, generator=generator)
    return attention.forward_qkv(qkv, angles.cos(), angles.sin(), heads, 0, metadata, kv, 0.3, None)


def turn_and_write(calls: list[int]) -> TurnAndWrite:
    """gpu_operators.turn_and_write in torch's operators, which counts its calls."""

    def call(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: HeadWeights,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        calls.append(len(qkv))
        q, k, v = turned(qkv, cos, sin, heads)
        keys.view(-1, KV_HEADS, DIM)[slots], values.view(-1, KV_HEADS, DIM)[slots] = k, v
        return q

    return call


NORMS = (torch.linspace(0.5, 1.5, DIM), torch.linspace(1.5, 0.5, DIM))
WHOLE = (torch.linspace(0.5, 1.5, HEADS * DIM), torch.linspace(1.5, 0.5, KV_HEADS * DIM))


@pytest.mark.parametrize(
    ("heads", "pool", "is_fused"),
    [
        (HeadWeights(HEADS, KV_HEADS, DIM), torch.float32, True),
        (HeadWeights(HEADS, KV_HEADS, DIM, *NORMS, eps=1e-6), torch.float32, True),
        (HeadWeights(HEADS, KV_HEADS, DIM, *WHOLE, eps=1e-6, norm_is_whole=True), torch.float32, False),
        (HeadWeights(HEADS, KV_HEADS, DIM, softcap=20.0), torch.float32, False),
        (HeadWeights(HEADS, KV_HEADS, DIM, sinks=torch.ones(HEADS)), torch.float32, False),
        (HeadWeights(HEADS, KV_HEADS, DIM), torch.int8, False),
    ],
)
def test_heads_go_into_the_pool_in_one_pass(heads: HeadWeights, pool: torch.dtype, is_fused: bool) -> None:
    emulated_cuda.install()
    calls: list[int] = []
    found = projected(FlashAttention(LOOSE, turn_and_write=turn_and_write(calls)), heads, pool)
    assert calls == [10] * is_fused
    torch.testing.assert_close(found, projected(FlashAttention(LOOSE), heads, pool))
