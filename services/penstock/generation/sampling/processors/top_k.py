"""Top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.processors.base import Warper, drop_below

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.sampling.params import SamplingParams


class TopK(Warper):
    """transformers' TopKLogitsWarper: everything below the k-th largest score is -inf; its ties stay."""

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._ks_M = np.array([p.top_k for p in params], dtype=np.int64)
        # Place of the k-th largest in a descending row; -1 where top-k is off.
        self.last_places_M1 = torch.from_numpy(self._ks_M - 1).to(device)[:, None]

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        ks = [min(k, scores_RV.shape[1]) for k in self._ks_M[rows_R.cpu().numpy()].tolist()]
        for scores_V, k in zip(scores_RV, ks, strict=True):
            if k > 0:
                drop_below(scores_V, scores_V.topk(k).values[-1])
