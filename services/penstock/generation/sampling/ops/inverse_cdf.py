"""One draw per row by inverse CDF, always in the order of token ids.

The order of ids is the same for every algorithm that leads here and needs no sort. It also bends instead of breaking:
logits that differ in the last bits (another batch size, another machine) move each step of this CDF by as little,
whereas in the order of probability two nearly equal tokens that change places would exchange their whole intervals.
"""

from __future__ import annotations

import torch

_BLOCK = 128


def draw_from_candidates(weights_RC: torch.Tensor, ids_RC: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Places (R) in the candidates, drawn with probability proportional to `weights_RC` (fp64, 0 = dropped).

    Raises FloatingPointError when a row's weights do not sum to a number.
    """
    order_RC = ids_RC.argsort(dim=-1)
    cumulative_RC = weights_RC.gather(1, order_RC).cumsum(-1)
    places_R1 = _invert(cumulative_RC, _targets(cumulative_RC, uniforms_R))
    return order_RC.gather(1, places_R1)[:, 0]


def draw_from_vocabulary(weights_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Token ids (R), drawn with probability proportional to `weights_RV` (fp32, 0 = dropped).

    Two levels, so that only one block per row is summed token by token: first the block of ids, then the id. Raises
    FloatingPointError when a row's weights do not sum to a number.
    """
    vocab_size = weights_RV.shape[1]
    whole = vocab_size // _BLOCK
    sums_RB = torch.unflatten(weights_RV[:, : whole * _BLOCK], 1, (whole, _BLOCK)).sum(-1)
    tail_R1 = weights_RV[:, whole * _BLOCK :].sum(-1, keepdim=True)
    cumulative_RB = torch.cat([sums_RB, tail_R1], dim=1).cumsum(-1, dtype=torch.float64)
    targets_R1 = _targets(cumulative_RB, uniforms_R)
    blocks_R1 = _invert(cumulative_RB, targets_R1)
    before_R1 = torch.where(blocks_R1 > 0, cumulative_RB.gather(1, (blocks_R1 - 1).clamp_(min=0)), 0.0)
    ids_RW = blocks_R1 * _BLOCK + torch.arange(_BLOCK, device=weights_RV.device)
    weights_RW = weights_RV.gather(1, ids_RW.clamp(max=vocab_size - 1)).masked_fill_(ids_RW >= vocab_size, 0.0)
    cumulative_RW = before_R1 + weights_RW.cumsum(-1, dtype=torch.float64)
    return ids_RW.gather(1, _invert(cumulative_RW, targets_R1))[:, 0]


def _targets(cumulative_RC: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    totals_R1 = cumulative_RC[:, -1:]
    # A NaN among the scores leaves a NaN, or no weight at all where it was compared with something before.
    if not bool(((totals_R1 > 0) & (totals_R1 < torch.inf)).all()):
        raise FloatingPointError("the model produced logits that are not numbers")
    return uniforms_R[:, None] * totals_R1


def _invert(cumulative_RC: torch.Tensor, targets_R1: torch.Tensor) -> torch.Tensor:
    """First place (R, 1) whose cumulative weight exceeds the target: never one of weight 0.

    Where rounding leaves the target at or above the last sum, the last place with a weight.
    """
    places_R1 = (cumulative_RC <= targets_R1).sum(-1, keepdim=True)
    return torch.minimum(places_R1, (cumulative_RC < cumulative_RC[:, -1:]).sum(-1, keepdim=True))
