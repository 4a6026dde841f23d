"""The highest scores of each row, without sorting a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class CandidateTensors:
    """The C highest scores of R rows, by (score descending, id ascending).

    Tokens outside a row's candidates score at most its last candidate. So all of a set {score >= t} is among the
    candidates whenever t > the last one, or the candidates are the whole vocabulary (`is_complete`).
    """

    scores_RC: torch.Tensor
    ids_RC: torch.Tensor
    is_complete: bool


def top_candidates(scores_NV: torch.Tensor, rows_R: torch.Tensor, count: int) -> CandidateTensors:
    """Find the `count` highest scores of the selected rows by reading the vocabulary once, for the maxima of its
    blocks.

    The `count` blocks with the highest maxima hold `count` scores >= the lowest of these maxima, and no other block
    holds a greater one: they contain the highest scores.
    """
    vocab_size = scores_NV.shape[1]
    if vocab_size <= count * _BLOCK * 2:
        count = min(count, vocab_size)
        scores_RC, ids_RC = scores_NV.index_select(0, rows_R).topk(count, dim=-1)
    else:
        starts_RC, picked_RE = _best_blocks(scores_NV, rows_R, count)
        scores_RC, places_RC = picked_RE.topk(count, dim=-1)
        ids_RC = starts_RC.gather(1, places_RC // _BLOCK) + places_RC % _BLOCK
    ids_RC, order_RC = ids_RC.sort(dim=-1)
    scores_RC, order_RC = scores_RC.gather(1, order_RC).sort(dim=-1, descending=True, stable=True)
    return CandidateTensors(scores_RC, ids_RC.gather(1, order_RC), is_complete=count == vocab_size)


def _best_blocks(scores_NV: torch.Tensor, rows_R: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First ids (R, count) and scores (R, count * _BLOCK) of the blocks with the highest maxima."""
    vocab_size = scores_NV.shape[1]
    whole, rest = divmod(vocab_size, _BLOCK)
    maxima_NB = torch.unflatten(scores_NV[:, : whole * _BLOCK], 1, (whole, _BLOCK)).amax(-1)
    if rest:
        maxima_NB = torch.cat([maxima_NB, scores_NV[:, -rest:].amax(-1, keepdim=True)], dim=1)
    blocks_RC = maxima_NB.index_select(0, rows_R).topk(count, dim=-1, sorted=False).indices
    starts_RC = (blocks_RC * _BLOCK).clamp_(max=vocab_size - _BLOCK)
    # Every place of the flat scores starts a window; a block is one row of this view, without a copy of the whole.
    windows = scores_NV.view(-1).as_strided((scores_NV.numel() - _BLOCK + 1, _BLOCK), (1, 1))
    picked = windows.index_select(0, (starts_RC + rows_R[:, None] * vocab_size).flatten())
    picked_RCW = picked.view(*starts_RC.shape, _BLOCK)
    if rest:
        # The window of the last block starts in the one before: those scores must not be found twice.
        picked_RCW[:, :, : _BLOCK - rest].masked_fill_((blocks_RC == whole)[:, :, None], -torch.inf)
    return starts_RC, picked_RCW.flatten(1)
