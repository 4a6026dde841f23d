"""All layers of a model, the last norm and a greedy draw as one call of the C++ kernels (csrc/ops_decoder.cpp): the
bits of the operators one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from penstock.generation.attention.native import NativeAttention
from penstock.generation.layers.kernels import NativeKernels
from penstock.generation.layers.linear.native import NativeLinear

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.layers.decoder_layer import DecoderLayer, RMSNorm
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.layers.rope import RotaryEmbedding


class FusedLayers:
    """Threads go through the layers together; between two operations they meet instead of being woken anew."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        rotary: RotaryEmbedding,
        table: Tensor | None,
    ) -> None:
        """`layers` and `head` must be `can_fuse`. `table`: the embedding, None where the head's rows are it."""
        last = cast(NativeLinear, head)
        first = cast(NativeLinear, layers[0].mlp.gated)
        sizes = [first.format, config.hidden_size, config.intermediate_size]
        sizes += [config.num_heads, config.num_kv_heads, config.head_dim]
        sizes += [last.format, last.out_features]
        tensors = [tensor for layer in layers for tensor in _tensors(layer)]
        tensors += [norm.weight, *last.tensors()]
        windows = [layer.attention.window or 0 for layer in layers]
        decoder: Any = torch.classes.penstock.Decoder(sizes, config.rms_norm_eps, tensors, windows)
        self._forward, self._decode = decoder.forward, decoder.decode
        self._rotary = rotary
        self._table = table

    def __call__(
        self,
        hidden_TI: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None,
        *,
        draws: bool,
    ) -> tuple[Tensor, Tensor]:
        """hidden_RI of `rows_R` (ascending; None: of all) after the final norm; overwrites the embeddings it is given.

        `draws`: also each one's id of the highest logit (R), the first of equals, -1 where that is not finite; else
        empty. A row that is not wanted ends with its keys and values in the last layer.
        """
        cos, sin = self._rotary.tables(metadata.max_context_len)
        result: tuple[Tensor, Tensor] = self._forward(
            hidden_TI,
            cos,
            sin,
            positions_T,
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.query_start,
            metadata.context_lens,
            rows_R,
            draws,
            *kv.tensors,
        )
        return result

    def decode(self, ids: list[int], lengths: list[int], longest: int, tables: Tensor, kv: KVCachePool) -> list[int]:
        """Tokens `ids`, one of each sequence, which with it are `lengths` long: what `draws` gives for them. `tables`
        as AttentionMetadata's, as wide as is wanted."""
        cos, sin = self._rotary.tables(longest)
        drawn: list[int] = self._decode(ids, lengths, tables, self._table, cos, sin, *kv.tensors)
        return drawn


def can_fuse(config: ModelConfig, layers: Sequence[DecoderLayer], head: Linear, attention: object) -> bool:
    """Whether everything is native, and no width needs padding."""
    if not layers or not isinstance(attention, NativeAttention) or not isinstance(head, NativeLinear):
        return False
    native = all(
        isinstance(linear, NativeLinear)
        for layer in layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gated, layer.mlp.down)
    )
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return (
        native
        and all(isinstance(layer.input_norm.kernels, NativeKernels) for layer in layers)
        and all(width % 2 == 0 for width in widths)
    )


def _tensors(layer: DecoderLayer) -> list[Tensor | None]:
    heads = layer.attention.heads
    found = [layer.input_norm.weight, layer.post_attention_norm.weight, heads.q_norm, heads.k_norm]
    for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gated, layer.mlp.down):
        found += cast(NativeLinear, linear).tensors()
    return found
