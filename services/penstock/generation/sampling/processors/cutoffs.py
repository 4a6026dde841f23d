"""Cut-offs of unlikely tokens: epsilon and eta sampling, Top-nσ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

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
    """p < lowest is score < log(lowest) + log(sum(exp(scores)))."""
    _drop_less(scores_V, scores_V.new_tensor(lowest_logprob + log_total(scores_V)), params)


def _drop_less(scores_V: torch.Tensor, lowest: torch.Tensor, params: SamplingParams) -> None:
    """Drop scores below `lowest`; the most likely tokens stay, and their equals."""
    keep = scores_V.topk(min(min_tokens_to_keep(params), len(scores_V))).values[-1]
    if bool(keep.isfinite()):
        drop_below(scores_V, torch.minimum(keep, lowest))
