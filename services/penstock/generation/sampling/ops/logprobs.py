"""Log-probabilities and ranks, for the rows that asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.core.request import Logprob, PositionLogprobs, at_most_0
from penstock.generation.sampling.ops.candidates import top_candidates

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.sampling.ops.candidates import CandidateTensors

# More than the API allows, and the same for every row: the choice among equal scores must not depend on the number that
# other rows of the batch request.
LISTED = 32


def position_logprobs(
    scores_RV: torch.Tensor, chosen_R: torch.Tensor, num_top: Seq[int], ids_RV: torch.Tensor | None = None
) -> list[PositionLogprobs]:
    """Return the chosen token and the `num_top[r]` most likely ones of each row.

    They are the natural log of the softmax of `scores_RV`, which need not be normalised. -inf marks tokens that a
    processor removed; these are never listed, so `top` is shorter if fewer survived. A rank is 1 + the number of
    strictly more likely tokens. `chosen_R` holds places in the row; `ids_RV` maps places to token ids, None: the places
    are the ids.
    """
    chosen_R1 = chosen_R[:, None]
    all_rows = torch.arange(len(scores_RV), device=scores_RV.device)
    top = top_candidates(scores_RV, all_rows, max(LISTED, *num_top))
    logprobs_RV = scores_RV.log_softmax(-1)
    chosen_logprobs = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    top_logprobs = logprobs_RV.gather(1, top.ids_RC).tolist()
    # Ranks come from the scores: log_softmax may round two of them to one value. Comparing into a float tensor (exact
    # up to 2**24) is ten times faster than summing booleans.
    higher_RV = torch.gt(scores_RV, scores_RV.gather(1, chosen_R1), out=logprobs_RV)
    ranks = (higher_RV.sum(-1).to(torch.int64) + 1).tolist()
    chosen = zip(_ids(ids_RV, chosen_R1)[:, 0].tolist(), chosen_logprobs, ranks, strict=True)
    return listed_logprobs(
        list(chosen), (top.scores_RC.tolist(), _ids(ids_RV, top.ids_RC).tolist(), top_logprobs), num_top
    )


def listed_logprobs(
    chosen: list[tuple[int, float, int]],
    top: tuple[list[list[float]], list[list[int]], list[list[float]]],
    num_top: Seq[int],
) -> list[PositionLogprobs]:
    """Return, for every row, the chosen token (id, logprob, rank) and the first `num_top` of `top`, which holds
    descending scores, ids and logprobs."""
    return [
        PositionLogprobs(Logprob(token_id, at_most_0(logprob), rank), _ranked(scores[:k], ids[:k], logprobs[:k]))
        for (token_id, logprob, rank), scores, ids, logprobs, k in zip(chosen, *top, num_top, strict=True)
    ]


def top_logprobs(found: CandidateTensors, row: int, num_top: int, log_total: float) -> tuple[Logprob, ...]:
    """Return the `num_top` most likely tokens of one row of candidates; `log_total` is the log of the sum of
    exp(scores)."""
    scores = found.scores_RC[row, :num_top].tolist()
    return _ranked(scores, found.ids_RC[row, :num_top].tolist(), [score - log_total for score in scores])


def _ids(ids_RV: torch.Tensor | None, places_RK: torch.Tensor) -> torch.Tensor:
    return places_RK if ids_RV is None else ids_RV.gather(1, places_RK)


def _ranked(scores: list[float], ids: list[int], logprobs: list[float]) -> tuple[Logprob, ...]:
    """Entries of descending scores; equal scores share a rank."""
    entries: list[Logprob] = []
    for place, (score, token_id, logprob) in enumerate(zip(scores, ids, logprobs, strict=True)):
        if score == -torch.inf:
            break
        rank = entries[-1].rank if place and score == scores[place - 1] else place + 1
        entries.append(Logprob(token_id, at_most_0(logprob), rank))
    return tuple(entries)
