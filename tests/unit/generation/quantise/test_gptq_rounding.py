"""GPTQ: an error goes to later inputs as the covariance says, and a row's scales are the best together."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.quantise.gptq_rounding import (
    DAMPING,
    Covariance,
    Inputs,
    _energy,
    _fit_scales,
    _spread_errors,
    round_matrix,
)
from penstock.generation.quantise.grid import Grid, GridSettings, fit_grid
from torch import Tensor


def correlated(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs of few directions, with an outlier."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, inputs // 4, generator=random) @ torch.randn(inputs // 4, inputs, generator=random)
    found += 0.1 * torch.randn(rows, inputs, generator=random)
    found[:, 3] *= 8.0
    return found


def column(grid: Grid, values: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Round one input's numbers: whole ones, and what they mean."""
    scale, zero = grid.scale[:, index // grid.group], grid.zero[:, index // grid.group]
    whole = (values / scale + zero).round().clamp(0, grid.levels - 1)
    return whole, (whole - zero) * scale


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Inputs]:
    """A matrix, its inputs and what is made of them."""
    inputs = correlated(512, 128, seed)
    covariance = Covariance(128)
    for part in inputs.split(100):
        covariance.add(part)
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(seed + 1))
    return weight, inputs, covariance.inputs()


def test_the_covariance_is_the_mean_over_all_rows_with_damping() -> None:
    inputs = correlated(300, 16)
    covariance = Covariance(16)
    for part in inputs.split(70):
        covariance.add(part)
    exact = (inputs.double().T @ inputs.double() / 300).float()
    exact.diagonal().add_(DAMPING * exact.diagonal().mean())
    assert torch.allclose(covariance.inputs().covariance, exact, rtol=1e-4, atol=1e-4)


def test_inputs_that_are_not_finite_are_refused() -> None:
    covariance = Covariance(4)
    covariance.add(torch.tensor([[1.0, torch.inf, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="not finite"):
        covariance.inputs()


def test_errors_are_spread_as_a_plain_loop_spreads_them() -> None:
    """Each input in its turn, the whole inverse made anew for those that are left: no blocks, no factor."""
    weight, _, seen = problem()
    grid = fit_grid(weight, seen.covariance.diagonal(), GridSettings(32, 4, torch.bfloat16))
    order = seen.covariance.diagonal().argsort(descending=True).tolist()
    left, whole = weight.double().clone(), torch.zeros(weight.shape)
    for at, index in enumerate(order):
        numbers, meant = column(grid, left[:, index].float(), index)
        whole[:, index] = numbers
        rest = order[at:]
        inverse = torch.linalg.inv(seen.covariance.double()[rest][:, rest])
        error = (left[:, index] - meant.double()) / inverse[0, 0]
        left[:, rest[1:]] -= error[:, None] * inverse[0, 1:][None]
    found = _spread_errors(weight, seen, grid)
    # A number half-way between two may go to either.
    assert float((found != whole).float().mean()) < 0.01


def test_less_of_the_outputs_is_lost_than_by_rounding_to_the_nearest() -> None:
    weight, inputs, seen = problem()
    grid = fit_grid(weight, seen.covariance.diagonal(), GridSettings(32, 4, torch.bfloat16))
    nearest = torch.stack([column(grid, weight[:, index].clone(), index)[1] for index in range(128)], dim=1)
    found = round_matrix(weight, seen, GridSettings(32, 4, torch.bfloat16))
    lost = [float((inputs @ (weight - one).T).square().mean()) for one in (found.dense(), nearest)]
    assert lost[0] < 0.5 * lost[1]
    share = _energy(weight - found.dense(), seen.covariance) / _energy(weight, seen.covariance)
    assert found.loss == pytest.approx(float(share))


def test_scales_that_are_fitted_together_lose_no_more() -> None:
    weight, _, seen = problem(seed=5)
    form = GridSettings(32, 4, torch.float32)
    grid = fit_grid(weight, seen.covariance.diagonal(), form)
    whole = _spread_errors(weight, seen, grid)
    better = _fit_scales(weight, seen.covariance, whole, grid, form)
    lost, before = (_energy(weight - one.dense(whole), seen.covariance) for one in (better, grid))
    assert lost < before
    for factor in (0.99, 1.01):
        # A stationary point: no scale alone can be better.
        changed = better.scale.clone()
        changed[:, 1] *= factor
        other = type(better)(changed, better.zero, better.group, better.levels)
        assert _energy(weight - other.dense(whole), seen.covariance) > lost


def test_an_input_that_calibration_never_shows_keeps_its_weight() -> None:
    inputs = correlated(256, 64, seed=7)
    inputs[:, 10] = 0.0
    covariance = Covariance(64)
    covariance.add(inputs)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    found = round_matrix(weight, covariance.inputs(), GridSettings(32, 4, torch.bfloat16)).dense()
    assert float((found[:, 10] - weight[:, 10]).abs().max()) < 0.6
