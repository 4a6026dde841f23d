"""An indexer of sparse attention: what it keeps of a token, and the positions that it chooses for a row.

The Hadamard turn and the fp8 numbers of DeepSeek's own code are left out, as in transformers: the turn changes no
product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.attention.base import rotate
from penstock.generation.layers.index_choice import IndexQueries
from penstock.generation.layers.latent_prompts import PromptRows, chosen_prompt

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.chosen_rows import SparseSplit
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.index_heads import IndexHeads
    from penstock.generation.layers.index_choice import IndexChoice
    from penstock.generation.layers.linear.base import Linear


@dataclass(frozen=True, slots=True)
class ChosenPositions:
    """Positions that an indexer chose in a step, in the forms in which attention reads them."""

    # Of single rows; None: there are none.
    singles: AttentionMetadata | None
    prompts: tuple[PromptRows, ...]


class Indexer:
    """The products of one layer's indexer, and its choice."""

    def __init__(
        self,
        place: int,
        heads: IndexHeads,
        turned_dim: int,
        queries: Linear,
        keys: Linear,
        norm: tuple[Tensor, Tensor],
        weights: Linear,
        choice: IndexChoice,
    ) -> None:
        """Take the layer's parts. `place`: number of the layer among those with index keys. The first `turned_dim` dims
        turn; `queries` reads the queries' narrow part, `weights` works in float32; `norm`: weight and bias."""
        self._place = place
        self._heads = heads
        self._turned_dim = turned_dim
        self._queries, self._keys, self._weights = queries, keys, weights
        self._norm = norm
        self._choice = choice
        self._scale = (heads.count * heads.dim) ** -0.5

    def write(self, x_TI: Tensor, turn: tuple[Tensor, Tensor], slots_T: Tensor, kv: KVCachePool) -> None:
        """Store the index keys of rows (T, hidden); `turn`: their cos and sin."""
        normed_TD = F.layer_norm(self._keys(x_TI), (self._heads.dim,), *self._norm, self._heads.eps)
        kv.write_index(self._place, slots_T, self._turned(normed_TD.unsqueeze(1), turn).squeeze(1))

    def choose(
        self, x_TI: Tensor, narrow_TR: Tensor, turn: tuple[Tensor, Tensor], split: SparseSplit, kv: KVCachePool
    ) -> ChosenPositions:
        """Return the positions that the rows of a split read. `narrow_TR`: narrow part of all rows' queries. The index
        keys of all rows are in the pool."""
        singles: AttentionMetadata | None = None
        prompts, most = list[PromptRows](), self._heads.most

        def queries(rows: Tensor | slice) -> IndexQueries:
            return self._made(x_TI[rows], narrow_TR[rows], (turn[0][rows], turn[1][rows]))

        if (plan := split.singles) is not None:
            own = queries(slice(None) if plan.rows is None else plan.rows)
            singles = plan.over(self._choice.of_singles(own, self._place, plan, kv, most))
        for one in split.prompts:
            own = queries(slice(one.first, one.last))
            position_TK = self._choice.of_prompt(own, self._place, one, kv, most)
            prompts.append(chosen_prompt(one.first, one.slots_C, position_TK, x_TI.dtype))
        return ChosenPositions(singles, tuple(prompts))

    def _made(self, x_TI: Tensor, narrow_TR: Tensor, turn: tuple[Tensor, Tensor]) -> IndexQueries:
        q_THD = self._queries(narrow_TR).view(-1, self._heads.count, self._heads.dim)
        return IndexQueries(self._turned(q_THD, turn), self._weights(x_TI.float()) * self._scale)

    def _turned(self, x_THD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Return x with its first dims turned. Where neighbours turn together they come out apart: in queries and keys
        alike, so their products stay."""
        turned, rest = x_THD[..., : self._turned_dim], x_THD[..., self._turned_dim :]
        if self._heads.is_interleaved:
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
        return torch.cat((rotate(turned, *turn), rest), dim=-1)
