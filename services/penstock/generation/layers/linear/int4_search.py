"""int4's scales, zeros and numbers of the least squared error, by torch: csrc/linear/int4_search.h says how, and does
the same a row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.layers.linear.base import WholeRows

# Inputs that share a scale and a zero.
GROUP = 32
# Steps of a zero between two numbers.
ZERO_STEPS = 16
_LEVELS, _BYTES = 15, 255
_MOST_ZERO = _BYTES / ZERO_STEPS
# Ranges that are tried: each end of a group's own is moved inwards by one of these shares of it; and the few that a CPU
# without the C++ kernels tries, for which many would take minutes.
_MOVED = (-0.05, -0.01, 0.03, 0.07, 0.11, 0.15, 0.2)
_RANGES = tuple((low, high) for low in _MOVED for high in _MOVED)
_FEW_RANGES = tuple((both, both) for both in (-0.05, -0.02, 0.01, 0.04, 0.07, 0.1, 0.15))
# Times that the numbers and the grid of the best range are fitted to each other.
_FITS = 2
# What every input has in addition, where the mean is 1.
_LEAST_IMPORTANCE = 1e-4
# Weights that are searched at once: they stay in a core's cache.
_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class SearchedRows:
    """Rows of a weight in int4: a number means (value - zero / ZERO_STEPS) * scale * unit."""

    # (rows, inputs) from 0 to 15, uint8.
    values: Tensor
    # (rows, groups), uint8.
    scale: Tensor
    zero: Tensor
    # (rows), bfloat16.
    unit: Tensor

    def whole(self) -> WholeRows:
        """Return the same numbers with scales and offsets in float32. NaN where a weight is not finite."""
        scale = self.scale.float() * self.unit.float()[:, None]
        return WholeRows(self.values, scale, -self.zero.float() / ZERO_STEPS * scale)


def search_rows(
    weight_OI: Tensor, importance_I: Tensor | None = None, *, is_thorough: bool | None = None
) -> SearchedRows:
    """Return a weight in int4. `importance_I`: each input's share in the error, in float32; None: all are alike.
    `is_thorough`: try as many ranges as the kernels; None: where that is fast, which it is not on a CPU."""
    if is_thorough is None:
        is_thorough = weight_OI.device.type != "cpu"
    inputs = weight_OI.shape[1]
    padding = -inputs % GROUP
    if importance_I is None:
        importance_I = torch.ones(inputs, device=weight_OI.device)
    importance_I = importance_I.to(weight_OI.device)
    importance = importance_I / importance_I.mean().clamp_min(1e-30) + _LEAST_IMPORTANCE
    weight_GK = F.pad(importance, (0, padding)).view(-1, GROUP)
    rows = max(1, _AT_ONCE // inputs) if weight_OI.device.type == "cpu" else max(1, (1 << 24) // inputs)
    parts = [
        _searched(
            F.pad(part.float(), (0, padding)).view(len(part), -1, GROUP),
            weight_GK,
            _RANGES if is_thorough else _FEW_RANGES,
        )
        for part in torch.split(weight_OI, rows)
    ]
    values, scale, zero, unit = (torch.cat(each) for each in zip(*parts, strict=True))
    return SearchedRows(values.flatten(1)[:, :inputs], scale, zero, unit)


class _GridFit:
    """Grids of groups' numbers: `t`, from 0 to 1, of ranges with the low ends `low`; and the best of each group so far:
    t + low is near slope * (q - zero)."""

    def __init__(self, t: Tensor, low: Tensor, w: Tensor) -> None:
        self._t, self._w, self._wt, self.low = t, w, w * t, low
        self._sum_w, self._sum_t = w.sum(1), self._wt.sum(2)
        self._best = torch.full_like(low, -torch.inf)
        self.slope, self.zero = torch.full_like(low, 1 / _LEVELS), (low * -_LEVELS).clamp_max(_MOST_ZERO)

    def fit(self, factor: Tensor | float, origin: Tensor | float) -> None:
        """Try the grid in which t becomes the whole number nearest to `factor` * t + `origin`."""
        q = (self._t * factor + origin).round_().clamp_(0, _LEVELS)
        wq, low, sum_w, sum_t = self._w * q, self.low, self._sum_w, self._sum_t
        q1, q2, qt = wq.sum(2), (wq * q).sum(2), (self._wt * q).sum(2)
        determinant = sum_w * q2 - q1 * q1
        # The best zero that can be stored; of that the best slope, and what it takes off the error.
        wanted = -(q2 * sum_t - q1 * qt + low * determinant) / (sum_w * qt - q1 * sum_t)
        zero = wanted.clamp(0, _MOST_ZERO)
        product = qt + low * q1 - zero * (sum_t + low * sum_w)
        slope = product / (q2 - 2 * zero * q1 + zero * zero * sum_w)
        gain = slope * product
        # A group in which one input alone counts, or all numbers are one, has no two equations.
        is_better = (determinant > q1 * q1 * 1e-5) & (slope > 0) & (gain > self._best)
        self._best = torch.where(is_better, gain, self._best)
        self.slope, self.zero = torch.where(is_better, slope, self.slope), torch.where(is_better, zero, self.zero)


def _searched(x: Tensor, w: Tensor, ranges: tuple[tuple[float, float], ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values (rows, groups, 32), scales and zeros (rows, groups) and units (rows) of `x`, with importance `w`
    (groups, 32)."""
    low, high = x.amin(2).clamp_max(0), x.amax(2).clamp_min(0)
    span = high - low
    inverse = torch.where(span > 0, 1 / span, 0.0)
    grid = _GridFit((x - low[..., None]) * inverse[..., None], low * inverse, w)
    for first, last in ranges:
        factor = _LEVELS / (1 - first - last)
        grid.fit(factor, -first * factor)
    for _ in range(_FITS):
        factors = 1 / grid.slope
        grid.fit(factors[..., None], (grid.low * factors + grid.zero)[..., None])
    scale, zero, sum_w = grid.slope * span, grid.zero, w.sum(1)
    unit = (scale.amax(1) / _BYTES).bfloat16()
    per_unit = torch.where(unit > 0, 1 / unit.float(), 0.0)[:, None]
    scales = torch.where(scale > 0, (scale * per_unit).round().clamp(1, _BYTES), 0.0)
    found = scales * unit.float()[:, None]
    steps_of = x * torch.where(found > 0, 1 / found, 0.0)[..., None]
    # The scale is another one now: the numbers that its grid gives have a best zero of their own.
    rest = (w * ((steps_of + zero[..., None]).round().clamp(0, _LEVELS) - steps_of)).sum(2) / sum_w
    zeros = (rest * ZERO_STEPS).round().clamp(0, _BYTES)
    values = (steps_of + zeros[..., None] / ZERO_STEPS).round().clamp(0, _LEVELS)
    return (
        values.nan_to_num().to(torch.uint8),
        scales.nan_to_num().to(torch.uint8),
        zeros.nan_to_num().to(torch.uint8),
        unit,
    )
