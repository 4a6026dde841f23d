"""The highest scores of each row, without sorting a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Candidates:
    """The C highest scores of R rows, by (score descending, id ascending).

    Tokens that are not among a row's candidates score at most its last candidate. So a set {score >= t} lies wholly
    in the candidates whenever t > the last one, or the candidates are the whole vocabulary (`is_complete`).
    """

    scores_RC: torch.Tensor
    ids_RC: torch.Tensor
    is_complete: bool


def top_candidates(scores_NV: torch.Tensor, rows_R: torch.Tensor, count: int) -> Candidates:
    """The `count` highest scores of the selected rows, by reading the vocabulary once for the maxima of its blocks.

    The `count` blocks with the highest maxima hold `count` scores >= the lowest of these maxima, and no other block
    holds a greater one: they contain the highest scores.
    """
    vocab_size = scores_NV.shape[1]
    if vocab_size <= count * _BLOCK * 2:
        count = min(count, vocab_size)
        scores_RC, ids_RC = scores_NV[rows_R].topk(count, dim=-1)
    else:
        ids_RE = _ids_of_best_blocks(scores_NV, rows_R, count)
        is_padding_RE = ids_RE >= vocab_size
        ids_RE.clamp_(max=vocab_size - 1)
        picked_RE = scores_NV.view(-1)[ids_RE + rows_R[:, None] * vocab_size]
        scores_RC, places_RC = picked_RE.masked_fill_(is_padding_RE, -torch.inf).topk(count, dim=-1)
        ids_RC = ids_RE.gather(1, places_RC)
    ids_RC, order_RC = ids_RC.sort(dim=-1)
    scores_RC, order_RC = scores_RC.gather(1, order_RC).sort(dim=-1, descending=True, stable=True)
    return Candidates(scores_RC, ids_RC.gather(1, order_RC), is_complete=count == vocab_size)


def _ids_of_best_blocks(scores_NV: torch.Tensor, rows_R: torch.Tensor, count: int) -> torch.Tensor:
    """Token ids (R, count * _BLOCK) of the `count` blocks with the highest maxima; the last block may pass the end."""
    whole = scores_NV.shape[1] // _BLOCK
    maxima_NB = torch.unflatten(scores_NV[:, : whole * _BLOCK], 1, (whole, _BLOCK)).amax(-1)
    if whole * _BLOCK < scores_NV.shape[1]:
        maxima_NB = torch.cat([maxima_NB, scores_NV[:, whole * _BLOCK :].amax(-1, keepdim=True)], dim=1)
    blocks_RC = maxima_NB[rows_R].topk(count, dim=-1, sorted=False).indices
    within = torch.arange(_BLOCK, device=scores_NV.device)
    return (blocks_RC[:, :, None] * _BLOCK + within).flatten(1)
