"""Processors that keep n-grams from coming twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from penstock.generation.attention.to_device import uploaded
from penstock.generation.sampling.processors.base import Processor
from penstock.generation.sampling.trackers import NgramFollowers

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class NoRepeatNgram(Processor):
    """transformers' NoRepeatNGramLogitsProcessor: no n-gram of prompt and output comes again."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = _followers(rows, states, NoRepeatNgram)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.no_repeat_ngram_size > 0

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> NgramFollowers:
        return NgramFollowers(sequence.params.no_repeat_ngram_size, sequence.num_prompt_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        _ban(scores_NV, self._rows)


class EncoderNoRepeatNgram(Processor):
    """transformers' EncoderNoRepeatNGramLogitsProcessor: no n-gram of the prompt comes again. Its "encoder" ids are the
    prompt of a decoder-only model."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = _followers(rows, states, EncoderNoRepeatNgram)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.encoder_no_repeat_ngram_size > 0

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> NgramFollowers:
        size = sequence.params.encoder_no_repeat_ngram_size
        return NgramFollowers(size, sequence.num_prompt_tokens, prompt_only=True)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        _ban(scores_NV, self._rows)


Rows = list[tuple[int, "Sequence", NgramFollowers]]


def _followers(rows: Seq[int], states: Seq[RowState], kind: type[Processor]) -> Rows:
    return [
        (row, state.sequence, cast("NgramFollowers", state.trackers[kind]))
        for row, state in zip(rows, states, strict=True)
    ]


def _ban(scores_NV: torch.Tensor, rows: Rows) -> None:
    vocab_size = scores_NV.shape[1]
    places: list[int] = []
    for row, sequence, followers in rows:
        first = row * vocab_size
        places += [first + token_id for token_id in followers.after(sequence.token_ids) if token_id < vocab_size]
    if places:
        scores_NV.view(-1)[uploaded(np.array(places, dtype=np.int64), scores_NV.device)] = -torch.inf
