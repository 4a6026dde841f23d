"""Positions at which only certain tokens may be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy as np
    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import RowState


class ForcedBos(LogitsProcessor):
    """transformers' ForcedBOSTokenLogitsProcessor: the token after a prompt of one token."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        # A longer prompt never has a total of one token.
        self._rows = [
            (row, state.sequence.params.forced_bos_token_id)
            for row, state in zip(rows, states, strict=True)
            if state.sequence.num_prompt_tokens == 1
        ]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.forced_bos_token_id is not None

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for row, token_id in self._rows:
            if positions_N[row] == 0 and token_id is not None:
                _force(scores_NV[row], [token_id])


class ForcedEos(LogitsProcessor):
    """transformers' ForcedEOSTokenLogitsProcessor: the last token that the output has room for."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [(row, state.sequence.params) for row, state in zip(rows, states, strict=True)]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.forced_eos_token_ids)

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for row, params in self._rows:
            if positions_N[row] == params.max_new_tokens - 1:
                _force(scores_NV[row], list(params.forced_eos_token_ids))


def _force(scores_V: torch.Tensor, token_ids: list[int]) -> None:
    scores_V.fill_(-torch.inf)
    scores_V[[token_id for token_id in token_ids if token_id < len(scores_V)]] = 0.0
