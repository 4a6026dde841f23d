"""Multi-head latent attention: one short row a token in the pool, and heads that read keys and values out of it.

A head's key is a product of its own with the latent, so the product of a query with that key is one of a changed query
with the latent itself: `q . (K c) = (q K) . c`. A head's output is likewise the product of V with the mean of the
latents, weighted once. So the pool's rows serve all heads as keys and as values, and nothing is expanded. Prompts are
(layers.latent_prompts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.generation.layers.head_products import COPIES, head_products
from penstock.generation.layers.latent_prompts import LatentPrompts, split_prompts
from penstock.generation.layers.latent_rows import LatentRows, finished_rows
from penstock.generation.layers.lora import OUTPUT

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.latent_heads import LatentHeads
    from penstock.generation.layers.decoder_layer import RMSNorm, Step
    from penstock.generation.layers.linear.base import Linear


class Queries(Protocol):
    """Products that make the queries of all heads."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Linear layers that --quantization changes."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map (T, hidden) to (T, heads * dims of a query)."""


class DirectQueries:
    """Queries of one product."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.linear,)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.linear(x_TI)


class LowRankQueries:
    """Queries of a product with few outputs, their norm, and a product with these."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear) -> None:
        self.down, self.norm, self.up = down, norm, up

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.down, self.up

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.widened(self.narrow(x_TI))

    def narrow(self, x_TI: Tensor) -> Tensor:
        """Return the normed outputs of the first product, (T, rank of the queries)."""
        return self.norm(self.down(x_TI))

    def widened(self, narrow_TR: Tensor) -> Tensor:
        """Return the queries of all heads that these make."""
        return self.up(narrow_TR)


class LatentAttention:
    """Queries, a token's row, paged attention over rows, output projection."""

    def __init__(
        self,
        layer: AttentionLayer,
        sizes: LatentHeads,
        queries: Queries,
        row: Linear,
        norm: RMSNorm,
        expansion: Tensor,
        output: Linear,
        turn: int = 0,
    ) -> None:
        """Take the layer's parts; `layer` is of one key/value head as wide as a row. `expansion` (heads * (plain dims
        + value dims), rank) makes keys and values of a latent; `turn` is the number of the rotary embedding in
        Step.turns."""
        self.layer = layer
        self.turn = turn
        self.output = output
        self.sizes = sizes
        self.queries = queries
        self.row = row
        self.norm = norm
        self._finish = finished_rows(sizes, norm)
        # (H, plain + value, rank): a view.
        both_HXR = expansion.view(layer.num_heads, sizes.plain_dim + sizes.value_dim, sizes.rank)
        # Of queries, to the rank, and of what heads read, from it.
        self.keys, self.values = COPIES.of(
            expansion,
            lambda: (
                head_products(both_HXR[:, : sizes.plain_dim].transpose(1, 2), norm.kernels),
                head_products(both_HXR[:, sizes.plain_dim :], norm.kernels),
            ),
        )
        self._prompts = LatentPrompts(layer, sizes, both_HXR)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Products that --quantization changes."""
        return (*self.queries.linears, self.row, self.output)

    @property
    def copied_bytes(self) -> int:
        """Memory beside the weights that it was made of: packed copies of the expansion."""
        return self.keys.copied_bytes + self.values.copied_bytes

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden); write this layer's rows into the pool."""
        metadata, kv = step.metadata, step.kv
        if kv.layout is not None:
            metadata = metadata.view(kv.view_of(self.layer.index))
        out_THV = self._attend(self._rows(self.queries(x_TI), x_TI, step), metadata, step)
        return self._addend(out_THV, step)

    def _rows(self, q_TX: Tensor, x_TI: Tensor, step: Step) -> LatentRows:
        """Return the rows of `x_TI`; `q_TX` are their queries before they turn."""
        q_THX = q_TX.view(-1, self.layer.num_heads, self.sizes.query_dim)
        return self._finish(q_THX, self.row(x_TI), *step.turns[self.turn])

    def _addend(self, out_THV: Tensor, step: Step) -> Tensor:
        """Return what the layer adds to the stream, of the heads' outputs."""
        return step.addend(self.output, out_THV.flatten(1), self.layer.index, OUTPUT)

    def _attend(self, rows: LatentRows, metadata: AttentionMetadata, step: Step) -> Tensor:
        """Write the rows and return o (T, H, value dims): each row reads all positions up to its own."""
        kv = step.kv
        split = None if step.attention.sees_queries else split_prompts(metadata, kv, rows.row_T1E.dtype)
        if split is None:
            return self._over_rows(rows, metadata, step.attention, kv)
        # Before any row attends: a sequence may read what another one writes in this step.
        kv.write(self.layer.index, metadata.slot_mapping, rows.row_T1E, rows.row_T1E)
        out_THV = self._blank(rows)
        q_THX = rows.turned_queries()
        for prompt in split.prompts:
            out_THV[prompt.first : prompt.last] = self._prompts.attend(q_THX, rows.row_T1E, prompt, kv)
        if split.others is not None:
            part, others = split.others
            out_THV[others] = self._over_rows(rows.select(others), part, step.attention, kv)
        return out_THV

    def _blank(self, rows: LatentRows) -> Tensor:
        """Return memory for o (T, H, value dims)."""
        return rows.plain_THX.new_empty((*rows.plain_THX.shape[:2], self.sizes.value_dim))

    def _over_rows(
        self, rows: LatentRows, metadata: AttentionMetadata, attention: Attention, kv: KVCachePool
    ) -> Tensor:
        """Return o (T, H, value dims) by attention over the pool's rows themselves."""
        rank, plain_THX = self.sizes.rank, rows.plain_THX
        q_THE = plain_THX.new_empty((*plain_THX.shape[:2], self.sizes.row_dim))
        self.keys(plain_THX, q_THE[..., :rank])
        q_THE[..., rank:] = rows.turned_THX
        mean_THE = attention.forward(q_THE, rows.row_T1E, rows.row_T1E, self.layer, metadata, kv)
        out_THV = self._blank(rows)
        self.values(mean_THE[..., :rank], out_THV)
        return out_THV
