"""GPTQ (Frantar et al., 2022): a matrix is rounded input by input, and what is left of an error goes to later inputs.

With the covariance H of the inputs, an error E costs E·H·Eᵀ. Inputs are taken by falling importance (H's diagonal);
grids are fitted first, so that groups stay those of neighbours. Afterwards all scales of a row are fitted together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.generation.quantise.grid import Grid, GridSettings, fit_grid, stored_scale

# Added to H's diagonal, as a share of its mean: a direction that calibration hardly shows is not free.
DAMPING = 0.01
# Inputs with errors that are given on together.
_BLOCK = 128
_RIDGE = 1e-6


class Covariance:
    """Covariance (inputs, inputs) of a matrix's inputs over the calibration text."""

    def __init__(self, inputs: int) -> None:
        self._sum = torch.zeros(inputs, inputs)
        self._rows = 0

    def add(self, rows: Tensor) -> None:
        """Add inputs (rows, inputs)."""
        self._sum.addmm_(rows.T, rows)
        self._rows += len(rows)

    def inputs(self) -> Inputs:
        """Return the mean, with DAMPING, and what is made of it. Raises ValueError where a number is not finite."""
        mean = self._sum / max(self._rows, 1)
        diagonal = mean.diagonal()
        if not bool(torch.isfinite(diagonal).all()):
            raise ValueError("the calibration text makes inputs that are not finite")
        diagonal.add_(DAMPING * float(diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)))
        return Inputs(mean)


class Inputs:
    """Damped covariance of inputs, their order by falling importance, and how an error of one goes to the later ones.
    Matrices with the same inputs share it."""

    def __init__(self, covariance: Tensor) -> None:
        self.covariance = covariance
        self.order = covariance.diagonal().argsort(descending=True)
        ordered = covariance[self.order][:, self.order].double()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(ordered))
        # Upper: row i says how the i-th input's error goes to later inputs.
        factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
        self.spread = factor.float()


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """Whole numbers (outputs, inputs) on their grid, and the share of the output's energy that is lost."""

    whole: Tensor
    grid: Grid
    loss: float

    def dense(self) -> Tensor:
        """Return the numbers that they mean, in float32."""
        return self.grid.dense(self.whole)


def round_matrix(weight: Tensor, inputs: Inputs, form: GridSettings) -> RoundedMatrix:
    """Round a float32 matrix (outputs, inputs) with such inputs."""
    covariance = inputs.covariance
    grid = fit_grid(weight, covariance.diagonal(), form)
    whole = _spread_errors(weight, inputs, grid)
    energy = _energy(weight, covariance).clamp(min=torch.finfo(torch.float32).tiny)
    best = RoundedMatrix(whole, grid, float(_energy(weight - grid.dense(whole), covariance) / energy))
    refitted = _fit_scales(weight, covariance, whole, grid, form)
    # The same whole numbers with better scales, or whole numbers anew on those.
    for candidate in (whole, _spread_errors(weight, inputs, refitted)):
        loss = float(_energy(weight - refitted.dense(candidate), covariance) / energy)
        if loss < best.loss:
            best = RoundedMatrix(candidate, refitted, loss)
    return best


def _spread_errors(weight: Tensor, inputs: Inputs, grid: Grid) -> Tensor:
    """Return the whole numbers of GPTQ on a grid."""
    order, spread = inputs.order.tolist(), inputs.spread
    # An input's numbers lie together.
    left = weight.T[inputs.order].contiguous()
    scales, zeros = grid.scale.T.contiguous(), grid.zero.T.contiguous()
    whole = torch.empty_like(left)
    for first in range(0, len(left), _BLOCK):
        last = min(first + _BLOCK, len(left))
        errors = torch.empty(last - first, left.shape[1])
        for at in range(first, last):
            scale, zero = scales[order[at] // grid.group], zeros[order[at] // grid.group]
            whole[at] = (left[at] / scale).round_().add_(zero).clamp_(0, grid.levels - 1)
            error = errors[at - first]
            torch.sub(left[at], (whole[at] - zero).mul_(scale), out=error)
            error.div_(spread[at, at])
            left[at + 1 : last].addr_(spread[at, at + 1 : last], error, alpha=-1.0)
        left[last:].addmm_(spread[first:last, last:].T, errors, alpha=-1.0)
    return whole[inputs.order.argsort()].T.contiguous()


def _fit_scales(weight: Tensor, covariance: Tensor, whole: Tensor, grid: Grid, form: GridSettings) -> Grid:
    """Return the grid with the scales of each row that lose least with these whole numbers: a least-squares problem
    over the row's groups."""
    outputs, groups = grid.scale.shape
    steps = (whole.view(outputs, groups, -1) - grid.zero[..., None]).view(whole.shape)
    matrix, right = torch.empty(outputs, groups, groups), torch.empty(outputs, groups)
    for index in range(groups):
        part = slice(index * grid.group, (index + 1) * grid.group)
        seen = steps[:, part] @ covariance[part]
        matrix[:, index] = (seen * steps).view(outputs, groups, -1).sum(2)
        right[:, index] = (seen * weight).sum(1)
    ridge = matrix.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny) * _RIDGE
    matrix.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    found = torch.linalg.solve(matrix.double(), right.double()).float()
    # A group of zeros has no best scale, and a negative one would turn its numbers round.
    is_usable = torch.isfinite(found) & (found.to(form.dtype) > 0.0)
    return Grid(torch.where(is_usable, stored_scale(found, form), grid.scale), grid.zero, grid.group, grid.levels)


def _energy(weight: Tensor, covariance: Tensor) -> Tensor:
    """Return the mean energy of the outputs that a matrix makes of such inputs."""
    return ((weight @ covariance) * weight).sum()
