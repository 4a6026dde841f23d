"""Interface of a loaded model to runner and start: a native decoder, or transformers' own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.attention.cache_layout import LayerSight
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.attention.state_pool import StateTensor
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.core.step import BlockCopy
    from penstock.generation.layers.lora import AdapterBatch, AdapterWeights
    from penstock.generation.models.hidden_keeper import LayerTaps, StateKeeper


class LanguageModel(Protocol):
    """Model of one process. CausalLM documents its methods; shapes and errors are the same everywhere."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    # Memory of the weights, and the part of it that is mapped from the page cache.
    num_bytes: int
    mapped_bytes: int
    attention: Attention

    @property
    def can_draw(self) -> bool: ...

    def draws_in(self, metadata: AttentionMetadata) -> bool: ...

    @property
    def head_site(self) -> int: ...

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Unsupported fields of a request, and the reason for each."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads that this process's pool has."""

    @property
    def windows(self) -> Sequence[int | None]:
        """Number of positions that a row of each layer that attends sees, itself included; None: all."""

    @property
    def sights(self) -> Sequence[LayerSight]:
        """Positions that the rows of each layer that attends read in the pool."""

    @property
    def state_layout(self) -> Sequence[StateTensor]:
        """Tensors of the state that layers keep of each sequence. Empty: there are keys and values only."""

    def shallow(self, num_layers: int) -> LanguageModel:
        """A model that cannot be cut returns itself, for which pools need all layers."""

    def blocks_are_copied(self, copies: Sequence[BlockCopy]) -> None:
        """Note that blocks of the pool are copied before the next pass; other processes, if any, copy theirs, too."""

    def adapter_batch(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> AdapterBatch: ...

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None = None,
        *,
        embeds_TI: Tensor | None = None,
        keeper: StateKeeper | None = None,
        attention: Attention | None = None,
        adapters: AdapterBatch | None = None,
    ) -> Tensor: ...

    def forward_and_draw(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None = None,
        embeds_TI: Tensor | None = None,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def decode(
        self,
        ids: list[int],
        lengths: list[int],
        longest: int,
        tables_SB: Tensor,
        kv: KVCachePool,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> list[int]: ...

    def compute_logits(self, hidden_NI: Tensor, adapters: AdapterBatch | None = None) -> Tensor: ...

    def embed(self, input_ids_T: Tensor, adapters: AdapterBatch | None = None) -> Tensor: ...

    def given_embeds(self, embeds_PI: Tensor) -> Tensor: ...
