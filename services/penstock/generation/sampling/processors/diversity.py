"""Diversity between the groups of a group beam search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import LARGEST_SCORE, LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy as np
    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import RowState


class HammingDiversity(LogitsProcessor):
    """transformers 4.41's HammingDiversityLogitsProcessor: a token loses the penalty once for every beam of an earlier
    group that chose it at this position (`DrawSpec.taken_ids`)."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [(row, state.sequence) for row, state in zip(rows, states, strict=True)]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.mode.diversity_penalty > 0.0

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for row, sequence in self._rows:
            taken = sequence.draw.taken_ids
            if taken:
                index_E = torch.tensor(taken, dtype=torch.int64, device=scores_NV.device)
                penalty = min(sequence.params.mode.diversity_penalty, LARGEST_SCORE)
                scores_NV[row].index_add_(0, index_E, torch.full_like(index_E, penalty, dtype=torch.float32), alpha=-1)
