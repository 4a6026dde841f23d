"""Repairs of a row's numbers: NaN and infinities are replaced, scores become log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from penstock.generation.sampling.processors.base import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy as np
    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import RowState


class RemoveInvalidValues(LogitsProcessor):
    """transformers' InfNanRemoveLogitsProcessor: a NaN becomes 0, an infinity the largest number of its sign."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = rows

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.remove_invalid_values

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for row in self._rows:
            # None stands for the largest and the smallest number of the dtype.
            torch.nan_to_num_(scores_NV[row], nan=0.0, posinf=None, neginf=None)


class Renormalize(LogitsProcessor):
    """transformers' LogitNormalization: log_softmax. Runs after everything else."""

    is_argmax_invariant: ClassVar[bool] = True

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = rows

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.renormalize_logits

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for row in self._rows:
            scores_NV[row] = scores_NV[row].log_softmax(-1)
