"""WARP processors that cut the tail of a distribution and are not part of the draw itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.row_tokens import only
from penstock.generation.sampling.processors.base import (
    Processor,
    Stage,
    drop_below,
    log_total,
    min_tokens_to_keep,
    params_by_row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class EpsilonCutoff(Processor):
    """transformers' EpsilonLogitsWarper (Hewitt et al. 2022): drops tokens less likely than epsilon."""

    stage = Stage.WARP

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = params_by_row(rows, states)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return 0.0 < params.epsilon_cutoff < 1.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        for place, params in context.picked(self._rows):
            _drop_less_likely(scores_RV[place], math.log(params.epsilon_cutoff), params)


class EtaCutoff(Processor):
    """transformers' EtaLogitsWarper (Hewitt et al. 2022): drops tokens less likely than
    min(eta, sqrt(eta) * exp(-entropy))."""

    stage = Stage.WARP

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = params_by_row(rows, states)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return 0.0 < params.eta_cutoff < 1.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        for place, params in context.picked(self._rows):
            log_eta = math.log(params.eta_cutoff)
            lowest = min(log_eta, log_eta / 2 - _entropy(scores_RV[place]))
            _drop_less_likely(scores_RV[place], lowest, params)


class TopNSigma(Processor):
    """Top-nσ (Tang et al. 2024) as in llama.cpp: drops scores more than n standard deviations below the highest.

    The deviation is that of the row's finite scores, as a population, in fp64. The same tokens stay at every
    temperature.
    """

    stage = Stage.WARP

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = params_by_row(rows, states)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.top_n_sigma > 0.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        for place, params in context.picked(self._rows):
            scores_V = scores_RV[place]
            finite_F = scores_V[scores_V.isfinite()].double()
            if len(finite_F):
                lowest = finite_F.amax() - params.top_n_sigma * finite_F.std(correction=0)
                _drop_less(scores_V, lowest.to(scores_V.dtype), params)


def _entropy(scores_V: torch.Tensor) -> float:
    logprobs_V = scores_V.log_softmax(-1)
    return -float((logprobs_V.exp() * logprobs_V).nansum())


def _drop_less_likely(scores_V: torch.Tensor, lowest_logprob: float, params: SamplingParams) -> None:
    """Drop tokens with log p below `lowest_logprob`, that is score < lowest_logprob + log(sum(exp(scores)))."""
    _drop_less(scores_V, scores_V.new_tensor(lowest_logprob + log_total(scores_V)), params)


def _drop_less(scores_V: torch.Tensor, lowest: torch.Tensor, params: SamplingParams) -> None:
    """Drop scores below `lowest`; the most likely tokens and their equals stay."""
    keep = scores_V.topk(min(min_tokens_to_keep(params), len(scores_V))).values[-1]
    if bool(keep.isfinite()):
        drop_below(scores_V, torch.minimum(keep, lowest))


# transformers looks at no more candidates than these.
_MOST = 100


class TopH(Processor):
    """transformers' TopHLogitsWarper: the most likely tokens, at most 100, while the sum of their entropy terms is at
    most top_h times the entropy of the 100; the first always. Of equal scores the lower ids stay."""

    stage = Stage.WARP

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = params_by_row(rows, states)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.top_h is not None

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        only_row = torch.zeros(1, dtype=torch.int64, device=scores_RV.device)
        for place, params in context.picked(self._rows):
            assert params.top_h is not None, "the row wants it"
            scores_V = scores_RV[place]
            found = top_candidates(scores_V[None], only_row, min(_MOST, len(scores_V)))
            only(scores_V, found.ids_RC[0, _kept(found.scores_RC[0], params.top_h)])


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


class TypicalP(Processor):
    """transformers' TypicalLogitsWarper (Meister et al. 2022): the tokens with the surprise nearest to the entropy,
    until their probabilities reach typical_p; equally near ones all stay. Sums are in fp64."""

    stage = Stage.WARP

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = params_by_row(rows, states)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.typical_p < 1.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        for place, params in context.picked(self._rows):
            _drop_untypical(scores_RV[place], params.typical_p, min_tokens_to_keep(params))


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
