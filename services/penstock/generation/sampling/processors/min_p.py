"""Min-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Warper, drop_below, min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams


class MinP(Warper):
    """transformers' MinPLogitsWarper: drops tokens less likely than min_p times the most likely one."""

    is_in_draw = True

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        values = [p.min_p for p in params]
        self._keep = [min_tokens_to_keep(p) for p in params]
        self.values_M1 = torch.tensor(values, dtype=torch.float64, device=device)[:, None]
        self.is_neutral = all(value <= 0.0 for value in values)

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        if self.is_neutral:
            return
        # p < min_p * p_max is score < max + ln(min_p); ln(0) = -inf drops nothing.
        lowest_R1 = scores_RV.amax(-1, keepdim=True) + self.values_M1[rows_R].log().float()
        for scores_V, lowest, place in zip(scores_RV, lowest_R1[:, 0], rows_R.tolist(), strict=True):
            keep = self._keep[place]
            kept = scores_V.topk(min(keep, len(scores_V))) if keep > 1 else None
            drop_below(scores_V, lowest)
            if kept is not None:
                scores_V[kept.indices] = kept.values
