"""The draws of one step: some rows go through candidates, others through the whole vocabulary; and their logprobs.

Work on the vocabulary of several rows takes a few rows at a time: they stay in the processor's cache, and the memory
does not grow with the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.core.step import SampledToken
from penstock.generation.sampling.batch import WARPED
from penstock.generation.sampling.nucleus import warp_candidates
from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.counted_draws import draw_from_candidates, draw_from_vocabulary
from penstock.generation.sampling.ops.logprobs import position_logprobs

if TYPE_CHECKING:
    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.draw_context import DrawContext


def not_numbers() -> FloatingPointError:
    """Make the error of a row with a NaN, or without a possible choice."""
    return FloatingPointError("the model produced logits that are not numbers")


class Drawing:
    """One step's results, filled in by `greedy` and `sampled` from the processed scores."""

    # Scores that are worked on at a time: 4 MiB of fp32.
    scores_at_a_time = 1 << 20

    def __init__(self, batch: SamplingBatch, scores_NV: torch.Tensor, context: DrawContext) -> None:
        self._batch = batch
        self._context = context
        self._scores_NV = scores_NV
        self._rows_at_a_time = max(1, self.scores_at_a_time // scores_NV.shape[1])
        self.token_ids_N = torch.empty(len(batch.states), dtype=torch.int64, device=scores_NV.device)
        # Row -> logprobs, of the rows that asked.
        self.logprobs: dict[int, PositionLogprobs] = {}

    def normalise(self) -> None:
        """Replace scores by their log_softmax, in place, in rows with processors that work on log-probabilities."""
        states = self._batch.states
        rows = [row for row in self._batch.candidate_rows if states[row].sequence.draw.log_softmax]
        if rows and rows[-1] - rows[0] == len(rows) - 1:
            # Neighbours, as the beams of a request are, need no copy.
            given_RV = self._scores_NV[rows[0] : rows[-1] + 1]
            torch.log_softmax(given_RV, -1, out=given_RV)
            return
        for few_R in self._few(self._batch.index(rows)):
            self._scores_NV[few_R] = self._scores_NV[few_R].log_softmax(-1)

    def warp(self, picked_R: torch.Tensor) -> None:
        """Run every warper on the sampled rows `picked_R`, in place."""
        for few_R in self._few(picked_R):
            rows_R = self._batch.sampled_index_M[few_R]
            scores_RV = self._scores_NV.index_select(0, rows_R)
            self._warp(scores_RV, few_R, rows_R)
            self._scores_NV.index_copy_(0, rows_R, scores_RV)

    def _warp(self, scores_RV: torch.Tensor, picked_R: torch.Tensor, rows_R: torch.Tensor) -> None:
        context = self._context.of_rows(picked_R, rows_R)
        for warper in self._batch.warpers:
            warper.apply(scores_RV, context)

    def tokens(self) -> list[SampledToken]:
        """Return the results of every row, with the requested logprobs."""
        return self._tokens(self.token_ids_N.tolist())

    def _tokens(self, token_ids: list[int]) -> list[SampledToken]:
        if not self.logprobs:
            return [SampledToken(token_id) for token_id in token_ids]
        return [
            SampledToken(token_id, entry.chosen.logprob, entry)
            if (entry := self.logprobs.get(row)) is not None and entry.chosen is not None
            else SampledToken(token_id)
            for row, token_id in enumerate(token_ids)
        ]

    def greedy(self) -> None:
        """Choose the first of the highest scores for every row; `sampled` overwrites the choice for sampled rows.

        On CPU numpy does it: torch's argmax is several times slower there. Raises FloatingPointError on a NaN, and for
        a row without a possible choice.
        """
        batch, scores_NV = self._batch, self._scores_NV
        if scores_NV.device.type == "cpu":
            self.token_ids_N = torch.from_numpy(scores_NV.numpy().argmax(-1))
        else:
            self.token_ids_N = scores_NV.argmax(-1)
        # Either argmax prefers a NaN to any number. Most often every row is greedy, or at least free of NaN.
        is_fine_N = np.isfinite(scores_NV.gather(1, self.token_ids_N[:, None])[:, 0].cpu().numpy())
        if not is_fine_N.all() and not is_fine_N[batch.greedy_rows].all():
            raise not_numbers()
        self._greedy_logprobs()

    def _greedy_logprobs(self) -> None:
        batch = self._batch
        asking = [row for row in batch.greedy_rows if row in batch.num_top] if batch.num_top else []
        if asking:
            self._add_greedy_logprobs(batch.index(asking))

    def _add_greedy_logprobs(self, asking_R: torch.Tensor) -> None:
        # Greedy rows have no warpers: their scores are final.
        for rows_R in self._few(asking_R):
            self._add_logprobs(rows_R, self.token_ids_N[rows_R], self._scores_NV.index_select(0, rows_R), None)

    def sampled(self, uniforms_M: torch.Tensor) -> None:
        """Draw for every sampled row. Raises FloatingPointError on a NaN."""
        for key, picked_R in self._batch.groups.items():
            count, has_top_k = key
            rest_R = self._through_candidates(picked_R, uniforms_M, count, has_top_k) if count > 0 else picked_R
            for few_R in self._few(rest_R):
                self._through_vocabulary(few_R, uniforms_M, is_warped=key == WARPED)

    def _through_candidates(
        self, picked_R: torch.Tensor, uniforms_M: torch.Tensor, count: int, has_top_k: bool
    ) -> torch.Tensor:
        """Draw for the rows with sufficient candidates; return the other rows."""
        rows_R = self._batch.sampled_index_M[picked_R]
        found = top_candidates(self._scores_NV, rows_R, count)
        total_R1 = None if has_top_k else self._softmax_totals(picked_R)
        nucleus = warp_candidates(self._batch, picked_R, found, total_R1)
        places_R, is_number_R1 = draw_from_candidates(nucleus.weights_RC, found.ids_RC, uniforms_M[picked_R])
        self._check(is_number_R1)
        # Rows that are not exact are written too, and overwritten when they are drawn again.
        self.token_ids_N[rows_R] = found.ids_RC.gather(1, places_R[:, None])[:, 0]
        for few in self._wanted(rows_R):
            scores_RC = nucleus.scores_RC[few].masked_fill_(nucleus.weights_RC[few] == 0.0, -torch.inf)
            self._add_logprobs(rows_R[few], places_R[few], scores_RC, found.ids_RC[few])
        return self._inexact(picked_R, nucleus.is_exact_R)

    def _inexact(self, picked_R: torch.Tensor, is_exact_R: torch.Tensor) -> torch.Tensor:
        """Return those of `picked_R` with insufficient candidates."""
        return picked_R[:0] if bool(is_exact_R.all()) else picked_R[~is_exact_R]

    def _check(self, is_number_R1: torch.Tensor) -> None:
        """Raise FloatingPointError if a row was not drawn from numbers."""
        if not bool(is_number_R1.all()):
            raise not_numbers()

    def _softmax_totals(self, picked_R: torch.Tensor) -> torch.Tensor:
        """Sum of exp(score - highest) of the tempered rows (R, 1; fp64): the inverse of the highest probability."""
        highest = []
        for few_R in self._few(picked_R):
            rows_R = self._batch.sampled_index_M[few_R]
            scores_RV = self._scores_NV.index_select(0, rows_R)
            self._batch.temperature.apply(scores_RV, self._context.of_rows(few_R, rows_R))
            highest.append(scores_RV.softmax(-1).amax(-1, keepdim=True))
        return torch.cat(highest).double().reciprocal_()

    def _through_vocabulary(self, picked_R: torch.Tensor, uniforms_M: torch.Tensor, *, is_warped: bool) -> None:
        rows_R = self._batch.sampled_index_M[picked_R]
        scores_RV = self._scores_NV.index_select(0, rows_R)
        if not is_warped:
            self._warp(scores_RV, picked_R, rows_R)
        probs_RV = scores_RV.softmax(-1)
        places_R, is_number_R1 = draw_from_vocabulary(probs_RV, uniforms_M[picked_R])
        self._check(is_number_R1)
        self.token_ids_N[rows_R] = places_R
        for few in self._wanted(rows_R):
            self._add_logprobs(rows_R[few], places_R[few], scores_RV[few], None)

    def _wanted(self, rows_R: torch.Tensor) -> list[torch.Tensor]:
        """Places of the rows that asked for logprobs, a few at a time."""
        num_top = self._batch.num_top
        places = [place for place, row in enumerate(rows_R.tolist()) if row in num_top] if num_top else []
        return self._few(self._batch.index(places))

    def _few(self, index_R: torch.Tensor) -> list[torch.Tensor]:
        """Return the index in parts of a few rows; no part when it is empty."""
        return list(torch.split(index_R, self._rows_at_a_time)) if len(index_R) else []

    def _add_logprobs(
        self, rows_R: torch.Tensor, places_R: torch.Tensor, scores_RC: torch.Tensor, ids_RC: torch.Tensor | None
    ) -> None:
        rows = rows_R.tolist()
        num_top = [self._batch.num_top[row] for row in rows]
        self.logprobs.update(zip(rows, position_logprobs(scores_RC, places_R, num_top, ids_RC), strict=True))
