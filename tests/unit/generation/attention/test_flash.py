"""Attention of a GPU: what goes to FlashAttention, what goes to torch's general operators, and that both agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories.models import emulated_cuda
from penstock.generation.attention.base import AttentionLayer, AttentionMetadata, turned
from penstock.generation.attention.cuda import FlashAttention, FlashLimits, TurnAndWrite
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.sdpa import SDPAAttention

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
LOOSE = emulated_cuda.EmulatedCUDA.limits
LAYER = AttentionLayer(HEADS, KV_HEADS, DIM, 0.3)


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
    return attention.forward(q, k, v, replace(LAYER, **options), metadata, kv)  # type: ignore[arg-type]


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
        (LOOSE, torch.float32, torch.float32, {"slopes": torch.ones(HEADS)}),
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


def projected(attention: FlashAttention, layer: AttentionLayer, pool: torch.dtype = torch.float32) -> torch.Tensor:
    """The same from the fused projection, where keys are turned on their way into the pool."""
    generator = torch.Generator().manual_seed(0)
    kv = KVCachePool(1, 12, BLOCK, KV_HEADS, DIM, pool, torch.device("cpu"))
    tables = torch.tensor([[3, 1], [5, 2]], dtype=torch.int32)
    metadata, _ = AttentionMetadata.build([9, 1], [9, 1], tables, BLOCK)
    qkv = torch.randn(10, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
    angles = torch.randn(10, 1, DIM // 2, generator=generator)
    return attention.forward_qkv(qkv, angles.cos(), angles.sin(), layer, metadata, kv)


def turn_and_write(calls: list[int]) -> TurnAndWrite:
    """gpu_operators.turn_and_write in torch's operators, which counts its calls."""

    def call(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: AttentionLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        calls.append(len(qkv))
        q, k, v = turned(qkv, cos, sin, layer)
        keys.view(-1, KV_HEADS, DIM)[slots], values.view(-1, KV_HEADS, DIM)[slots] = k, v
        return q

    return call


def norms(query: int, kv: int) -> dict[str, torch.Tensor]:
    return {"q_norm": torch.linspace(0.5, 1.5, query), "k_norm": torch.linspace(1.5, 0.5, kv)}


NORMED = replace(LAYER, **norms(DIM, DIM), eps=1e-6)
WHOLE = replace(LAYER, **norms(HEADS * DIM, KV_HEADS * DIM), eps=1e-6, norm_is_whole=True)


@pytest.mark.parametrize(
    ("layer", "pool", "is_fused"),
    [
        (LAYER, torch.float32, True),
        (NORMED, torch.float32, True),
        (WHOLE, torch.float32, False),
        (replace(LAYER, softcap=20.0), torch.float32, False),
        (replace(LAYER, sinks=torch.ones(HEADS)), torch.float32, False),
        (LAYER, torch.int8, False),
    ],
)
def test_heads_go_into_the_pool_in_one_pass(layer: AttentionLayer, pool: torch.dtype, is_fused: bool) -> None:
    emulated_cuda.install()
    calls: list[int] = []
    found = projected(FlashAttention(LOOSE, turn_and_write=turn_and_write(calls)), layer, pool)
    assert calls == [10] * is_fused
    torch.testing.assert_close(found, projected(FlashAttention(LOOSE), layer, pool))
