"""Repairs of a row's numbers: NaN and infinities are replaced, scores become log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Processor, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class RemoveInvalidValues(Processor):
    """transformers' InfNanRemoveLogitsProcessor: a NaN becomes 0, an infinity the largest number of its sign."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = rows

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.remove_invalid_values

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row in self._rows:
            # None stands for the largest and the smallest number of the dtype.
            torch.nan_to_num_(scores_NV[row], nan=0.0, posinf=None, neginf=None)


class Renormalize(Processor):
    """transformers' LogitNormalization: log_softmax. Runs after everything else."""

    stage = Stage.LATE
    keeps_odds = True

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = rows

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.renormalize_logits

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row in self._rows:
            scores_NV[row] = scores_NV[row].log_softmax(-1)
