"""Penalties on tokens seen before, or chosen by other groups of beams."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from penstock.generation.attention.to_device import uploaded
from penstock.generation.sampling.processors.base import LARGEST_SCORE, Processor
from penstock.generation.sampling.trackers import PromptIds, TokenCounts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class RepetitionPenalty(Processor):
    """transformers' RepetitionPenaltyLogitsProcessor over prompt and output: negative scores times the penalty,
    the others divided by it, once per distinct token."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = np.array(rows, dtype=np.int64)
        self._seen = [_counts(state, RepetitionPenalty) for state in states]
        self._penalties = _within_range(state.sequence.params.repetition_penalty for state in states)
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> TokenCounts:
        return TokenCounts(first=sequence.num_placeholders)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        places_E, lengths = _places(self._rows, self._seen, scores_NV.shape[1])
        penalties_E = uploaded(self._penalties.repeat(lengths), self._device)
        penalise(scores_NV, uploaded(places_E, self._device), penalties_E)


class EncoderRepetitionPenalty(Processor):
    """transformers' EncoderRepetitionPenaltyLogitsProcessor, with the prompt of a decoder-only model as "encoder" ids:
    a repetition penalty of 1 / penalty, so that values above 1 hold the output to the prompt's words."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = np.array(rows, dtype=np.int64)
        self._prompts = [cast("PromptIds", state.trackers[EncoderRepetitionPenalty]) for state in states]
        self._penalties = _within_range(1.0 / state.sequence.params.encoder_repetition_penalty for state in states)
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.encoder_repetition_penalty != 1.0

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> PromptIds:
        return PromptIds(sequence.num_prompt_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        places_E, lengths = _places(self._rows, self._prompts, scores_NV.shape[1])
        penalties_E = uploaded(self._penalties.repeat(lengths), self._device)
        penalise(scores_NV, uploaded(places_E, self._device), penalties_E)


class OpenAIPenalties(Processor):
    """OpenAI's frequency and presence penalties over the output:
    score - frequency_penalty * count - presence_penalty * (count > 0)."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        self._rows = np.array(rows, dtype=np.int64)
        self._outputs = [_counts(state, OpenAIPenalties) for state in states]
        self._frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        self._presence = np.array([p.presence_penalty for p in params], dtype=np.float32)
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> TokenCounts:
        return TokenCounts(first=sequence.num_prompt_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        places_E, lengths = _places(self._rows, self._outputs, scores_NV.shape[1])
        if not len(places_E):
            return
        counts_E = np.concatenate([outputs.counts for outputs in self._outputs])
        penalties_E = self._frequency.repeat(lengths) * counts_E + self._presence.repeat(lengths)
        flat, index_E = scores_NV.view(-1), uploaded(places_E, self._device)
        flat[index_E] = flat[index_E] - uploaded(penalties_E, self._device)


def _counts(state: RowState, kind: type[Processor]) -> TokenCounts:
    return cast("TokenCounts", state.trackers[kind])


def penalise(scores_NV: torch.Tensor, places_E: torch.Tensor, penalties_E: torch.Tensor) -> None:
    """Penalise the scores at distinct places of the flattened `scores_NV`, in place: negative ones times the penalty,
    the others divided by it, within LARGEST_SCORE. Removed tokens stay removed."""
    flat = scores_NV.view(-1)
    scores_E = flat[places_E]
    penalised_E = torch.where(scores_E < 0, scores_E * penalties_E, scores_E / penalties_E)
    penalised_E.clamp_(-LARGEST_SCORE, LARGEST_SCORE)
    flat[places_E] = penalised_E.masked_fill_(scores_E == -torch.inf, -torch.inf)


def _within_range(penalties: Iterable[float]) -> npt.NDArray[np.float32]:
    """Return the penalties without denormals, which some CPUs take for 0: 0 / 0 is not a number."""
    range_ = np.finfo(np.float32)
    return np.array([min(max(penalty, range_.tiny), range_.max) for penalty in penalties], dtype=np.float32)


def _places(
    rows: npt.NDArray[np.int64], tokens: Seq[TokenCounts | PromptIds], vocab_size: int
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the places of every row's distinct tokens in the flattened scores (no place twice), and their number per
    row."""
    lengths = [len(some.ids) for some in tokens]
    places_E = np.concatenate([some.ids for some in tokens])
    places_E += (rows * vocab_size).repeat(lengths)
    return places_E, lengths


class HammingDiversity(Processor):
    """transformers 4.41's HammingDiversityLogitsProcessor: a token loses the penalty once for every beam of an earlier
    group that chose it at this position (`DrawSpec.taken_ids`)."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [(row, state.sequence) for row, state in zip(rows, states, strict=True)]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.mode.diversity_penalty > 0.0

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row, sequence in self._rows:
            taken = sequence.draw.taken_ids
            if taken:
                index_E = uploaded(np.array(taken, dtype=np.int64), scores_NV.device)
                penalty = min(sequence.params.mode.diversity_penalty, LARGEST_SCORE)
                scores_NV[row].index_add_(0, index_E, torch.full_like(index_E, penalty, dtype=torch.float32), alpha=-1)
