"""Top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.processors.base import Processor, Stage, drop_below, min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class TopK(Processor):
    """transformers' TopKLogitsWarper: everything below the k-th largest score is -inf; its ties stay."""

    stage = Stage.WARP
    is_in_draw = True

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        self._ks_M = np.array([_at_least(p) if self.wants(p) else 0 for p in params], dtype=np.int64)
        # Place of the k-th largest in a descending row; -1 where top-k is off.
        self.last_places_M1 = torch.from_numpy(self._ks_M - 1).to(device)[:, None]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.top_k > 0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        ks = [min(k, scores_RV.shape[1]) for k in self._ks_M[context.picked_R.cpu().numpy()].tolist()]
        only_row = torch.zeros(1, dtype=torch.int64, device=scores_RV.device)
        for scores_V, k in zip(scores_RV, ks, strict=True):
            if k > 0:
                drop_below(scores_V, top_candidates(scores_V[None], only_row, k).scores_RC[0, -1])


def _at_least(params: SamplingParams) -> int:
    return max(params.top_k, min_tokens_to_keep(params))
