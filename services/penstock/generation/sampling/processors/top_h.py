"""Top-H: as many of the most likely tokens as hold a share of the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.places import only
from penstock.generation.sampling.processors.base import Warper

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams

# transformers looks at no more.
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
    """Which of the descending scores stay. In fp32 and by the steps of torch's Categorical: at top_h = 1 its rounding
    decides about the last token."""
    logprobs_C = scores_C - scores_C.logsumexp(-1, keepdim=True)
    probs_C = logprobs_C.softmax(-1)
    entropy = -(logprobs_C.clamp(min=torch.finfo(torch.float32).min) * probs_C).sum()
    terms_C = -probs_C * probs_C.log()
    kept_C = terms_C.cumsum(-1) <= entropy * top_h
    kept_C[0] = True
    return kept_C
