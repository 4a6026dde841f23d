"""Rank 0's model: it tells the other ranks of each call, and computes its own part."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from torch import Tensor

from penstock.generation.models.registry import read_model_config
from penstock.generation.parallel.leader_adapters import LeaderAdapter, LeaderBatch, part_of_rank
from penstock.generation.parallel.processes import RankLost
from penstock.generation.parallel.rank_messages import StepOrder, encode_copies, encode_hidden
from penstock.generation.weights.sharding import adapter_copies
from penstock.generation.weights.tensor_names import tensor_shapes

if TYPE_CHECKING:
    import torch

    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.attention.cache_layout import LayerSight
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.attention.state_pool import StateTensor
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.core.step import BlockCopy
    from penstock.generation.layers.lora import AdapterBatch, AdapterWeights, EmbeddingPart, LoraPart
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.models.hidden_keeper import LayerTaps, StateKeeper
    from penstock.generation.parallel.processes import Ranks

_NO_ATTENTIONS = "is not possible with this model: --tensor-parallel has its heads in several processes"


def lead(folder: Path, own: CausalLM, ranks: Ranks) -> LeaderModel:
    """Return the whole model of `folder`; `own` is this rank's part."""
    whole = read_model_config(folder)
    made = own.config
    config = dataclasses.replace(
        whole,
        dtype=made.dtype,
        num_parameters=sum(math.prod(shape) for shape in tensor_shapes(whole).values()),
        weight_forms=made.weight_forms,
    )
    return LeaderModel(config, own, ranks)


class LeaderModel:
    """A LanguageModel over several processes, with the methods of CausalLM. Hidden states are whole in every rank;
    heads and logits are apart."""

    def __init__(self, config: ModelConfig, own: CausalLM, ranks: Ranks) -> None:
        """Take the configuration of the whole model, and the part of this rank."""
        self.config = config
        self.dtype: torch.dtype = own.dtype
        self.device: torch.device = own.device
        self.num_bytes = own.num_bytes
        self.mapped_bytes = own.mapped_bytes
        self.attention: Attention = own.attention
        self.ranks = ranks
        self._own = own

    @property
    def num_kv_heads(self) -> int:
        return self._own.num_kv_heads

    @property
    def can_draw(self) -> bool:
        """Layers wait for one another."""
        return False

    def draws_in(self, metadata: AttentionMetadata) -> bool:
        return False

    @property
    def head_site(self) -> int:
        return self._own.head_site

    @property
    def unsupported(self) -> Mapping[str, str]:
        return {"output.output_attentions": _NO_ATTENTIONS}

    @property
    def windows(self) -> Sequence[int | None]:
        return self._own.windows

    @property
    def sights(self) -> Sequence[LayerSight]:
        return self._own.sights

    @property
    def state_layout(self) -> Sequence[StateTensor]:
        return ()

    def shallow(self, num_layers: int) -> LeaderModel:
        return LeaderModel(self.config, self._own.shallow(num_layers), self.ranks)

    @property
    def head(self) -> None:
        """None: see CausalLM; its rows are in several processes."""

    def adapter_copies(self, site: int | None) -> tuple[int, int]:
        """Copies of all ranks."""
        return adapter_copies(site, self.config, self.ranks.group.shard.count)

    def adapter_weights(
        self, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None
    ) -> AdapterWeights:
        """Every rank gets its part, and forgets it when the returned object is freed. On any thread.

        Raises ResourceExhausted and InvalidArgument if another rank could not take its part. If one has ended, raises
        StartupError while the model loads, then Unavailable (ENGINE_FAILED; ENGINE_STOPPED: the ranks were closed).
        """
        shard = self.ranks.group.shard
        try:
            # If this is left early, the result is forgotten.
            loading = self.ranks.load_adapter(sites, embedding)
            own = part_of_rank(self._own, self.config, shard, sites, embedding)
            held = loading.result()
        except RankLost as error:
            raise self.ranks.as_seen(error) from error
        # Every rank has about as much as this one.
        return LeaderAdapter(held, own, frozenset(sites), own.num_bytes * shard.count)

    def adapter_batch(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> AdapterBatch:
        return LeaderBatch(cast("Sequence[LeaderAdapter | None]", adapters), counts, self._own.adapter_batch)

    def blocks_are_copied(self, copies: Sequence[BlockCopy]) -> None:
        self.ranks.send(encode_copies(copies))

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
    ) -> Tensor:
        batch = cast("LeaderBatch | None", adapters)
        spans = None if batch is None else batch.spans
        with self._telling_of_loss():
            # The number of layers that this rank computes, for any pool: the ranks add up the parts of each.
            order = StepOrder.of(len(self._own.layers), input_ids_T, metadata, embeds_TI, spans)
            self.ranks.send(order.encoded())
            return self._own.forward(
                input_ids_T,
                positions_T,
                metadata,
                kv,
                rows_R,
                embeds_TI=embeds_TI,
                keeper=keeper,
                attention=attention,
                adapters=None if batch is None else batch.own,
            )

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
    ) -> NoReturn:
        raise RuntimeError("the head of this model is in several processes")

    def decode(
        self,
        ids: list[int],
        lengths: list[int],
        longest: int,
        tables_SB: Tensor,
        kv: KVCachePool,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> NoReturn:
        raise RuntimeError("the head of this model is in several processes")

    def compute_logits(self, hidden_NI: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        batch = cast("LeaderBatch | None", adapters)
        if batch is not None and not batch.changes_site(self.head_site):
            batch = None
        own, spans = (None, None) if batch is None else (batch.own, batch.spans)
        with self._telling_of_loss():
            self.ranks.send(encode_hidden(hidden_NI, spans))
            logits_NV = self.ranks.group.columns(self._own.compute_logits(hidden_NI, own), self.config.vocab_size)
        assert logits_NV is not None, "this is rank 0"
        return logits_NV

    @contextlib.contextmanager
    def _telling_of_loss(self) -> Iterator[None]:
        """Turn a failure into that of an ended rank: a collective may notice before the thread of the ranks does."""
        try:
            yield
        except RuntimeError as error:
            lost = self.ranks.loss()
            if lost is None:
                raise
            raise lost from error

    def normed(self, hidden_NI: Tensor) -> Tensor:
        return self._own.normed(hidden_NI)

    def embed(self, input_ids_T: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """On any thread: every rank has the whole embedding."""
        batch = cast("LeaderBatch | None", adapters)
        return self._own.embed(input_ids_T, None if batch is None else batch.own)

    def given_embeds(self, embeds_PI: Tensor) -> Tensor:
        return self._own.given_embeds(embeds_PI)
