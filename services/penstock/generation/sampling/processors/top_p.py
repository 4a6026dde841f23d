"""Nucleus sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Warper

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.sampling.params import SamplingParams


class TopP(Warper):
    """transformers' TopPLogitsWarper: the smallest set of most likely tokens whose probabilities reach top_p.

    It drops, in ascending order, while the cumulative probability is <= 1 - top_p; from the other end that keeps a
    token while the probability before it is < top_p, and the first always. Of equal scores the lower ids stay
    (transformers leaves that to an unstable sort). Sums are in fp64.
    """

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        # Infinity, not 1, where it is off: no sum, however rounded, reaches it.
        values = [p.top_p if p.top_p < 1.0 else torch.inf for p in params]
        self.values_M1 = torch.tensor(values, dtype=torch.float64, device=device)[:, None]
        self.is_neutral = all(value == torch.inf for value in values)

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        picked = self.values_M1[rows_R, 0].isfinite().nonzero()[:, 0]
        # Row by row: the fp64 copies of a row are all the memory this takes.
        for row in picked.tolist():
            scores_V = scores_RV[row]
            sorted_V, ids_V = scores_V.sort(descending=True, stable=True)
            probs_V = torch.softmax(sorted_V, dim=-1, dtype=torch.float64)
            drop_V = probs_V.cumsum(-1) - probs_V >= self.values_M1[rows_R[row]]
            drop_V[0] = False
            scores_V[ids_V[drop_V]] = -torch.inf
