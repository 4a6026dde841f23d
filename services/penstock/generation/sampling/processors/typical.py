"""Locally typical sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Warper, min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams


class TypicalP(Warper):
    """transformers' TypicalLogitsWarper (Meister et al. 2022): the tokens whose surprise is nearest to the entropy,
    until their probabilities reach typical_p; equally near ones all stay. Sums are in fp64."""

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._params = params

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.typical_p < 1.0

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        for scores_V, place in zip(scores_RV, rows_R.tolist(), strict=True):
            params = self._params[place]
            if self.wants(params):
                _drop_untypical(scores_V, params.typical_p, min_tokens_to_keep(params))


def _drop_untypical(scores_V: torch.Tensor, mass: float, keep: int) -> None:
    logprobs_V = scores_V.log_softmax(-1)
    probs_V = logprobs_V.exp()
    entropy = -(logprobs_V * probs_V).nansum()
    distances_V = (logprobs_V.neg_() - entropy).abs_()
    kept_V = distances_V <= _largest_distance(distances_V, probs_V, mass)
    if keep > 1:
        kept_V[distances_V.topk(min(keep, len(distances_V)), largest=False).indices] = True
    scores_V.copy_(torch.where(kept_V, scores_V, -torch.inf))


def _largest_distance(distances_V: torch.Tensor, probs_V: torch.Tensor, mass: float) -> torch.Tensor:
    """The distance at which the probabilities, in ascending order of distance, reach `mass`.

    A distance's upper 16 bits number its bin, in ascending order (it is not negative); only the bin in which the sum
    reaches the mass is sorted.
    """
    bins_V = (distances_V.view(torch.int32) >> 16).bitwise_and_(0x7FFF)
    sums_B = torch.bincount(bins_V, weights=probs_V.double()).cumsum(0)
    reached = min(int((sums_B < mass).sum()), len(sums_B) - 1)
    ids_E = (bins_V == reached).nonzero()[:, 0]
    sorted_E, order_E = distances_V[ids_E].sort()
    cumulative_E = probs_V[ids_E[order_E]].double().cumsum(0)
    if reached:
        cumulative_E += sums_B[reached - 1]
    last = min(int((cumulative_E < mass).sum()), len(sorted_E) - 1)
    return sorted_E[last]
