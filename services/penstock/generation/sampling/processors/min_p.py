"""Min-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Processor, Stage, drop_below, min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class MinP(Processor):
    """transformers' MinPLogitsWarper: drops tokens less likely than min_p times the most likely one."""

    stage = Stage.WARP
    is_in_draw = True

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        values = [p.min_p for p in params]
        self._keep = [min_tokens_to_keep(p) for p in params]
        self.values_M1 = torch.tensor(values, dtype=torch.float64, device=device)[:, None]
        self.is_neutral = not any(map(self.wants, params))

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.min_p > 0.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        if self.is_neutral:
            return
        # p < min_p * p_max is score < max + ln(min_p); ln(0) = -inf drops nothing.
        lowest_R1 = scores_RV.amax(-1, keepdim=True) + self.values_M1[context.picked_R].log().float()
        for scores_V, lowest, place in zip(scores_RV, lowest_R1[:, 0], context.picked_R.tolist(), strict=True):
            keep = self._keep[place]
            kept = scores_V.topk(min(keep, len(scores_V))) if keep > 1 else None
            drop_below(scores_V, lowest)
            if kept is not None:
                scores_V[kept.indices] = kept.values
