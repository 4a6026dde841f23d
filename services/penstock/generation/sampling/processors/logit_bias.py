"""OpenAI's logit_bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.processors.base import LARGEST_SCORE, LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import RowState


class LogitBias(LogitsProcessor):
    """Adds a bias to single tokens. Ids are validated against the vocabulary before they get here."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        biases = [state.sequence.params.logit_bias for state in states]
        lengths = [len(bias) for bias in biases]
        self._row_E = torch.from_numpy(np.array(rows, dtype=np.int64).repeat(lengths)).to(device)
        self._id_E = torch.tensor([token_id for bias in biases for token_id in bias], device=device)
        values = [min(max(value, -LARGEST_SCORE), LARGEST_SCORE) for bias in biases for value in bias.values()]
        self._bias_E = torch.tensor(values, dtype=torch.float32, device=device)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        scores_NV[self._row_E, self._id_E] += self._bias_E
