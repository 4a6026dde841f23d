"""Penalties on tokens that were seen before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.processors.base import LARGEST_SCORE, LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.sampling.params import SamplingParams
    from penstock.generation.sampling.state import SamplingState, TokenCounts


class RepetitionPenalty(LogitsProcessor):
    """transformers' RepetitionPenaltyLogitsProcessor over prompt and output: negative scores times the penalty,
    the others divided by it, once per distinct token."""

    def __init__(self, rows: Seq[int], states: Seq[SamplingState], device: torch.device) -> None:
        self._rows = np.array(rows, dtype=np.int64)
        self._seen = [state.seen for state in states if state.seen is not None]
        penalties = [state.sequence.params.repetition_penalty for state in states]
        # No denormal, which some processors take for 0: 0 / 0 is not a number.
        self._penalties = np.maximum(np.array(penalties, dtype=np.float32), np.finfo(np.float32).tiny)
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        places_E, lengths = _places(self._rows, self._seen, scores_NV.shape[1])
        penalties_E = torch.from_numpy(self._penalties.repeat(lengths)).to(self._device)
        index_E = torch.from_numpy(places_E).to(self._device)
        flat = scores_NV.view(-1)
        scores_E = flat[index_E]
        penalised_E = torch.where(scores_E < 0, scores_E * penalties_E, scores_E / penalties_E)
        flat[index_E] = penalised_E.clamp_(-LARGEST_SCORE, LARGEST_SCORE)


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties over the output:
    score - frequency_penalty * count - presence_penalty * (count > 0)."""

    def __init__(self, rows: Seq[int], states: Seq[SamplingState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        self._rows = np.array(rows, dtype=np.int64)
        self._outputs = [state.outputs for state in states if state.outputs is not None]
        self._frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        self._presence = np.array([p.presence_penalty for p in params], dtype=np.float32)
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        places_E, lengths = _places(self._rows, self._outputs, scores_NV.shape[1])
        if not len(places_E):
            return
        counts_E = np.concatenate([outputs.counts for outputs in self._outputs])
        penalties_E = self._frequency.repeat(lengths) * counts_E + self._presence.repeat(lengths)
        flat, index_E = scores_NV.view(-1), torch.from_numpy(places_E).to(self._device)
        flat[index_E] = flat[index_E] - torch.from_numpy(penalties_E).to(self._device)


def _places(
    rows: npt.NDArray[np.int64], tokens: Seq[TokenCounts], vocab_size: int
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Places in the flattened scores of every row's distinct tokens (no place twice), and how many each row has."""
    lengths = [len(counts) for counts in tokens]
    places_E = np.concatenate([counts.ids for counts in tokens])
    places_E += (rows * vocab_size).repeat(lengths)
    return places_E, lengths
