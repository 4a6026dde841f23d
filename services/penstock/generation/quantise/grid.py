"""Scales and zeros of groups of inputs: the grid on which a matrix of whole numbers lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

# Shares of a group's lowest and highest number that are tried as the ends of its grid: large numbers are cut where the
# others gain more.
_SHARES = (1.0, 0.88, 0.76, 0.64, 0.52, 0.4)
# Without zeros: shares of the largest magnitude, from one with which it is the highest whole number down.
_LARGEST_SHARE, _SHARE_STEP, _SCALES = 1.14, 0.02, 40
# Rounds in which the best is fitted to its whole numbers, which are then those of the new scale.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class GridSettings:
    """Form of a matrix's grids."""

    # Inputs that share a scale and a zero.
    group: int
    bits: int
    # Dtype that scales are stored in.
    dtype: torch.dtype
    # False: the zero is the number in the middle.
    has_zeros: bool = True
    # No scale is smaller, unless it is 0.
    least_scale: float = 0.0

    @property
    def levels(self) -> int:
        """Number of whole numbers."""
        return 1 << self.bits


@dataclass(frozen=True, slots=True)
class Grid:
    """Scale and zero of each group of each output: a number is (whole - zero) · scale."""

    # (outputs, groups), exact in the dtype that they are stored in.
    scale: Tensor
    # (outputs, groups) whole numbers from 0 to `levels` - 1.
    zero: Tensor
    group: int
    levels: int

    def dense(self, whole: Tensor) -> Tensor:
        """Return the numbers that whole numbers (outputs, inputs) mean."""
        parts = whole.view(len(whole), -1, self.group)
        return ((parts - self.zero[..., None]) * self.scale[..., None]).view(whole.shape)


def fit_grid(weight: Tensor, importance: Tensor, form: GridSettings) -> Grid:
    """Find scales and zeros for a matrix (outputs, inputs) with the least squared error, each input's weighted by its
    `importance` (inputs). The form's groups divide the inputs."""
    levels = form.levels
    parts = weight.view(len(weight), -1, form.group)
    weights = importance.view(1, -1, form.group).expand(parts.shape)
    best = _Best(parts, weights, levels)
    for scale, zero in _tried(parts, form) if form.has_zeros else _tried_scales(parts, form):
        best.offer(scale, zero)
    refit = _refit if form.has_zeros else _refit_scale
    for _ in range(_ROUNDS):
        best.offer(*refit(parts, _whole(parts, best.scale, best.zero, levels), weights, form))
    return Grid(best.scale, best.zero, form.group, levels)


def round_to_nearest(weight: Tensor, form: GridSettings) -> Tensor:
    """Return the numbers of a matrix (outputs, inputs) rounded to a grid between each group's ends: no search."""
    parts = weight.view(len(weight), -1, form.group)
    scale, zero = next(_tried(parts, form) if form.has_zeros else _tried_scales(parts, form))
    return Grid(scale, zero, form.group, form.levels).dense(_whole(parts, scale, zero, form.levels).view(weight.shape))


def _tried(parts: Tensor, form: GridSettings) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zeros of grids between shares of each group's lowest and highest number."""
    # Zero is a number of every grid.
    low, high = parts.amin(2).clamp_(max=0.0), parts.amax(2).clamp_(min=0.0)
    for below, above in product(_SHARES, _SHARES):
        scale = stored_scale((high * above - low * below) / (form.levels - 1), form)
        yield scale, (-low * below / scale).round_().clamp_(0, form.levels - 1)


def _tried_scales(parts: Tensor, form: GridSettings) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales up to each group's largest magnitude, with the zero in the middle."""
    largest, middle = parts.abs().amax(2) / (form.levels / 2), torch.full(parts.shape[:2], form.levels / 2)
    for step in range(_SCALES):
        yield stored_scale(largest * (_LARGEST_SHARE - step * _SHARE_STEP), form), middle


class _Best:
    """The best scale and zero of each group so far."""

    def __init__(self, parts: Tensor, weights: Tensor, levels: int) -> None:
        self._parts, self._weights, self._levels = parts, weights, levels
        self.scale = torch.ones(parts.shape[:2])
        self.zero = torch.zeros(parts.shape[:2])
        self._least = torch.full(parts.shape[:2], torch.inf)

    def offer(self, scale: Tensor, zero: Tensor) -> None:
        """Keep them for the groups with a lesser error."""
        whole = _whole(self._parts, scale, zero, self._levels)
        meant = whole.sub_(zero[..., None]).mul_(scale[..., None])
        error = meant.sub_(self._parts).square_().mul_(self._weights).sum(2)
        is_less = error < self._least
        self.scale = torch.where(is_less, scale, self.scale)
        self.zero = torch.where(is_less, zero, self.zero)
        self._least = torch.where(is_less, error, self._least)


def _whole(parts: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    return (parts / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, levels - 1)


def _refit(parts: Tensor, whole: Tensor, weights: Tensor, form: GridSettings) -> tuple[Tensor, Tensor]:
    """Return the line through the whole numbers with the least weighted error: its slope, and the whole number that is
    nearest to its zero."""
    total = weights.sum(2)
    mean_whole = (whole * weights).sum(2) / total
    mean_part = (parts * weights).sum(2) / total
    centred = whole - mean_whole[..., None]
    spread = (centred.square() * weights).sum(2)
    slope = (centred * parts * weights).sum(2) / spread.clamp(min=torch.finfo(spread.dtype).tiny)
    scale = stored_scale(slope, form)
    zero = (mean_whole - mean_part / scale).round_().clamp_(0, form.levels - 1)
    return scale, zero


def _refit_scale(parts: Tensor, whole: Tensor, weights: Tensor, form: GridSettings) -> tuple[Tensor, Tensor]:
    """Return the line through the zero in the middle, likewise."""
    middle = form.levels / 2
    centred = whole - middle
    spread = (centred.square() * weights).sum(2)
    slope = (centred * parts * weights).sum(2) / spread.clamp(min=torch.finfo(spread.dtype).tiny)
    return stored_scale(slope, form), torch.full(slope.shape, middle)


def stored_scale(scale: Tensor, form: GridSettings) -> Tensor:
    """Round scales to the stored dtype; a group of zeros has any scale but 0."""
    rounded = scale.to(form.dtype).float()
    return torch.where(rounded > 0.0, rounded.clamp(min=form.least_scale), torch.ones_like(rounded))
