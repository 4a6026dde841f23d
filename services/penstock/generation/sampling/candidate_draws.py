"""What rows get whose strategy chooses itself (DrawKind.CANDIDATES): their highest processed scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.engine.draw import Candidates
from penstock.generation.engine.request import PositionLogprobs
from penstock.generation.engine.step import SampledToken
from penstock.generation.sampling.candidates import top_candidates
from penstock.generation.sampling.gumbel import gumbel_noise
from penstock.generation.sampling.logprobs import top_logprobs

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.candidates import Candidates as TopScores
    from penstock.generation.sampling.state import SamplingState

    # Ids and what they are ranked by, best first.
    Ranked = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]

# Noise is made for every token, unless fewer than one in so many is left.
_FEW = 8
# So few keys are sorted whole.
_SORTED_WHOLE = 2048
# How many of the highest scores are found at once; the surplus over what is asked holds ties.
_SIZES = (16, 32, 64, 128, 256, 512)


def draw_candidates(batch: SamplingBatch, scores_NV: torch.Tensor) -> dict[int, SampledToken]:
    """Row -> what it gets, of the batch's candidate rows, from their processed (and warped) scores.

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
    # A NaN is found before any number.
    if any(score != score or score == torch.inf for score in highest):
        raise FloatingPointError("the model produced logits that are not numbers")
    ranked = _by_score(scores_RV, found, counts)
    results = {}
    for row, state, scores_V, best, by_score in zip(rows, states, scores_RV, highest, ranked, strict=True):
        total = _log_total(scores_V, best, state)
        results[row] = _draw(scores_V, state, by_score, total)
    return results


def _draw(scores_V: torch.Tensor, state: SamplingState, by_score: Ranked, total: float) -> SampledToken:
    spec, num_top = state.sequence.draw, state.plan.num_top
    ids_C, keys_C = by_score
    # At a temperature of 0 there is no noise.
    if spec.gumbel_slot is not None and not state.plan.is_greedy:
        ids_C, keys_C = _by_noisy_score(scores_V, state, spec.gumbel_slot, spec.num_candidates)
        scores = scores_V.cpu().numpy()[ids_C].tolist()
    else:
        # The scores themselves, which fp64 holds as they are.
        scores = keys_C.tolist()
    candidates = Candidates(
        token_ids=tuple(ids_C.tolist()),
        scores=tuple(scores),
        keys=tuple(keys_C.tolist()),
        extra_scores=tuple(scores_V[list(spec.extra_ids)].tolist()) if spec.extra_ids else (),
        log_total=total,
        ranks=() if num_top is None else _ranks(scores_V, scores),
    )
    top = None if num_top is None else PositionLogprobs(None, top_logprobs(scores_V, num_top, total))
    return SampledToken(-1, candidates=candidates, logprobs=top)


def _ranks(scores_V: torch.Tensor, scores: list[float]) -> tuple[int, ...]:
    """1 + the number of higher scores, of each of `scores`: by one sort, however many are asked for."""
    given_V = scores_V.cpu().numpy()
    wanted = np.array(scores, dtype=given_V.dtype)
    at_least_E = np.sort(given_V[given_V >= wanted.min()]) if len(wanted) else given_V
    return tuple((1 + len(at_least_E) - at_least_E.searchsorted(wanted, side="right")).tolist())


def _log_total(scores_V: torch.Tensor, highest: float, state: SamplingState) -> float:
    """log(sum(exp(scores))), from log_softmax: a plain sum over one row is split by the number of threads."""
    if highest == -torch.inf:
        return highest
    if state.sequence.draw.log_softmax and state.leaves_scores_alone:
        return 0.0
    return highest - float(scores_V.log_softmax(-1).amax())


def _rows(scores_NV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The rows' scores; no copy where they are neighbours, as the beams of a request are."""
    first, last = rows[0], rows[-1]
    if rows == list(range(first, last + 1)):
        return scores_NV[first : last + 1]
    return scores_NV[torch.tensor(rows, device=scores_NV.device)]


def _by_score(scores_RV: torch.Tensor, found: TopScores, counts: list[int]) -> list[Ranked]:
    """The highest finite scores of each row, `counts` of them: (ids, scores), equals by ascending id."""
    ids_RC = found.ids_RC.cpu().numpy()
    scores_RC = found.scores_RC.double().cpu().numpy()
    results: list[Ranked] = []
    for row, count in enumerate(counts):
        ids_C, keys_C = ids_RC[row], scores_RC[row]
        if count and not found.is_complete and keys_C[-1] == keys_C[count - 1] and keys_C[-1] > -np.inf:
            # Equals reach beyond what was found: which of them have the lowest ids only the whole row tells.
            ids_C = (scores_RV[row] >= float(keys_C[-1])).nonzero()[:, 0].cpu().numpy()
            keys_C = scores_RV[row].double().cpu().numpy()[ids_C]
            order = np.argsort(-keys_C, kind="stable")
            ids_C, keys_C = ids_C[order], keys_C[order]
        kept = min(count, int((keys_C > -np.inf).sum()))
        results.append((ids_C[:kept], keys_C[:kept]))
    return results


def _by_noisy_score(scores_V: torch.Tensor, state: SamplingState, slot: int, count: int) -> Ranked:
    """The highest finite scores with Gumbel noise: (ids, scores with noise), best first."""
    given_V = scores_V.cpu().numpy()
    is_left_V = given_V > -np.inf
    position, num_left = state.sequence.num_output_tokens, int(np.count_nonzero(is_left_V))
    if not num_left:
        return np.empty(0, dtype=np.int64), np.empty(0)
    ids_E = np.flatnonzero(is_left_V) if num_left * _FEW < len(given_V) else np.arange(len(given_V))
    keys_E = given_V[ids_E] if len(ids_E) < len(given_V) else given_V
    keys_E = keys_E + gumbel_noise(state.key, position, slot, ids_E)
    if len(keys_E) <= _SORTED_WHOLE:
        order = np.argsort(-keys_E, kind="stable")
    else:
        # Two keys of 53 random bits are not equal, so how it orders equals does not matter.
        only_row = torch.zeros(1, dtype=torch.int64)
        order = top_candidates(torch.from_numpy(keys_E)[None], only_row, max(count, 1)).ids_RC[0].numpy()
    order = order[: min(count, num_left)]
    return ids_E[order], keys_E[order]
