"""Interface of a trained draft head: a decoder layer that reads the served model's hidden states and the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.generation.layers.decoder_layer import Step

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.layers.rope import RotaryEmbedding
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.models.fused_head import ChainLimits

# (ids) -> (ids, hidden): the served model's embedding.
Embed = Callable[[Tensor], Tensor]


class DraftHead(ABC):
    """Head with one layer of its own keys and values. Row t reads the served model's hidden states of token t and
    the embedding of token t + 1, and gives the scores of token t + 2.

    What it returns beside the scores takes the place of the hidden states in the row after the last known one: so it
    drafts several tokens, one row each.
    """

    # Kind of head in words, such as EAGLE-3.
    kind: str
    # Geometry of its layers, as of a model with these alone.
    config: ModelConfig
    num_layers: int = 1
    # Hidden states of the served model that a row reads, numbered as HiddenKeeper's.
    taps: tuple[int, ...]
    # Served model's id of each score, (scores) int64; None: they are the same.
    served_ids: Tensor | None
    dtype: torch.dtype
    device: torch.device
    # Memory of the weights.
    num_bytes: int
    num_parameters: int

    def __init__(self, attention: Attention, rotaries: Sequence[RotaryEmbedding], stream: torch.dtype) -> None:
        """Take what a step needs; `stream`: dtype of the residual stream."""
        self._attention = attention
        self._rotaries = tuple(rotaries)
        self._stream = stream

    @abstractmethod
    def features(self, taps_TKI: Tensor) -> Tensor:
        """Return rows (T, hidden) of the hidden states `taps`, (T, taps, hidden of the served model)."""

    @abstractmethod
    def forward(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> Tensor:
        """Return (T, hidden): what `scores` reads, and what stands for the features of the next row. Write all rows'
        keys and values into `kv`."""

    @abstractmethod
    def scores(self, hidden_NI: Tensor) -> Tensor:
        """Return (N, scores) in float32 of some rows of `forward`'s result."""

    def step(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> tuple[Tensor, Tensor]:
        """Return `forward`'s result for the last row of each sequence, (S, hidden), and the scores of these rows."""
        hidden_TI = self.forward(embeds_TI, features_TI, positions_T, metadata, kv)
        if len(hidden_TI) > metadata.num_seqs:
            hidden_TI = hidden_TI[metadata.query_start[1:].long() - 1]
        return hidden_TI, self.scores(hidden_TI)

    @property
    def can_chain(self) -> bool:
        """True when `chain` may be called."""
        return False

    def chain(
        self,
        embeds_TI: Tensor,
        features_TI: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        tables_SB: Tensor,
        kv: KVCachePool,
        limits: Sequence[ChainLimits],
    ) -> list[list[int]]:
        """Return the drafts of each sequence by the highest scores, as the served model's ids; arguments as of
        FusedHead.chain. Call it only where `can_chain`."""
        raise RuntimeError("this head drafts row by row")

    def embedded(self, ids_T: Tensor, embed: Embed) -> Tensor:
        """Return the embeddings that the head was trained with: the served model's, by `embed`."""
        return embed(ids_T)

    def share(self, model: CausalLM) -> None:
        """Take what it shares with the served model from `model`, which has the same shape. The old one is not kept.
        Nothing is shared by default."""
        return

    def _step(self, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool) -> Step:
        turns = [rotary(positions_T) for rotary in self._rotaries]
        return Step(turns, metadata, kv, self._attention, self._stream)


class BlockHead(DraftHead):
    """Head that makes a block of drafts in one pass. Row t of `forward` stands for the served model's token t, and
    keeps what the rows of a block read; the next token's embedding counts for nothing."""

    # Most drafts of a pass, and the token that stands for each.
    num_drafts: int
    mask_id: int

    @abstractmethod
    def block(self, embeds_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool) -> Tensor:
        """Return (T, hidden), what `scores` reads, of rows of the last token and of masks after it: the row of each
        mask gives a draft. Write all rows' keys and values into `kv`, where others replace them."""
