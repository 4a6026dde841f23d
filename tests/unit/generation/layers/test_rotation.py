"""Blocks that are turned before a row is rounded: the product stays, and an outlier no longer spoils its row."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.layers.linear.base import WholeRows
from penstock.generation.layers.linear.int8 import Int8Linear
from penstock.generation.layers.linear.rotation import halved, rotated, rotated_by_product, rotation_block


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("inputs", "block"), [(576, 64), (1536, 64), (4864, 64), (96, 32), (48, 16), (16, 16), (24, 1), (43, 1)]
)
def test_a_block_is_the_largest_that_divides_the_inputs(inputs: int, block: int) -> None:
    assert rotation_block(inputs) == block


@pytest.mark.parametrize("inputs", [128, 96, 48, 43])
def test_a_product_of_turned_rows_is_that_of_the_rows(inputs: int) -> None:
    weight, x, block = numbers(8, inputs), numbers(5, inputs, seed=1), rotation_block(inputs)
    torch.testing.assert_close(rotated(x, block) @ rotated(weight, block).t() / block, x @ weight.t())
    torch.testing.assert_close(rotated_by_product(x, block) * halved(block), rotated(x, block))
    assert torch.equal(rotated(rotated(torch.eye(inputs), block), block), torch.eye(inputs) * block)


def error_of(linear: Int8Linear, weight: torch.Tensor, x: torch.Tensor) -> float:
    exact = x.double() @ weight.double().t()
    return float((linear(x) - exact).norm() / exact.norm())


def test_outliers_of_a_row_are_no_longer_its_error() -> None:
    """As real models have them, and random ones do not: some channels of x are fifty times the others."""
    weight, x = numbers(64, 1024), numbers(16, 1024, seed=1)
    x[:, ::97] *= 50.0
    weight[:, ::97] *= 0.05
    largest = weight.abs().amax(1)
    as_it_is = WholeRows((weight / largest[:, None] * 127).round().to(torch.int8), largest / 127)
    assert error_of(Int8Linear(as_it_is, None), weight, x) > 0.15
    assert error_of(Int8Linear(weight, None), weight, x) < 0.06


def test_whole_numbers_are_kept_as_they_are() -> None:
    values = torch.arange(-64, 64).view(2, 64).to(torch.int8)
    linear = Int8Linear(WholeRows(values, torch.tensor([0.5, 0.25])), None)
    assert torch.equal(linear(torch.eye(64) * 127), (values.t() * torch.tensor([0.5, 0.25])).float() * 127)
