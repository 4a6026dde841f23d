"""Grids: near the best of a brute search, exact in the stored dtype, and never without a number for zero."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.quantise.grid import Grid, GridSettings, fit_grid
from torch import Tensor


def rounded(grid: Grid, weight: Tensor) -> Tensor:
    """Each number's nearest on the grid."""
    return grid.dense(whole_numbers(grid, weight))


def whole_numbers(grid: Grid, weight: Tensor) -> Tensor:
    """Number by number."""
    scale, zero = (part.repeat_interleave(grid.group, dim=1) for part in (grid.scale, grid.zero))
    return (weight / scale + zero).round().clamp(0, grid.levels - 1)


def weighted(error: Tensor, importance: Tensor) -> float:
    return float((error.square() * importance).sum())


def drawn(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers with outliers, and importances over two orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random)
    weight[torch.rand(outputs, inputs, generator=random) < 0.02] *= 5.0
    return weight, torch.rand(inputs, generator=random).square() + 0.01


def brute(weight: Tensor, importance: Tensor, levels: int) -> float:
    """Least error of one group over a fine search of ends and all zeros."""
    least = float("inf")
    low, high = min(0.0, float(weight.min())), max(0.0, float(weight.max()))
    for share in torch.linspace(0.2, 1.1, 181).tolist():
        scale = torch.tensor((high - low) * share / (levels - 1)).bfloat16().float()
        for zero in range(levels):
            whole = (weight / scale + zero).round().clamp(0, levels - 1)
            least = min(least, weighted((whole - zero) * scale - weight, importance))
    return least


def test_a_grid_is_nearly_the_best_that_there_is() -> None:
    weight, importance = drawn(12, 32)
    grid = fit_grid(weight, importance, GridSettings(32, 4, torch.bfloat16))
    found = rounded(grid, weight)
    ratios = [weighted(found[row] - weight[row], importance) / brute(weight[row], importance, 16) for row in range(12)]
    assert sum(ratios) / len(ratios) < 1.08
    assert max(ratios) < 1.5


def test_a_grid_beats_that_of_the_ends() -> None:
    weight, importance = drawn(64, 256, seed=3)
    found = weighted(
        rounded(fit_grid(weight, importance, GridSettings(64, 4, torch.bfloat16)), weight) - weight, importance
    )
    parts = weight.unflatten(1, (-1, 64))
    low, high = parts.amin(2), parts.amax(2)
    ends = Grid((high - low) / 15, (-low / ((high - low) / 15)).round(), 64, 16)
    assert found < 0.9 * weighted(rounded(ends, weight) - weight, importance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_exact_in_their_dtype_and_zeros_whole_numbers_of_the_grid(dtype: torch.dtype) -> None:
    weight, importance = drawn(8, 128, seed=1)
    grid = fit_grid(weight * 0.02, importance, GridSettings(32, 4, dtype))
    assert torch.equal(grid.scale, grid.scale.to(dtype).float())
    assert torch.equal(grid.zero, grid.zero.round())
    assert int(grid.zero.min()) >= 0
    assert int(grid.zero.max()) <= 15


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-6])
def test_a_group_of_one_value_is_met(value: float) -> None:
    weight = torch.full((2, 32), value)
    grid = fit_grid(weight, torch.ones(32), GridSettings(32, 4, torch.bfloat16))
    assert torch.allclose(rounded(grid, weight), weight, rtol=4e-3, atol=1e-12)


def test_dense_numbers_are_whole_ones_less_the_zero_times_the_scale() -> None:
    grid = Grid(torch.tensor([[0.5, 2.0]]), torch.tensor([[3.0, 0.0]]), 2, 16)
    assert grid.dense(torch.tensor([[0.0, 3.0, 1.0, 15.0]])).tolist() == [[-1.5, 0.0, 2.0, 30.0]]


@pytest.mark.parametrize("seed", range(3))
def test_without_zeros_the_zero_is_the_middle_and_the_scale_nearly_the_best(seed: int) -> None:
    weight, importance = drawn(12, 32, seed)
    grid = fit_grid(weight, importance, GridSettings(32, 4, torch.bfloat16, has_zeros=False))
    assert torch.equal(grid.zero, torch.full(grid.zero.shape, 8.0))
    found = rounded(grid, weight)
    ratios = []
    for row in range(12):
        ends = float(weight[row].abs().max())
        tried = torch.linspace(ends / 24, ends / 6, 300).bfloat16().float()
        best = min(
            weighted((weight[row] / scale).round().clamp(-8, 7) * scale - weight[row], importance) for scale in tried
        )
        ratios.append(weighted(found[row] - weight[row], importance) / best)
    assert sum(ratios) / len(ratios) < 1.1
    assert max(ratios) < 1.5
