"""Mixtures of experts: the kernels' one call gives the numbers of one product an expert, and the same bits in any
batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories.models.kernels import assert_close
from factories.models.native import PRODUCT_SETS, use_instruction_set
from penstock.generation.core.model_config import Activation, Experts
from penstock.generation.layers.experts import MixtureOfExperts, OneByOne, SharedExpert
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear.native import Format, NativeLinearMethod
from torch import Tensor

HIDDEN, INNER, COUNT = 72, 40, 5


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def mixture(format: Format, dtype: torch.dtype, activation: Activation, *, per_row: int = 2) -> MixtureOfExperts:
    draw = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw) / 6).to(dtype)

    method = NativeLinearMethod(format)
    experts = [
        (
            method.gated(weight(2 * INNER, HIDDEN), weight(2 * INNER), LayerKernels(), activation),
            method.linear(weight(HIDDEN, INNER), weight(HIDDEN)),
        )
        for _ in range(COUNT)
    ]
    dense = NativeLinearMethod(Format.BF16 if dtype is torch.bfloat16 else Format.F32)
    config = Experts(COUNT, per_row, INNER, sums_to_one=True, layers=(True,))
    return MixtureOfExperts(config, dense.linear(weight(COUNT, HIDDEN), None), experts)


def rows(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (Format.F32, torch.float32),
        (Format.BF16, torch.bfloat16),
        (Format.INT8, torch.bfloat16),
        (Format.ROTATED_INT8, torch.bfloat16),
        (Format.INT4, torch.float32),
    ],
)
def test_one_call_is_one_product_an_expert(format: Format, dtype: torch.dtype, activation: Activation) -> None:
    experts = mixture(format, dtype, activation)
    for count in (1, 2, 30):
        x = rows(count, dtype)
        chosen, shares = experts.route(experts.router.as_float(x))
        assert_close(experts._multiply(x, chosen, shares), OneByOne(experts.experts)(x, chosen, shares), 1e-5)


@pytest.mark.parametrize("format", [Format.BF16, Format.INT8, Format.ROTATED_INT8, Format.INT4])
def test_a_row_is_the_same_alone_in_a_batch_and_on_other_threads(format: Format) -> None:
    experts = mixture(format, torch.bfloat16, Activation.SILU)
    x = rows(40, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        chosen, shares = experts.route(experts.router.as_float(x))
        together = experts._multiply(x, chosen, shares)
        torch.set_num_threads(1)
        alone = [experts._multiply(x[i : i + 1], chosen[i : i + 1], shares[i : i + 1]) for i in range(len(x))]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


def test_a_shared_experts_part_is_the_same_in_any_company() -> None:
    """Numbers of rows that torch's vectors take whole, in part and not at all."""
    draw, method = torch.Generator().manual_seed(4), NativeLinearMethod(Format.F32)
    gated = method.gated(torch.randn(2 * INNER, HIDDEN, generator=draw) / 6, None, LayerKernels(), Activation.SILU)
    down, gate = (
        method.linear(torch.randn(shape, generator=draw) / 6, None) for shape in ((HIDDEN, INNER), (1, HIDDEN))
    )
    shared = SharedExpert(gated, down, gate)
    x = rows(130, torch.float32)

    def part(count: int) -> Tensor:
        out = torch.zeros(count, HIDDEN)
        shared.add_to(out, x[:count])
        return out

    whole = part(len(x))
    differing = [count for count in range(1, len(x)) if not torch.equal(part(count), whole[:count])]
    assert differing == []


def test_shares_of_all_experts_add_up_to_one() -> None:
    experts = mixture(Format.F32, torch.float32, Activation.SILU, per_row=COUNT)
    chosen, shares = experts.route(torch.randn(4, COUNT))
    assert chosen.tolist() == [list(range(COUNT))] * 4
    torch.testing.assert_close(shares.sum(1), torch.ones(4))


def test_impossible_arguments_raise() -> None:
    experts = mixture(Format.F32, torch.float32, Activation.SILU)
    x, chosen, shares = rows(2, torch.float32), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)
    with pytest.raises(IndexError, match="no such expert"):
        experts._multiply(x, chosen + COUNT, shares)
    with pytest.raises(RuntimeError, match="not the experts' input"):
        experts._multiply(x[:, :-1], chosen, shares)
    with pytest.raises(RuntimeError):
        experts._multiply(x, chosen[:1], shares)
