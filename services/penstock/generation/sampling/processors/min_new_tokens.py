"""No end of sequence before `min_new_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.processors.base import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import RowState


class MinNewTokens(LogitsProcessor):
    """transformers' MinNewTokensLengthLogitsProcessor: eos scores are -inf while fewer tokens were generated."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        lengths = [len(p.eos_token_ids) for p in params]
        # One entry per (row, eos id).
        self._rows = np.array(rows, dtype=np.int64).repeat(lengths)
        self._minimum = np.array([p.min_new_tokens for p in params], dtype=np.uint64).repeat(lengths)
        self._eos_ids = np.array([token_id for p in params for token_id in p.eos_token_ids], dtype=np.int64)
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.min_new_tokens > 0 and bool(params.eos_token_ids)

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        vocab_size = scores_NV.shape[1]
        # A checkpoint may name an eos id beyond its output layer: it cannot be drawn in any case.
        active = (positions_N[self._rows] < self._minimum) & (self._eos_ids < vocab_size)
        if active.any():
            places = self._rows[active] * vocab_size + self._eos_ids[active]
            scores_NV.view(-1)[torch.from_numpy(places).to(self._device)] = -torch.inf
