"""Blocks that are turned before a row is rounded: the product stays, and an outlier no longer spoils its row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from penstock.generation.layers.linear.base import WholeRows
from penstock.generation.layers.linear.int8 import Int8Linear
from penstock.generation.layers.linear.int8_accelerator import AcceleratorInt8Linear
from penstock.generation.rounding.rotation import (
    halved,
    rotated,
    rotated_by_product,
    rotation_block,
    rotation_matrix,
)
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts what torch is asked for, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


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
    matrix = rotation_matrix(block, x.dtype, x.device)
    torch.testing.assert_close(rotated_by_product(x, matrix) * halved(block), rotated(x, block))
    assert torch.equal(rotated(rotated(torch.eye(inputs), block), block), torch.eye(inputs) * block)


@pytest.mark.parametrize("inputs", [16, 48, 64, 96, 576, 1536, 4864])
def test_a_row_alone_is_that_row_in_a_batch(inputs: int) -> None:
    """Of turned rows and of the layer: a product of few rows takes another way than one of many."""
    weight, x = numbers(40, inputs), numbers(70, inputs, seed=1)
    matrix = rotation_matrix(rotation_block(inputs), x.dtype, x.device)
    turned, linear = rotated_by_product(x, matrix), Int8Linear(weight, None)
    together = linear(x)
    for rows in (slice(0, 1), slice(5, 6), slice(69, 70), slice(3, 5), slice(10, 27)):
        assert torch.equal(rotated_by_product(x[rows], matrix), turned[rows])
        assert torch.equal(linear(x[rows]), together[rows])


def test_a_layer_keeps_its_matrix_whatever_is_made_after_it() -> None:
    """A captured graph reads it by its address."""
    linears = [AcceleratorInt8Linear(numbers(8, 64), None) for _ in range(40)]
    kept = {id(value): value for one in linears for value in vars(one).values() if isinstance(value, torch.Tensor)}
    assert sum(value.shape == (64, 64) for value in kept.values()) == len(linears)


def test_x_is_turned_by_one_product_and_not_stage_by_stage() -> None:
    for linear in (Int8Linear(numbers(8, 576), None), AcceleratorInt8Linear(numbers(8, 576), None)):
        x = numbers(2, 576)
        with Calls() as calls:
            linear(x)
        assert calls.counts["aten.mm"] == 1
        assert not calls.counts["aten.stack"]


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
