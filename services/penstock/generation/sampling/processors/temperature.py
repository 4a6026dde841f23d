"""Temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Warper

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams

# Far below any useful temperature, and far enough from fp32's limits that no score overflows when divided by it.
_MINIMUM = 1e-30


class Temperature(Warper):
    """transformers' TemperatureLogitsWarper: scores divided by the temperature (0 is greedy and never gets here)."""

    is_in_draw = True

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        values = [max(p.temperature, _MINIMUM) for p in params]
        self.values_M1 = torch.tensor(values, dtype=torch.float32, device=device)[:, None]
        self.is_neutral = all(value == 1.0 for value in values)

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        if not self.is_neutral:
            scores_RV.div_(self.values_M1[rows_R])
