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
    chosen_R1 = logprobs_RV.gather(1, chosen_R[:, None])
    # Summed as fp32, exact up to 2**24 and far faster than sums of booleans.
    ranks_R = torch.gt(logprobs_RV, chosen_R1).to(torch.float32).sum(-1).to(torch.int64) + 1
    top_RK, places_RK = logprobs_RV.topk(min(max(num_top), logprobs_RV.shape[1]), dim=-1)
    if ids_RV is None:
        ids_R, ids_RK = chosen_R, places_RK
    else:
        ids_R, ids_RK = ids_RV.gather(1, chosen_R[:, None])[:, 0], ids_RV.gather(1, places_RK)
    chosen = zip(ids_R.tolist(), chosen_R1[:, 0].tolist(), ranks_R.tolist(), strict=True)
    top = zip(ids_RK.tolist(), top_RK.tolist(), num_top, strict=True)
    return [
        PositionLogprobs(Logprob(token_id, logprob, rank), _ranked(ids[:k], logprobs[:k]))
        for (token_id, logprob, rank), (ids, logprobs, k) in zip(chosen, top, strict=True)
    ]


def _ranked(ids: list[int], logprobs: list[float]) -> tuple[Logprob, ...]:
    """Descending logprobs with ranks; equal ones share a rank and stand in the order of ids."""
    ordered = sorted(zip(logprobs, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    entries: list[Logprob] = []
    for place, (logprob, token_id) in enumerate(ordered):
        if logprob == -torch.inf:
            break
        tied = bool(entries) and entries[-1].logprob == logprob
        entries.append(Logprob(token_id, logprob, entries[-1].rank if tied else place + 1))
    return tuple(entries)
