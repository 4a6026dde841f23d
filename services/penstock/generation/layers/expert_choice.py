"""Rules by which a router's scores choose each row's experts, and its shares in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.generation.layers.layer_kernels import LayerKernels, NativeKernels

if TYPE_CHECKING:
    from penstock.generation.core.model_config import Experts

# Of a row's scores (T, experts) in float32: its experts in ascending order, and its shares, (T, experts of a row) both.
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]
# DeepSeek's guard of a division.
_LEAST = 1e-20


def choice_of(experts: Experts, bias_X: Tensor | None = None, kernels: LayerKernels | None = None) -> Choice:
    """Return the rule of `experts`; `bias_X` is in float32. With native `kernels` one call of theirs makes the
    choice."""
    if isinstance(kernels, NativeKernels):
        return NativeChoice(experts, bias_X)
    return HighestOfAll(experts) if _takes_all(experts) else HighestOfGroups(experts, bias_X)


def _takes_all(experts: Experts) -> bool:
    return not experts.routing.is_sigmoid and experts.routing.num_groups == 1


class NativeChoice:
    """The rule by csrc/decoder/ops_choice.cpp. Of equal scores the first expert is chosen."""

    def __init__(self, experts: Experts, bias_X: Tensor | None) -> None:
        """Take the bias in float32; None: there is none."""
        routing, takes_all = experts.routing, _takes_all(experts)
        # As HighestOfAll, which knows none.
        self.bias = None if takes_all else bias_X
        # By the names of the operator, and of csrc/decoder.
        self.numbers: dict[str, int] = {
            "per_row": experts.per_row,
            "groups": routing.num_groups,
            "groups_of_row": routing.groups_of_row,
            "ranked_by": routing.ranked_by,
            "is_sigmoid": routing.is_sigmoid,
            "sums_to_one": experts.sums_to_one,
        }
        # Added to the sum of a row's shares; and a factor of each.
        self.least = 0.0 if takes_all else _LEAST
        self.scale = routing.scale
        self._choose: Choice = partial(
            torch.ops.penstock.choose_experts.default,
            bias=self.bias,
            **self.numbers,
            least=self.least,
            scale=self.scale,
        )

    def __call__(self, scores_TX: Tensor) -> tuple[Tensor, Tensor]:
        return self._choose(scores_TX)


class HighestOfAll:
    """Choice of the highest of the softmax."""

    def __init__(self, experts: Experts) -> None:
        self._per_row, self._sums_to_one = experts.per_row, experts.sums_to_one
        self._scale = experts.routing.scale

    def __call__(self, scores_TX: Tensor) -> tuple[Tensor, Tensor]:
        shares, experts = scores_TX.softmax(-1).topk(self._per_row, dim=-1)
        experts, order = experts.sort(-1)
        shares = shares.gather(-1, order)
        if self._sums_to_one:
            shares = shares / shares.sum(-1, keepdim=True)
        return experts, shares if self._scale == 1.0 else shares * self._scale


class HighestOfGroups:
    """Choice of the highest of the best groups, of a softmax or of sigmoids with a bias in the choice (DeepSeek V2 and
    V3)."""

    def __init__(self, experts: Experts, bias_X: Tensor | None) -> None:
        """Take the bias in float32; None: there is none."""
        self._per_row, self._sums_to_one = experts.per_row, experts.sums_to_one
        self._routing = experts.routing
        self._bias_X = bias_X

    def __call__(self, scores_TX: Tensor) -> tuple[Tensor, Tensor]:
        routing = self._routing
        scores_TX = scores_TX.sigmoid() if routing.is_sigmoid else scores_TX.softmax(-1)
        ranked_TX = scores_TX if self._bias_X is None else scores_TX + self._bias_X
        if routing.num_groups > 1:
            ranked_TX = self._of_best_groups(ranked_TX)
        experts = ranked_TX.topk(self._per_row, dim=-1).indices.sort(-1).values
        shares = scores_TX.gather(-1, experts)
        if self._sums_to_one:
            shares = shares / (shares.sum(-1, keepdim=True) + _LEAST)
        return experts, shares * routing.scale

    def _of_best_groups(self, ranked_TX: Tensor) -> Tensor:
        """Return the scores with minus infinity outside each row's best groups."""
        routing = self._routing
        ranked_TGX = ranked_TX.view(len(ranked_TX), routing.num_groups, -1)
        ranks_TG = ranked_TGX.topk(routing.ranked_by, dim=-1).values.sum(-1)
        best = ranks_TG.topk(routing.groups_of_row, dim=-1).indices
        is_out_TG = torch.ones_like(ranks_TG, dtype=torch.bool).scatter_(-1, best, False)
        return ranked_TGX.masked_fill(is_out_TG.unsqueeze(-1), -torch.inf).flatten(-2)
