"""The beginning and the end of an output: forced first and last tokens, a minimum length, an end that becomes more
likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.attention.to_device import uploaded
from penstock.generation.sampling.ops.row_tokens import RowTokens, id_array
from penstock.generation.sampling.processors.base import LARGEST_SCORE, Processor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class ForcedBos(Processor):
    """transformers' ForcedBOSTokenLogitsProcessor: forces the second of all ids, after a prompt of one token, or the
    first output token after a prompt of embeddings without ids."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        # A prompt of more ids never has a total of one.
        self._rows = [
            (row, 1 - state.sequence.num_prompt_ids, state.sequence.params.forced_bos_token_id)
            for row, state in zip(rows, states, strict=True)
            if state.sequence.num_prompt_ids <= 1
        ]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.forced_bos_token_id is not None

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row, position, token_id in self._rows:
            if context.positions_N[row] == position and token_id is not None:
                _force(scores_NV[row], [token_id])


class ForcedEos(Processor):
    """transformers' ForcedEOSTokenLogitsProcessor: forces the last token that the output has room for."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [(row, state.sequence.params) for row, state in zip(rows, states, strict=True)]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.forced_eos_token_ids)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row, params in self._rows:
            if context.positions_N[row] == params.max_new_tokens - 1:
                _force(scores_NV[row], list(params.forced_eos_token_ids))


def _force(scores_V: torch.Tensor, token_ids: list[int]) -> None:
    scores_V.fill_(-torch.inf)
    scores_V[[token_id for token_id in token_ids if token_id < len(scores_V)]] = 0.0


class MinNewTokens(Processor):
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

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        vocab_size = scores_NV.shape[1]
        # A checkpoint may name an eos id beyond its output layer: it cannot be drawn in any case.
        active = (context.positions_N[self._rows] < self._minimum) & (self._eos_ids < vocab_size)
        if active.any():
            places = self._rows[active] * vocab_size + self._eos_ids[active]
            scores_NV.view(-1)[uploaded(places, self._device)] = -torch.inf


# Finite in fp32 when a score is multiplied by it, and far more than is left of the score anyway.
_LARGEST_FACTOR = 1e30


class ExponentialDecayLength(Processor):
    """transformers' ExponentialDecayLengthPenalty: from (start, factor), eos scores gain
    |score| * (factor ** (position - start) - 1) where position > start; a suppressed eos stays suppressed."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        ids = [id_array(p.eos_token_ids) for p in params]
        options = [p.exponential_decay_length_penalty or (0, 1.0) for p in params]
        lengths = [len(some) for some in ids]
        self._places = RowTokens(rows, ids, device)
        self._rows_E = np.array(rows, dtype=np.int64).repeat(lengths)
        self._starts_E = np.array([start for start, _ in options], dtype=np.float64).repeat(lengths)
        self._factors_E = np.array([factor for _, factor in options], dtype=np.float64).repeat(lengths)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.exponential_decay_length_penalty is not None and bool(params.eos_token_ids)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        passed_E = context.positions_N[self._rows_E] - self._starts_E
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
