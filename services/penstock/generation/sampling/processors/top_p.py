"""Nucleus sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Processor, Stage, drop_below, min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class TopP(Processor):
    """transformers' TopPLogitsWarper: the smallest set of most likely tokens with probabilities that reach top_p.

    It drops, in ascending order, while the cumulative probability is <= 1 - top_p; from the other end that keeps a
    token while the probability before it is < top_p, and the first always. Of equal scores the lower ids stay
    (transformers leaves that to an unstable sort). Sums are in fp64.
    """

    stage = Stage.WARP
    is_in_draw = True

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        # Infinity, not 1, if it is off: no rounded sum reaches it.
        self._values = [p.top_p if self.wants(p) else torch.inf for p in params]
        self._keep = [min_tokens_to_keep(p) for p in params]
        self.values_M1 = torch.tensor(self._values, dtype=torch.float64, device=device)[:, None]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.top_p < 1.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        picked = self.values_M1[context.picked_R, 0].isfinite().nonzero()[:, 0]
        for row, place in zip(picked.tolist(), context.picked_R[picked].tolist(), strict=True):
            keep = self._keep[place]
            # The nucleus holds the most likely token in any case.
            kept = scores_RV[row].topk(min(keep, scores_RV.shape[1])) if keep > 1 else None
            _drop_outside_nucleus(scores_RV[row], self._values[place])
            if kept is not None:
                scores_RV[row, kept.indices] = kept.values


def _drop_outside_nucleus(scores_V: torch.Tensor, top_p: float) -> None:
    """Set the scores that top-p drops from one row to -inf, without sorting the row.

    A probability's upper 16 bits number its bin, in ascending order. Bins are summed, whole bins kept or dropped, and
    only the one in which the sum reaches top_p is sorted.
    """
    probs_V = scores_V.softmax(-1)
    bins_V = (probs_V.view(torch.int32) >> 16).bitwise_and_(0x7FFF)
    sums_B = torch.bincount(bins_V, weights=probs_V.double()).flip(0).cumsum(0)
    # Above 0, so that the most likely token is kept for any top_p.
    target = max(top_p * float(sums_B[-1]), 5e-324)
    reached = int((sums_B < target).sum())
    boundary = len(sums_B) - 1 - reached
    ids_E = (bins_V == boundary).nonzero()[:, 0]
    sorted_E, order_E = scores_V[ids_E].sort(descending=True, stable=True)
    ids_E = ids_E[order_E]
    probs_E = probs_V[ids_E].double()
    before_E = probs_E.cumsum(0) - probs_E
    if reached:
        before_E += sums_B[reached - 1]
    # A prefix, of at least one: before the first, target is not reached.
    kept = max(int((before_E < target).sum()), 1)
    drop_below(scores_V, sorted_E[kept - 1])
    scores_V[ids_E[kept:]] = -torch.inf
