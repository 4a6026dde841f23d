"""Tokens named in a request: suppressed ones, and OpenAI's logit_bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from penstock.generation.sampling.ops.row_tokens import RowTokens, id_array
from penstock.generation.sampling.processors.base import LARGEST_SCORE, Processor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class SuppressTokens(Processor):
    """transformers' SuppressTokensLogitsProcessor: -inf at every position."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        ids = [cast("npt.NDArray[np.int64]", state.prepared[SuppressTokens]) for state in states]
        self._places = RowTokens(rows, ids, device)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.suppress_tokens)

    @staticmethod
    def prepare(params: SamplingParams) -> npt.NDArray[np.int64]:
        return id_array(params.suppress_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        self._places.fill(scores_NV, -np.inf)


class BeginSuppressTokens(Processor):
    """transformers' SuppressTokensAtBeginLogitsProcessor: -inf for the first output token, or for the second one when
    forced_bos makes the first, after a prompt of one id or none."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = rows
        self._ids = [cast("npt.NDArray[np.int64]", state.prepared[BeginSuppressTokens]) for state in states]
        self._begin = [_begin(state) for state in states]
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.begin_suppress_tokens)

    @staticmethod
    def prepare(params: SamplingParams) -> npt.NDArray[np.int64]:
        return id_array(params.begin_suppress_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        active = [place for place, row in enumerate(self._rows) if context.positions_N[row] == self._begin[place]]
        if active:
            rows, ids = [self._rows[place] for place in active], [self._ids[place] for place in active]
            RowTokens(rows, ids, self._device).fill(scores_NV, -np.inf)


def _begin(state: RowState) -> int:
    sequence = state.sequence
    return int(sequence.num_prompt_ids <= 1 and sequence.params.forced_bos_token_id is not None)


class LogitBias(Processor):
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

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        scores_NV[self._row_E, self._id_E] += self._bias_E
