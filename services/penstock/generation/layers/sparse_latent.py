"""Latent attention to the positions that an indexer chose (DeepSeek Sparse Attention: DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.chosen_rows import SparseSplit, over_slots, split_sparse
from penstock.generation.layers.latent_attention import LatentAttention, LowRankQueries
from penstock.generation.layers.latent_prompts import LEAST_ROWS

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionLayer
    from penstock.generation.core.latent_heads import LatentHeads
    from penstock.generation.layers.decoder_layer import RMSNorm, Step
    from penstock.generation.layers.indexer import ChosenPositions, Indexer
    from penstock.generation.layers.latent_rows import LatentRows
    from penstock.generation.layers.linear.base import Linear

# Key of the last indexer's choice in the plans of a step.
_CHOICE = "choice"


class SparseLatentAttention(LatentAttention):
    """Latent attention of rows that each read a bounded number of positions.

    A layer without an indexer reads the positions that the last one before it chose.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        sizes: LatentHeads,
        queries: LowRankQueries,
        row: Linear,
        norm: RMSNorm,
        expansion: Tensor,
        output: Linear,
        turn: int,
        most: int,
        indexer: Indexer | None,
    ) -> None:
        """Take the parts of LatentAttention. `most`: positions that a row reads at most; `indexer`: the layer's own."""
        super().__init__(layer, sizes, queries, row, norm, expansion, output, turn)
        self._low_rank = queries
        self._most = most
        self._indexer = indexer

    @override
    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        metadata, kv, turn = step.metadata, step.kv, step.turns[self.turn]
        narrow_TR = self._low_rank.narrow(x_TI)
        rows = self._rows(self._low_rank.widened(narrow_TR), x_TI, step)
        # Keys of short contexts, too: later rows choose among them.
        if self._indexer is not None:
            self._indexer.write(x_TI, turn, metadata.slot_mapping, kv)
        split = split_sparse(metadata, self._most, kv.block_size, LEAST_ROWS)
        if split is None:
            return self._addend(self._attend(rows, metadata, step), step)
        if self._indexer is not None:
            metadata.plans[_CHOICE] = self._indexer.choose(x_TI, narrow_TR, turn, split, kv)
        out_THV = self._attend_chosen(rows, split, cast("ChosenPositions", metadata.plans[_CHOICE]), step)
        return self._addend(out_THV, step)

    def _attend_chosen(self, rows: LatentRows, split: SparseSplit, choice: ChosenPositions, step: Step) -> Tensor:
        """Write the rows and return o (T, H, value dims): each row reads the positions chosen for it, or all."""
        kv, plan, attention = step.kv, split.singles, over_slots(step.attention)
        if plan is not None and choice.singles is not None and plan.rows is None:
            # The usual step, which writes all rows before any attends.
            return self._over_rows(rows, choice.singles, attention, kv.by_slot)
        # So here: a sequence may read what another one writes in this step.
        kv.write(self.layer.index, step.metadata.slot_mapping, rows.row_T1E, rows.row_T1E)
        out_THV = self._blank(rows)
        if plan is not None and choice.singles is not None and plan.rows is not None:
            own = rows.select(plan.rows)
            out_THV[plan.rows] = self._over_rows(own, choice.singles, attention, kv.by_slot)
        if choice.prompts:
            q_THX = rows.turned_queries()
            for prompt in choice.prompts:
                out_THV[prompt.first : prompt.last] = self._prompts.attend(q_THX, rows.row_T1E, prompt, kv)
        if split.dense is not None:
            part, dense = split.dense
            out_THV[dense] = self._attend(rows.select(dense), part, step)
        return out_THV
