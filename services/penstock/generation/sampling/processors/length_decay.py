"""An end of sequence that becomes more likely with every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.ops.places import Places, id_array
from penstock.generation.sampling.processors.base import LARGEST_SCORE, LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import RowState

# Finite in fp32 when a score is multiplied by it, and far more than is left of the score anyway.
_LARGEST_FACTOR = 1e30


class ExponentialDecayLength(LogitsProcessor):
    """transformers' ExponentialDecayLengthPenalty: from (start, factor), eos scores gain
    |score| * (factor ** (position - start) - 1) where position > start; a suppressed eos stays suppressed."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        ids = [id_array(p.eos_token_ids) for p in params]
        options = [p.exponential_decay_length_penalty or (0, 1.0) for p in params]
        lengths = [len(some) for some in ids]
        self._places = Places(rows, ids, device)
        self._rows_E = np.array(rows, dtype=np.int64).repeat(lengths)
        self._starts_E = np.array([start for start, _ in options], dtype=np.float64).repeat(lengths)
        self._factors_E = np.array([factor for _, factor in options], dtype=np.float64).repeat(lengths)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.exponential_decay_length_penalty is not None and bool(params.eos_token_ids)

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        passed_E = positions_N[self._rows_E] - self._starts_E
        if not (passed_E > 0).any():
            return
        with np.errstate(over="ignore"):
            factors_E = np.minimum(self._factors_E ** np.maximum(passed_E, 0.0), _LARGEST_FACTOR) - 1.0
        vocab_size, flat = scores_NV.shape[1], scores_NV.view(-1)
        index_E = self._places.index(vocab_size)
        scores_E = flat[index_E]
        penalised_E = scores_E + scores_E.abs() * self._places.of(factors_E.astype(np.float32), vocab_size)
        penalised_E = penalised_E.clamp_(max=LARGEST_SCORE)
        flat[index_E] = torch.where(scores_E.isfinite(), penalised_E, scores_E)
