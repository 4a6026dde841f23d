"""Rows of compressed keys and values, and their queries: one call of the kernels gives what torch's operators give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories.models.kernels import assert_close
from factories.models.native import PRODUCT_SETS, use_instruction_set
from penstock.generation.core.latent_heads import LatentHeads
from penstock.generation.layers.decoder_layer import RMSNorm
from penstock.generation.layers.latent_rows import _TorchFinish, finished_rows
from penstock.generation.layers.layer_kernels import LayerKernels, NativeKernels
from torch import Tensor

SIZES = LatentHeads(rank=40, plain_dim=12, turned_dim=8, value_dim=16, query_rank=0)
HEADS = 3


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    angles = drawn(3, count, 1, SIZES.turned_dim // 2, dtype=torch.float32)
    return (
        drawn(1, count, HEADS, SIZES.query_dim, dtype=dtype),
        drawn(2, count, SIZES.row_dim, dtype=dtype),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 300])
def test_one_call_is_the_operators(dtype: torch.dtype, weight_dtype: torch.dtype | None, count: int) -> None:
    norm = RMSNorm(drawn(4, SIZES.rank, dtype=weight_dtype or dtype), 1e-5, NativeKernels(dtype))
    q, row, cos, sin = rows_of(count, dtype)
    expected = _TorchFinish(SIZES, norm)(q.clone(), row.clone(), cos, sin)
    found = finished_rows(SIZES, norm)(q.clone(), row.clone(), cos, sin)
    for one, other in (
        (found.plain_THX, expected.plain_THX),
        (found.turned_THX, expected.turned_THX),
        (found.row_T1E, expected.row_T1E),
        (found.turned_queries(), expected.turned_queries()),
    ):
        if dtype is torch.bfloat16:
            assert torch.equal(one, other)
        else:
            assert_close(one, other)
    # A row has the same bits alone.
    alone = finished_rows(SIZES, norm)(q[-1:].clone(), row[-1:].clone(), cos[-1:], sin[-1:])
    assert torch.equal(alone.row_T1E[0], found.row_T1E[-1])
    assert torch.equal(alone.turned_THX[0], found.turned_THX[-1])


def test_rows_can_be_chosen() -> None:
    norm = RMSNorm(torch.ones(SIZES.rank), 1e-5, NativeKernels(torch.float32))
    found = finished_rows(SIZES, norm)(*rows_of(5, torch.float32))
    some = found.select(torch.tensor([0, 3]))
    assert torch.equal(some.row_T1E, found.row_T1E[[0, 3]])
    assert torch.equal(some.turned_queries(), found.turned_queries()[[0, 3]])


def test_torch_has_its_own_operators() -> None:
    norm = RMSNorm(torch.ones(SIZES.rank), 1e-5, LayerKernels())
    q, row, cos, sin = rows_of(2, torch.float32)
    kept = q.clone(), row.clone()
    finished_rows(SIZES, norm)(q, row, cos, sin)
    assert torch.equal(q, kept[0])
    assert torch.equal(row, kept[1])


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_other_sizes_are_refused(wrong: int) -> None:
    norm = RMSNorm(torch.ones(SIZES.rank), 1e-5, NativeKernels(torch.float32))
    given = list(rows_of(4, torch.float32))
    given[wrong] = given[wrong][..., :-2].contiguous()
    with pytest.raises(RuntimeError):
        finished_rows(SIZES, norm)(*given)
