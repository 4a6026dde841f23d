"""Heads of an int8 pool are turned: scores and outputs stay, and an outlier no longer spoils its head."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.turned_heads import TurnedHeads
from torch import Tensor

CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pool(head_dim: int, dtype: torch.dtype = torch.int8) -> KVCachePool:
    return KVCachePool(1, 4, 4, 2, head_dim, dtype, CPU)


@pytest.mark.parametrize("head_dim", [256, 192, 128, 96, 80, 64, 32, 16, 24])
def test_scores_and_outputs_are_those_of_heads_that_are_not_turned(head_dim: int) -> None:
    turned = TurnedHeads(head_dim, CPU)
    q, k, v = (numbers(5, 2, head_dim, seed=seed) for seed in range(3))
    scores = torch.einsum("qhd,khd->hqk", turned.back(q), turned.stored(k))
    torch.testing.assert_close(scores, torch.einsum("qhd,khd->hqk", q, k), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned.back(turned.stored(v)), v, rtol=1e-5, atol=1e-5)


def test_a_head_that_no_block_divides_stays_as_it_is() -> None:
    turned, x = TurnedHeads(24, CPU), numbers(3, 2, 24)
    assert torch.equal(turned.stored(x), x)
    assert turned.back(x) is x


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_outlier_no_longer_spoils_its_head(head_dim: int, dtype: torch.dtype) -> None:
    """As keys have them: one dim is far larger than the others, which then have a few bits."""
    kv, slots = pool(head_dim), torch.arange(16)
    k, v = (numbers(16, 2, head_dim, seed=seed) for seed in range(2))
    k[:, :, 3] += 60.0
    k, v = k.to(dtype), v.to(dtype)
    kv.write(0, slots, k, v)
    keys, values = kv.read(0, slots, torch.float32)
    others = [at for at in range(head_dim) if at != 3]
    # Half a step of 127 in the largest number would be 0.24.
    assert float((keys - k.float())[..., others].abs().max()) < 0.24 * 8 / head_dim**0.5
    assert float((values - v.float()).abs().max()) < 0.04


def test_what_is_read_for_attention_is_what_a_step_attends_to() -> None:
    kv, slots = pool(64), torch.tensor([3, 9])
    k, v = numbers(2, 2, 64), numbers(2, 2, 64, seed=1)
    written = kv.write(0, slots, k, v)
    for one, other in zip(written, kv.read_stored(0, slots, torch.float32), strict=True):
        assert torch.equal(one, other)
    q = numbers(3, 4, 64, seed=2)
    assert kv.turned(q).shape == q.shape
    own = pool(64, torch.float32)
    own.write(0, slots, k, v)
    assert own.turned(q) is q
    assert torch.equal(own.read(0, slots, torch.float32)[0], k)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_row_alone_is_stored_as_that_row_in_a_batch(head_dim: int) -> None:
    turned, x = TurnedHeads(head_dim, CPU), numbers(70, 3, head_dim)
    together = turned.stored(x)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20)):
        assert torch.equal(turned.stored(x[rows]), together[rows])
