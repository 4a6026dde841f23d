"""Judge of draws: are the counts those of the expected distribution?"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def assert_chi_square(observed: Tensor, expected: Tensor) -> None:
    """p > 0.001; cells of fewer than 8 expected draws are pooled. Wilson-Hilferty's normal approximation."""
    large = expected >= 8
    observed = torch.cat([observed[large], observed[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    kept = expected > 0
    statistic = float(((observed - expected) ** 2 / expected)[kept].sum())
    freedom = int(kept.sum()) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.09
