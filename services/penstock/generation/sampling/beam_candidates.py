"""The highest processed scores of rows with a strategy that chooses itself (DrawKind.CANDIDATES)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.core.draw import Candidates
from penstock.generation.core.request import PositionLogprobs
from penstock.generation.core.step import SampledToken
from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.counted_draws import token_stream
from penstock.generation.sampling.ops.logprobs import LISTED, top_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.request import Logprob
    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.ops.candidates import CandidateTensors as TopScores
    from penstock.generation.sampling.ops.gumbel import Ranked
    from penstock.generation.sampling.sampling_kernels import SamplingKernels
    from penstock.generation.sampling.state import SamplingState

# Number of highest scores to find at once; the surplus over the requested number holds ties.
_SIZES = (16, 32, 64, 128, 256, 512)


def draw_candidates(batch: SamplingBatch, scores_NV: torch.Tensor, kernels: SamplingKernels) -> dict[int, SampledToken]:
    """Return row -> result for the batch's candidate rows, from their processed (and warped) scores.

    A row with nothing finite has no candidates and a total of -inf: a beam that cannot go on. Raises
    FloatingPointError when a row holds a NaN or +inf.
    """
    rows = batch.candidate_rows
    scores_RV = _rows(scores_NV, rows)
    states = [batch.states[row] for row in rows]
    counts = [state.sequence.draw.num_candidates for state in states]
    size = next((size for size in _SIZES if size > max(counts)), max(counts) + 1)
    found = top_candidates(scores_RV, torch.arange(len(rows), device=scores_NV.device), size)
    highest = found.scores_RC[:, 0].tolist()
    # The search prefers a NaN to any number.
    if any(score != score or score == torch.inf for score in highest):
        raise FloatingPointError("the model produced logits that are not numbers")
    ranked = _by_score(scores_RV, found, counts)
    totals = _log_totals(scores_RV, highest, states, kernels)
    tops = _top_logprobs(scores_RV, states, totals)
    ranked = [noisy or by_score for noisy, by_score in zip(_noisy(scores_RV, states, kernels), ranked, strict=True)]
    given = zip(rows, states, scores_RV, ranked, totals, tops, strict=True)
    return {row: _draw(scores_V, state, *found) for row, state, scores_V, *found in given}


def _top_logprobs(
    scores_RV: torch.Tensor, states: Seq[SamplingState], totals: list[float]
) -> list[tuple[Logprob, ...] | None]:
    """Return the most likely tokens of every row; None for a row that did not ask."""
    wanted = [(place, state.plan.num_top) for place, state in enumerate(states) if state.plan.num_top is not None]
    tops: list[tuple[Logprob, ...] | None] = [None] * len(states)
    if wanted:
        rows_R = torch.tensor([place for place, _ in wanted], device=scores_RV.device)
        found = top_candidates(scores_RV, rows_R, max(LISTED, *(num_top for _, num_top in wanted)))
        for row, (place, num_top) in enumerate(wanted):
            tops[place] = top_logprobs(found, row, num_top, totals[place])
    return tops


def _draw(
    scores_V: torch.Tensor,
    state: SamplingState,
    ranked: Ranked,
    total: float,
    top: tuple[Logprob, ...] | None,
) -> SampledToken:
    spec = state.sequence.draw
    ids_C, keys_C = ranked
    # Without noise they are the keys, which fp64 holds as they are.
    scores = scores_V.cpu().numpy()[ids_C].tolist() if _has_noise(state) else keys_C.tolist()
    candidates = Candidates(
        token_ids=tuple(ids_C.tolist()),
        scores=tuple(scores),
        keys=tuple(keys_C.tolist()),
        extra_scores=tuple(scores_V[list(spec.extra_ids)].tolist()) if spec.extra_ids else (),
        log_total=total,
        ranks=() if top is None else _ranks(scores_V, scores),
    )
    return SampledToken(-1, candidates=candidates, logprobs=None if top is None else PositionLogprobs(None, top))


def _has_noise(state: SamplingState) -> bool:
    """True when the row's candidates are ranked with Gumbel noise; a temperature of 0 has none."""
    return state.sequence.draw.gumbel_slot is not None and not state.plan.is_greedy


def _noisy(scores_RV: torch.Tensor, states: Seq[SamplingState], kernels: SamplingKernels) -> list[Ranked | None]:
    """Return the highest scores with noise for the rows that have it, None for the others."""
    rows = [row for row, state in enumerate(states) if _has_noise(state)]
    found: list[Ranked | None] = [None] * len(states)
    if rows:
        chosen = [states[row] for row in rows]
        streams = [
            token_stream(state.key, state.sequence.num_output_tokens, state.sequence.draw.gumbel_slot or 0)
            for state in chosen
        ]
        counts = [state.sequence.draw.num_candidates for state in chosen]
        for row, ranked in zip(rows, kernels.top_noisy(scores_RV, rows, streams, counts), strict=True):
            found[row] = ranked
    return found


def _ranks(scores_V: torch.Tensor, scores: list[float]) -> tuple[int, ...]:
    """Return 1 + the number of higher scores for each of `scores`, by one sort for any number of them."""
    given_V = scores_V.cpu().numpy()
    wanted = np.array(scores, dtype=given_V.dtype)
    at_least_E = np.sort(given_V[given_V >= wanted.min()]) if len(wanted) else given_V
    return tuple((1 + len(at_least_E) - at_least_E.searchsorted(wanted, side="right")).tolist())


def _log_totals(
    scores_RV: torch.Tensor, highest: list[float], states: Seq[SamplingState], kernels: SamplingKernels
) -> list[float]:
    """Return log(sum(exp(scores))) of every row: -inf for a row without finite scores, 0 for log-probabilities."""
    totals = [one if one == -torch.inf else 0.0 for one in highest]
    unknown = [
        row
        for row, state in enumerate(states)
        if highest[row] > -torch.inf and not (state.sequence.draw.log_softmax and state.leaves_scores_alone)
    ]
    for row, total in zip(unknown, kernels.log_totals(scores_RV, unknown), strict=True):
        totals[row] = total
    return totals


def _rows(scores_NV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return the scores of the rows, without a copy if the rows are neighbours, as the beams of a request are."""
    first, last = rows[0], rows[-1]
    if rows == list(range(first, last + 1)):
        return scores_NV[first : last + 1]
    return scores_NV[torch.tensor(rows, device=scores_NV.device)]


def _by_score(scores_RV: torch.Tensor, found: TopScores, counts: list[int]) -> list[Ranked]:
    """Return the `counts` highest finite scores of each row as (ids, scores), equals by ascending id."""
    ids_RC = found.ids_RC.cpu().numpy()
    scores_RC = found.scores_RC.double().cpu().numpy()
    results: list[Ranked] = []
    for row, count in enumerate(counts):
        ids_C, keys_C = ids_RC[row], scores_RC[row]
        if count and not found.is_complete and keys_C[-1] == keys_C[count - 1] and keys_C[-1] > -np.inf:
            # Equal scores reach beyond those that were found: only the whole row shows the ones with the lowest ids.
            ids_C = (scores_RV[row] >= float(keys_C[-1])).nonzero()[:, 0].cpu().numpy()
            keys_C = scores_RV[row].double().cpu().numpy()[ids_C]
            order = np.argsort(-keys_C, kind="stable")
            ids_C, keys_C = ids_C[order], keys_C[order]
        kept = min(count, int((keys_C > -np.inf).sum()))
        results.append((ids_C[:kept], keys_C[:kept]))
    return results
