"""A draft head's layer, its norm and its scores in one call of the C++ kernels, and chains of drafts in one call
(csrc/decoder/ops_draft.cpp). Results have the same bits as by the operators one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.generation.layers.decoder_layer import DecoderLayer, NoNorm, SelfAttention, SwiGLU
from penstock.generation.layers.linear.native import NativeLinear
from penstock.generation.models.fused import can_fuse, named_parts, named_tensors, own_sizes

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.layers.decoder_layer import RMSNorm
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.layers.rope import RotaryEmbedding
    from penstock.generation.models.fused import FusedLayers

# Of csrc/decoder/decoder_parts.h: the residual stream begins with the state, or with its norm.
_STATE, _NORMED_STATE = 1, 2


class HeadParts(NamedTuple):
    """Parts of a head with one layer that reads two rows side by side."""

    embed_norm: RMSNorm
    state_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: SwiGLU
    norm: RMSNorm
    head: Linear
    # The residual stream begins with the normed state.
    starts_normed: bool


class ChainLimits(NamedTuple):
    """Ends of a sequence's chain."""

    # Most drafts, at least 1.
    most: int
    # A chain ends after a draft with less probability; 0: none has.
    least_probability: float
    # It ends before any of these ids.
    ends: Sequence[int]


class FusedHead:
    """The fused layer."""

    def __init__(self, config: ModelConfig, parts: HeadParts, rotary: RotaryEmbedding) -> None:
        """Take parts that `fused_head` accepted."""
        layer, last = _layer(parts), cast(NativeLinear, parts.head)
        sizes = {
            "gate": int(config.activation),
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "head_format": int(last.format),
            "vocab": last.out_features,
            "joint": _NORMED_STATE if parts.starts_normed else _STATE,
        }
        factors = {
            "eps": config.rms_norm_eps,
            "attention_scale": parts.attention.layer.scale,
            "softcap": 0.0,
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
        }
        norms = {"norm": parts.norm, "embed_norm": parts.embed_norm, "state_norm": parts.state_norm}
        weights = {name: norm.weight for name, norm in norms.items()}
        self.decoder: Any = torch.classes.penstock.Decoder(
            sizes, factors, [named_tensors(layer)], [own_sizes(layer)], {**weights, **named_parts("head", last)}
        )
        self._rotary = rotary

    def step(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> tuple[Tensor, Tensor]:
        """Return for the last row of each sequence DraftHead.forward's result (S, hidden), and its scores."""
        result: tuple[Tensor, Tensor] = self.decoder.draft_step(
            *self._rows(embeds_TI, features_TI, positions_T, metadata, metadata.max_context_len),
            metadata.block_tables,
            metadata.query_start,
            metadata.context_lens,
            *kv.tensors,
        )
        return result

    def chain(
        self,
        embeds_TI: Tensor,
        features_TI: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        tables_SB: Tensor,
        kv: KVCachePool,
        embedding: tuple[Any, Tensor | None],
        served_ids: Tensor | None,
        limits: Sequence[ChainLimits],
    ) -> list[list[int]]:
        """Return the drafts of each sequence by the highest scores.

        `tables_SB` has the blocks of all rows that there may be. `embedding`: the decoder that knows the drafts'
        embeddings, and their table; None: the rows of its head.
        """
        longest = metadata.max_context_len + max(one.most for one in limits) - 1
        decoder, table = embedding
        drafts: list[list[int]] = self.decoder.draft_chain(
            *self._rows(embeds_TI, features_TI, positions_T, metadata, longest),
            tables_SB,
            metadata.query_start,
            metadata.context_lens,
            *kv.tensors,
            decoder,
            table,
            served_ids,
            [one.most for one in limits],
            [one.least_probability for one in limits],
            [list(one.ends) for one in limits],
        )
        return drafts

    def _rows(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, length: int
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
        cos, sin = self._rotary.tables(length)
        return embeds_TI.contiguous(), features_TI.contiguous(), [cos], [sin], positions_T, metadata.slot_mapping


def fused_head(
    config: ModelConfig, parts: HeadParts, rotary: RotaryEmbedding, attention: Attention
) -> FusedHead | None:
    """Return the fused layer of a head; None: some part is not native."""
    # Its kernels round norms as the layers of most families do, not once.
    if config.has_gates or not isinstance(parts.attention, SelfAttention) or not isinstance(parts.mlp, SwiGLU):
        return None
    if not can_fuse(config, [_layer(parts)], parts.norm, parts.head, attention):
        return None
    return FusedHead(config, parts, rotary)


def served_embedding(fused: FusedLayers | None) -> tuple[Any, Tensor | None] | None:
    """Return what FusedHead.chain needs to know the served model's embeddings; None: its layers are not fused."""
    return None if fused is None else (fused.decoder, fused.table)


def _layer(parts: HeadParts) -> DecoderLayer:
    """Return the layer as a decoder's: its first norm is of two rows."""
    return DecoderLayer(NoNorm(parts.norm.kernels), parts.attention, parts.mlp_norm, parts.mlp)
