"""DoLa (Chuang et al. 2023): the last layer's distribution, contrasted with that of an earlier layer.

It follows transformers 4.55.4, the last release that had it in the library. Early exits go through the output head
without the final norm. Among the candidate layers, the one with the distribution farthest from the last layer's
(Jensen-Shannon) counts. Tokens below a tenth of the highest probability are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.models.hidden_keeper import HiddenKeeper

if TYPE_CHECKING:
    from penstock.generation.runner.draw_rows import DrawRows

# A token stays when its probability is at least this part of the highest one.
_RELATIVE_TOP = 0.1
# Distance of excluded tokens below the others when a grammar may allow only them: enough for a probability of 0, and
# small enough for fp32 to keep their order.
_FAR = 1e3
# Most rows of early-exit logits at a time, over all candidate layers; each takes vocabulary x 4 bytes, thrice.
_ROWS_AT_A_TIME = 64

# (hidden states, rows of the logits that they belong to) -> logits.
Logits = Callable[[Tensor, list[int]], Tensor]


class EarlyExits:
    """DoLa rows of one step: their early exits are kept, and contrasted with the logits."""

    def __init__(self, draws: DrawRows, device: torch.device) -> None:
        """`draws` has DoLa rows."""
        self._device = device
        # Rows with the same candidate layers are computed together: layers -> numbers of the DoLa rows.
        self._groups: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(draws.dola):
            self._groups.setdefault(row.layers, []).append(number)
        # Rows of the logits.
        self._rows = [row.place for row in draws.dola]
        self._has_grammar = [row.has_grammar for row in draws.dola]
        rows_R = torch.tensor([draws.rows[row] for row in self._rows], dtype=torch.int64, device=device)
        self.keeper = HiddenKeeper(rows_R, frozenset(layer for layers in self._groups for layer in layers))

    def contrast(self, logits_RV: Tensor, logits_of: Logits) -> None:
        """Replace DoLa rows of `logits_RV` in place. `keeper` is filled; `logits_of` is the model's output head."""
        for layers, numbers in self._groups.items():
            step = max(1, _ROWS_AT_A_TIME // len(layers))
            for begin in range(0, len(numbers), step):
                some = numbers[begin : begin + step]
                index = torch.tensor(some, dtype=torch.int64, device=self._device)
                hidden = torch.cat([self.keeper.states[layer].index_select(0, index) for layer in layers])
                places = [self._rows[number] for number in some]
                early_LRV = logits_of(hidden, places * len(layers)).view(len(layers), len(some), -1)
                rows = torch.tensor(places, dtype=torch.int64, device=self._device)
                behind = [place for place, number in enumerate(some) if self._has_grammar[number]]
                logits_RV[rows] = contrasted(logits_RV[rows], early_LRV, behind)


def contrasted(final_RV: Tensor, early_LRV: Tensor, behind: list[int]) -> Tensor:
    """Return (R, V) scores: the last layer's log-probability minus that of the candidate layer that differs most.

    Unlikely tokens are excluded; in the rows `behind` they are only placed after all others, in the last layer's order.
    """
    final_RV = final_RV.log_softmax(-1)
    early_LRV = early_LRV.log_softmax(-1)
    if len(early_LRV) == 1:
        base_RV = early_LRV[0]
    else:
        farthest_R = _divergence(final_RV, early_LRV).argmax(0)
        base_RV = early_LRV[farthest_R, torch.arange(len(farthest_R), device=farthest_R.device)]
    lowest_R1 = final_RV.amax(-1, keepdim=True) + math.log(_RELATIVE_TOP)
    is_out_RV = final_RV < lowest_R1
    scores_RV = (final_RV - base_RV).masked_fill_(is_out_RV, -torch.inf)
    if behind:
        scores_RV[behind] = torch.where(is_out_RV[behind], final_RV[behind] - _FAR, scores_RV[behind])
    return scores_RV


def _divergence(final_RV: Tensor, early_LRV: Tensor) -> Tensor:
    """Return (L, R): half the sum of both mean distances from the average, as `_dola_select_contrast` does."""
    average_LRV = (final_RV.exp() + early_LRV.exp()).mul_(0.5)
    from_final = F.kl_div(final_RV.expand_as(early_LRV), average_LRV, reduction="none").mean(-1)
    from_early = F.kl_div(early_LRV, average_LRV, reduction="none").mean(-1)
    return (from_final + from_early).mul_(0.5)
