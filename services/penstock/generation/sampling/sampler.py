"""From logits to tokens.

processors (all rows) -> greedy rows: argmax
                      -> sampled rows: temperature, top_k, top_p, min_p, one draw by inverse CDF
                      -> logprobs, for the rows that asked

A row's result depends on its own scores, options, seed and position only: which algorithm it takes is decided by its
own data, and every algorithm treats its rows one by one (no reduction is split by the number of rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.engine.step import SampledToken
from penstock.generation.sampling.batch import SamplingBatch
from penstock.generation.sampling.drawing import Drawing
from penstock.generation.sampling.state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    import numpy as np
    import numpy.typing as npt

    from penstock.generation.engine.sequence import Sequence


class Sampler:
    """Draws the next token of every row. Keeps state per sequence from its first draw until `release`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, SamplingState] = {}
        self._batch: SamplingBatch | None = None

    @torch.inference_mode()
    def sample(self, logits_NV: torch.Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """One token per row, for the sequence of that row.

        `logits_NV` (fp32, contiguous) are consumed: the processors work in place. Raises FloatingPointError when the
        model produced a NaN.
        """
        batch = self._batch_of(sequences)
        positions_N = batch.positions()
        self._process(batch, logits_NV, positions_N)
        drawing = Drawing(batch, logits_NV)
        if batch.greedy_rows:
            drawing.greedy()
        if batch.sampled_rows:
            drawing.sampled(batch.uniforms(positions_N))
        token_ids = drawing.token_ids_N.tolist()
        if not batch.num_top:
            return [SampledToken(token_id) for token_id in token_ids]
        return [
            SampledToken(token_id, entry.chosen.logprob, entry)
            if (entry := drawing.logprobs.get(row)) is not None and entry.chosen is not None
            else SampledToken(token_id)
            for row, token_id in enumerate(token_ids)
        ]

    @torch.inference_mode()
    def processed_scores(self, logits_NV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
        """What transformers' `output_scores` holds for this step: the scores that a token is drawn from (N, V).

        The reference for `sample`: every processor and warper on the whole vocabulary.
        """
        batch = self._batch_of(sequences)
        scores_NV = logits_NV.clone()
        self._process(batch, scores_NV, batch.positions())
        if batch.sampled_rows:
            warped_MV = scores_NV[batch.sampled_index_M]
            for warper in batch.warpers:
                warper.apply(warped_MV, batch.index(list(range(len(batch.sampled_rows)))))
            scores_NV[batch.sampled_index_M] = warped_MV
        return scores_NV

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; ids that never drew are fine."""
        for seq_id in seq_ids:
            if self._states.pop(seq_id, None) is not None:
                self._batch = None

    def _batch_of(self, sequences: Seq[Sequence]) -> SamplingBatch:
        """The batch of these sequences: last step's when it was the same."""
        last = self._batch
        if last is not None and last.is_of(sequences):
            return last
        states = []
        for sequence in sequences:
            state = self._states.get(sequence.seq_id)
            if state is None:
                state = self._states[sequence.seq_id] = SamplingState(sequence)
            states.append(state)
        self._batch = SamplingBatch(states, self._device)
        return self._batch

    @staticmethod
    def _process(batch: SamplingBatch, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for state in batch.counting:
            state.catch_up()
        for processor in batch.processors:
            processor.apply(scores_NV, positions_N)
