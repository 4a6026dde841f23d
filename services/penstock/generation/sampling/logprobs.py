"""Log-probabilities and ranks, for the rows that asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.engine.request import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq


def position_logprobs(
    scores_RV: torch.Tensor, chosen_R: torch.Tensor, num_top: Seq[int], ids_RV: torch.Tensor | None = None
) -> list[PositionLogprobs]:
    """The chosen token and the `num_top[r]` most likely ones of each row.

    Natural log of the softmax of `scores_RV`, which need not be normalised; -inf marks tokens that a processor
    removed, and these are never listed, so `top` is shorter where fewer survived. A rank is 1 + the number of
    strictly more likely tokens. `chosen_R` holds places in the row; `ids_RV` maps places to token ids, None: they are
    the ids.
    """
    logprobs_RV = scores_RV.log_softmax(-1)
    # Ranks come from the scores: log_softmax may round two of them to one value. Booleans are summed as fp32, exact up
    # to 2**24 and far faster than as integers.
    higher_RV = torch.gt(scores_RV, scores_RV.gather(1, chosen_R[:, None])).to(torch.float32)
    top_RK, places_RK = scores_RV.topk(min(max(num_top), scores_RV.shape[1]), dim=-1)
    chosen = zip(
        _ids(ids_RV, chosen_R[:, None])[:, 0].tolist(),
        logprobs_RV.gather(1, chosen_R[:, None])[:, 0].tolist(),
        (higher_RV.sum(-1).to(torch.int64) + 1).tolist(),
        strict=True,
    )
    top_logprobs_RK = logprobs_RV.gather(1, places_RK)
    columns = zip(top_RK.tolist(), _ids(ids_RV, places_RK).tolist(), top_logprobs_RK.tolist(), num_top, strict=True)
    return [
        PositionLogprobs(Logprob(*one), _ranked(list(zip(scores[:k], ids[:k], logprobs[:k], strict=True))))
        for one, (scores, ids, logprobs, k) in zip(chosen, columns, strict=True)
    ]


def _ids(ids_RV: torch.Tensor | None, places_RK: torch.Tensor) -> torch.Tensor:
    return places_RK if ids_RV is None else ids_RV.gather(1, places_RK)


def _ranked(top: list[tuple[float, int, float]]) -> tuple[Logprob, ...]:
    """(score, id, logprob) as descending entries; equal scores share a rank and stand in the order of ids."""
    entries: list[Logprob] = []
    last_score = torch.inf
    for place, (score, token_id, logprob) in enumerate(sorted(top, key=lambda one: (-one[0], one[1]))):
        if score == -torch.inf:
            break
        rank = entries[-1].rank if score == last_score else place + 1
        entries.append(Logprob(token_id, logprob, rank))
        last_score = score
    return tuple(entries)
