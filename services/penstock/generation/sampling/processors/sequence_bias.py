"""Biases of token sequences: on the token that would complete one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from penstock.generation.attention.to_device import uploaded
from penstock.generation.sampling.processors.base import LARGEST_SCORE, Processor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams, TokenSequence
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState

# Last tokens and their biases.
Entries = tuple["npt.NDArray[np.int64]", "npt.NDArray[np.float32]"]


class SuffixBiases:
    """Biased sequences of one request, found by the tokens before their last one."""

    def __init__(self, biases: Iterable[tuple[TokenSequence, float]]) -> None:
        found: dict[TokenSequence, tuple[list[int], list[float]]] = {}
        for token_ids, bias in biases:
            ids, values = found.setdefault(token_ids[:-1], ([], []))
            ids.append(token_ids[-1])
            # Infinities remove a token; any other bias stays a finite number through all later steps.
            values.append(bias if np.isinf(bias) else min(max(bias, -LARGEST_SCORE), LARGEST_SCORE))
        # Last tokens and biases, by all tokens before the last one.
        self._entries: dict[TokenSequence, Entries] = {
            prefix: (np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32))
            for prefix, (ids, values) in found.items()
        }
        self._lengths = sorted({len(prefix) for prefix in self._entries})

    def after(self, token_ids: list[int]) -> list[Entries]:
        """Return the biases of the token after `token_ids`. The cost grows with the lengths of the sequences, not with
        their number."""
        found = []
        for length in self._lengths:
            if length > len(token_ids):
                break
            entries = self._entries.get(tuple(token_ids[len(token_ids) - length :]))
            if entries is not None:
                found.append(entries)
        return found


class SequenceBias(Processor):
    """transformers' SequenceBiasLogitsProcessor; the biases of all sequences that a token would complete add up."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = _biases(rows, states, SequenceBias)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.sequence_bias)

    @staticmethod
    def prepare(params: SamplingParams) -> SuffixBiases:
        return SuffixBiases(params.sequence_bias.items())

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        _add(scores_NV, self._rows)


class BadWords(Processor):
    """transformers' NoBadWordsLogitsProcessor: removes the token that would complete a bad word. An end-of-sequence id
    alone is no bad word."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = _biases(rows, states, BadWords)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return bool(params.bad_words_ids)

    @staticmethod
    def prepare(params: SamplingParams) -> SuffixBiases:
        eos = {(token_id,) for token_id in params.eos_token_ids}
        return SuffixBiases((word, -np.inf) for word in dict.fromkeys(params.bad_words_ids) if word not in eos)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        _add(scores_NV, self._rows)


Rows = list[tuple[int, "Sequence", SuffixBiases]]


def _biases(rows: Seq[int], states: Seq[RowState], kind: type[Processor]) -> Rows:
    return [
        (row, state.sequence, cast("SuffixBiases", state.prepared[kind]))
        for row, state in zip(rows, states, strict=True)
    ]


def _add(scores_NV: torch.Tensor, rows: Rows) -> None:
    vocab_size = scores_NV.shape[1]
    places: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.float32]] = []
    for row, sequence, biases in rows:
        for ids_E, values_E in biases.after(sequence.token_ids):
            is_known_E = ids_E < vocab_size
            places.append(ids_E[is_known_E] + row * vocab_size)
            values.append(values_E[is_known_E])
    if places:
        index = uploaded(np.concatenate(places), scores_NV.device)
        added = uploaded(np.concatenate(values), scores_NV.device)
        scores_NV.view(-1).index_add_(0, index, added)
