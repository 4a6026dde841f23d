"""Top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.processors.base import Warper

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.sampling.params import SamplingParams


class TopK(Warper):
    """transformers' TopKLogitsWarper: everything below the k-th largest score is -inf; its ties stay."""

    def __init__(self, params: Seq[SamplingParams], device: torch.device) -> None:
        self._ks_M = np.array([p.top_k for p in params], dtype=np.int64)
        # Place of the k-th largest in a descending row; -1 where top-k is off.
        self.last_places_M1 = torch.from_numpy(self._ks_M - 1).to(device)[:, None]
        self._device = device

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        ks_R = np.minimum(self._ks_M[rows_R.cpu().numpy()], scores_RV.shape[1])
        for k in np.unique(ks_R[ks_R > 0]):
            # One call per distinct k: a value selected by rank is exact, so it does not matter which rows share it.
            picked = torch.from_numpy(np.flatnonzero(ks_R == k)).to(self._device)
            selected = scores_RV[picked]
            kth = selected.topk(int(k), dim=-1).values[:, -1:]
            scores_RV[picked] = selected.masked_fill_(selected < kth, -torch.inf)
