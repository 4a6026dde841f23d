"""Warpers that cut the tail of a distribution in ways that the draw itself does not know."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.places import only
from penstock.generation.sampling.processors.base import Warper, drop_below, log_total, min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams


class EpsilonCutoff(Warper):
    """transformers' EpsilonLogitsWarper (Hewitt et al. 2022): drops tokens less likely than epsilon."""

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._params = params

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return 0.0 < params.epsilon_cutoff < 1.0

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        for scores_V, place in zip(scores_RV, rows_R.tolist(), strict=True):
            params = self._params[place]
            if self.wants(params):
                _drop_less_likely(scores_V, math.log(params.epsilon_cutoff), params)


class EtaCutoff(Warper):
    """transformers' EtaLogitsWarper (Hewitt et al. 2022): drops tokens less likely than
    min(eta, sqrt(eta) * exp(-entropy))."""

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._params = params

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return 0.0 < params.eta_cutoff < 1.0

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        for scores_V, place in zip(scores_RV, rows_R.tolist(), strict=True):
            params = self._params[place]
            if self.wants(params):
                log_eta = math.log(params.eta_cutoff)
                _drop_less_likely(scores_V, min(log_eta, log_eta / 2 - _entropy(scores_V)), params)


class TopNSigma(Warper):
    """Top-nσ (Tang et al. 2024) as in llama.cpp: drops scores more than n standard deviations below the highest.

    The deviation is that of the row's finite scores, as a population, in fp64. What stays is the same at every
    temperature.
    """

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._params = params

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.top_n_sigma > 0.0

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        for scores_V, place in zip(scores_RV, rows_R.tolist(), strict=True):
            params = self._params[place]
            finite_F = scores_V[scores_V.isfinite()].double() if self.wants(params) else scores_V[:0]
            if len(finite_F):
                lowest = finite_F.amax() - params.top_n_sigma * finite_F.std(correction=0)
                _drop_less(scores_V, lowest.to(scores_V.dtype), params)


def _entropy(scores_V: torch.Tensor) -> float:
    logprobs_V = scores_V.log_softmax(-1)
    return -float((logprobs_V.exp() * logprobs_V).nansum())


def _drop_less_likely(scores_V: torch.Tensor, lowest_logprob: float, params: SamplingParams) -> None:
    """Drop tokens with log p below `lowest_logprob`, which is score < lowest_logprob + log(sum(exp(scores)))."""
    _drop_less(scores_V, scores_V.new_tensor(lowest_logprob + log_total(scores_V)), params)


def _drop_less(scores_V: torch.Tensor, lowest: torch.Tensor, params: SamplingParams) -> None:
    """Drop scores below `lowest`; the most likely tokens and their equals stay."""
    keep = scores_V.topk(min(min_tokens_to_keep(params), len(scores_V))).values[-1]
    if bool(keep.isfinite()):
        drop_below(scores_V, torch.minimum(keep, lowest))


# transformers looks at no more candidates than these.
_MOST = 100


class TopH(Warper):
    """transformers' TopHLogitsWarper: of the 100 most likely tokens, those whose entropy terms, in descending order,
    sum to at most top_h times the entropy of the 100; the first always. Of equal scores the lower ids stay."""

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._values = [p.top_h for p in params]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.top_h is not None

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        only_row = torch.zeros(1, dtype=torch.int64, device=scores_RV.device)
        for scores_V, place in zip(scores_RV, rows_R.tolist(), strict=True):
            value = self._values[place]
            if value is not None:
                found = top_candidates(scores_V[None], only_row, min(_MOST, len(scores_V)))
                only(scores_V, found.ids_RC[0, _kept(found.scores_RC[0], value)])


def _kept(scores_C: torch.Tensor, top_h: float) -> torch.Tensor:
    """Mask of the descending scores that stay. Computed in fp32 and by the steps of torch's Categorical: at top_h = 1
    its rounding decides about the last token."""
    logprobs_C = scores_C - scores_C.logsumexp(-1, keepdim=True)
    probs_C = logprobs_C.softmax(-1)
    entropy = -(logprobs_C.clamp(min=torch.finfo(torch.float32).min) * probs_C).sum()
    terms_C = -probs_C * probs_C.log()
    kept_C = terms_C.cumsum(-1) <= entropy * top_h
    kept_C[0] = True
    return kept_C


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
