"""The SynthID watermark."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Self, cast

import torch

from penstock.generation.core.decoding_mode import SynthIdOptions
from penstock.generation.sampling.ops.synthid_numbers import coin_flips, context_hash, g_values, tournament
from penstock.generation.sampling.processors.base import Processor, Stage
from penstock.generation.sampling.trackers import Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class ContextHistory(Tracker):
    """Hashes of the newest contexts of an output's draws, and the context of the next draw."""

    __slots__ = ("_context", "_first", "_hashes", "_num_seen", "_options", "_times")

    def __init__(self, options: SynthIdOptions, num_prompt_tokens: int) -> None:
        self._options = options
        self._first = num_prompt_tokens
        self._clear()

    @property
    def is_skipped(self) -> bool:
        """True when the next token stays unmarked, since it has no whole context."""
        return self._options.skip_first_ngram_calls and self._num_seen + 1 < self._options.ngram_len

    @property
    def next_hash(self) -> int:
        """Hash of the context of the next draw."""
        return context_hash(self._context)

    def has(self, hashed: int) -> bool:
        """True when a token was drawn after this context before. A history that is not full counts as zeros."""
        return self._times[hashed] > 0 or (hashed == 0 and len(self._hashes) < self._options.context_history_size)

    def follow(self, token_ids: Seq[int], start: int) -> None:
        if start == 0:
            self._clear()
        for token_id in token_ids[max(start, self._first) :]:
            if not self.is_skipped:
                self._remember(self.next_hash)
            self._context.append(token_id)
            self._num_seen += 1

    def copy(self) -> Self:
        twin = type(self)(self._options, self._first)
        twin._num_seen = self._num_seen
        twin._context, twin._hashes, twin._times = self._context.copy(), self._hashes.copy(), self._times.copy()
        return twin

    def _remember(self, hashed: int) -> None:
        size = self._options.context_history_size
        if size == 0:
            return
        if len(self._hashes) == size:
            oldest = self._hashes.popleft()
            self._times[oldest] -= 1
            if not self._times[oldest]:
                del self._times[oldest]
        self._hashes.append(hashed)
        self._times[hashed] += 1

    def _clear(self) -> None:
        length = self._options.ngram_len - 1
        self._context: deque[int] = deque([0] * length, maxlen=length)
        self._num_seen = 0
        self._hashes: deque[int] = deque()
        self._times: Counter[int] = Counter()


class SynthId(Processor):
    """transformers' SynthIDTextWatermarkLogitsProcessor, after the warpers.

    The state belongs to each sequence and follows from its output, also under beams and drafts, where transformers'
    state follows rows. Tokens that other options removed stay removed; there they get the lowest number of the type.
    """

    stage = Stage.LATE

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [
            (
                row,
                state.sequence.params.watermark,
                cast("torch.Tensor", state.prepared[SynthId]).to(device),
                cast("ContextHistory", state.trackers[SynthId]),
            )
            for row, state in zip(rows, states, strict=True)
        ]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return isinstance(params.watermark, SynthIdOptions)

    @staticmethod
    def prepare(params: SamplingParams) -> torch.Tensor:
        assert isinstance(params.watermark, SynthIdOptions), "the row wants it"
        return coin_flips(params.watermark)

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> ContextHistory:
        options = sequence.params.watermark
        assert isinstance(options, SynthIdOptions), "the row wants it"
        return ContextHistory(options, sequence.num_prompt_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row, options, flips, history in self._rows:
            assert isinstance(options, SynthIdOptions), "the row wants it"
            hashed = history.next_hash
            if not history.is_skipped and not history.has(hashed):
                _mark(scores_NV[row], options, flips, hashed)


def _mark(scores_V: torch.Tensor, options: SynthIdOptions, flips: torch.Tensor, hashed: int) -> None:
    """Replace the scores of tokens that are not removed by the logarithms of their new probabilities."""
    # Warped rows hold few tokens: only these are looked up.
    ids_C = (scores_V != -torch.inf).nonzero()[:, 0]
    if not len(ids_C):
        return
    probs_C = tournament(scores_V[ids_C].softmax(-1), g_values(options, flips, hashed, ids_C))
    # Rounding may leave less than 0; a NaN of the model stays one.
    scores_V[ids_C] = probs_C.clamp_(min=0.0).log_().clamp_(min=torch.finfo(scores_V.dtype).min)
