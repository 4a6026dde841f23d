"""From logits to tokens.

processors (all rows) -> greedy rows: argmax
                      -> sampled rows: temperature, top_k, top_p, min_p, one draw by inverse CDF
                      -> logprobs, for the rows that asked

A row's result depends on its own scores, options, seed and position only: which algorithm it takes is decided by its
own data, and every algorithm treats its rows one by one (no reduction is split by the number of rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.generation.engine.step import SampledToken
from penstock.generation.sampling.batch import SamplingBatch
from penstock.generation.sampling.candidates import top_candidates
from penstock.generation.sampling.draw import draw_from_candidates, draw_from_vocabulary
from penstock.generation.sampling.logprobs import position_logprobs
from penstock.generation.sampling.nucleus import warp_candidates
from penstock.generation.sampling.state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    import numpy as np
    import numpy.typing as npt

    from penstock.generation.engine.request import PositionLogprobs
    from penstock.generation.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Rows that were drawn together: their places in `weights_RC`, whose columns are `ids_RC` (None: all ids)."""

    rows_R: torch.Tensor
    places_R: torch.Tensor
    weights_RC: torch.Tensor
    ids_RC: torch.Tensor | None

    @property
    def token_ids_R(self) -> torch.Tensor:
        if self.ids_RC is None:
            return self.places_R
        return self.ids_RC.gather(1, self.places_R[:, None])[:, 0]


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
        token_ids_N = torch.empty(len(sequences), dtype=torch.int64, device=self._device)
        if batch.greedy_rows:
            token_ids_N = _argmax(logits_NV)
        drawn = self._draw(batch, logits_NV, batch.uniforms(positions_N)) if batch.sampled_rows else []
        for group in drawn:
            token_ids_N[group.rows_R] = group.token_ids_R
        self._check_finite(logits_NV, token_ids_N)
        logprobs = _logprobs(batch, logits_NV, token_ids_N, drawn) if batch.logprob_rows else {}
        return [
            SampledToken(token_id, entry.chosen.logprob, entry)
            if (entry := logprobs.get(row)) is not None and entry.chosen is not None
            else SampledToken(token_id)
            for row, token_id in enumerate(token_ids_N.tolist())
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

    def _draw(self, batch: SamplingBatch, scores_NV: torch.Tensor, uniforms_M: torch.Tensor) -> list[_Drawn]:
        drawn: list[_Drawn] = []
        for (count, has_top_k), picked_R in batch.groups.items():
            if count == 0:
                drawn.append(_draw_on_vocabulary(batch, picked_R, scores_NV, uniforms_M))
            else:
                drawn.extend(_draw_on_candidates(batch, picked_R, scores_NV, uniforms_M, count, has_top_k))
        return drawn

    @staticmethod
    def _check_finite(scores_NV: torch.Tensor, token_ids_N: torch.Tensor) -> None:
        if scores_NV.gather(1, token_ids_N[:, None]).isnan().any():
            raise FloatingPointError("the model produced NaN logits")


def _draw_on_candidates(
    batch: SamplingBatch,
    picked_R: torch.Tensor,
    scores_NV: torch.Tensor,
    uniforms_M: torch.Tensor,
    count: int,
    has_top_k: bool,
) -> list[_Drawn]:
    rows_R = batch.sampled_index_M[picked_R]
    found = top_candidates(scores_NV, rows_R, count)
    total_R1 = None if has_top_k else _softmax_totals(batch, picked_R, scores_NV[rows_R])
    nucleus = warp_candidates(batch, picked_R, found, total_R1)
    places_R = draw_from_candidates(nucleus.weights_RC, found.ids_RC, uniforms_M[picked_R])
    drawn = _Drawn(rows_R, places_R, nucleus.weights_RC, found.ids_RC)
    if bool(nucleus.is_exact_R.all()):
        return [drawn]
    exact, rest = nucleus.is_exact_R, ~nucleus.is_exact_R
    kept = _Drawn(rows_R[exact], places_R[exact], nucleus.weights_RC[exact], found.ids_RC[exact])
    return [kept, _draw_on_vocabulary(batch, picked_R[rest], scores_NV, uniforms_M)]


def _draw_on_vocabulary(
    batch: SamplingBatch, picked_R: torch.Tensor, scores_NV: torch.Tensor, uniforms_M: torch.Tensor
) -> _Drawn:
    rows_R = batch.sampled_index_M[picked_R]
    scores_RV = scores_NV[rows_R]
    for warper in batch.warpers:
        warper.apply(scores_RV, picked_R)
    probs_RV = scores_RV.softmax(-1)
    return _Drawn(rows_R, draw_from_vocabulary(probs_RV, uniforms_M[picked_R]), probs_RV, None)


def _softmax_totals(batch: SamplingBatch, picked_R: torch.Tensor, scores_RV: torch.Tensor) -> torch.Tensor:
    """Sum of exp(score - highest) of the tempered rows (R, 1; fp64): the inverse of the highest probability."""
    batch.temperature.apply(scores_RV, picked_R)
    return scores_RV.softmax(-1).amax(-1, keepdim=True).double().reciprocal_()


def _argmax(scores_NV: torch.Tensor) -> torch.Tensor:
    """The first of the highest scores of each row; by numpy on CPU, where torch's argmax is several times slower."""
    if scores_NV.device.type == "cpu":
        return torch.from_numpy(scores_NV.numpy().argmax(-1))
    return scores_NV.argmax(-1)


def _logprobs(
    batch: SamplingBatch, scores_NV: torch.Tensor, token_ids_N: torch.Tensor, drawn: list[_Drawn]
) -> dict[int, PositionLogprobs]:
    """Row -> logprobs of the rows that asked; greedy rows have no warpers, so their scores are final."""
    wanted = dict(batch.logprob_rows)
    results: dict[int, PositionLogprobs] = {}
    greedy = [row for row in batch.greedy_rows if row in wanted]
    if greedy:
        index_R = batch.index(greedy)
        entries = position_logprobs(scores_NV[index_R], token_ids_N[index_R], [wanted[row] for row in greedy])
        results.update(zip(greedy, entries, strict=True))
    for group in drawn:
        places = [place for place, row in enumerate(group.rows_R.tolist()) if row in wanted]
        if places:
            index_R = batch.index(places)
            rows = group.rows_R[index_R].tolist()
            ids_RC = None if group.ids_RC is None else group.ids_RC[index_R]
            scores_RC = group.weights_RC[index_R].log_()
            num_top = [wanted[row] for row in rows]
            entries = position_logprobs(scores_RC, group.places_R[index_R], num_top, ids_RC)
            results.update(zip(rows, entries, strict=True))
    return results
