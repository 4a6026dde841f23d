"""LoRA adapters of a model in several processes: each rank has a part of every adapter, by a number for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.generation.layers.lora import AdapterBatch, AdapterWeights, EmbeddingPart, LoraPart
from penstock.generation.parallel.messages import AdapterPartOrder, Spans
from penstock.generation.weights.sharding import Shard, adapter_parts

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.models.decoder import CausalLM

_NONE = -1
# CausalLM.adapter_batch of the part of the model in this process.
_MakeBatch = Callable[[Sequence[AdapterWeights | None], Sequence[int]], AdapterBatch]


class LeaderAdapter(AdapterWeights):
    """An adapter as rank 0 has it: its number in all ranks, and rank 0's part."""

    def __init__(self, number: int, own: AdapterWeights, sites: frozenset[int], num_bytes: int) -> None:
        """Take the sites of the whole adapter, and the bytes that it takes in all ranks."""
        self.number = number
        self.own = own
        self.sites = sites
        self.num_bytes = num_bytes
        self.embedding = own.embedding


class LeaderBatch(AdapterBatch):
    """Adapters of a batch for all ranks.

    What it changes is what the whole adapters change: a rank may have no part of a site.
    """

    # Only `own` meets an operator.
    native = None

    def __init__(self, adapters: Sequence[LeaderAdapter | None], counts: Sequence[int], make_own: _MakeBatch) -> None:
        """See AdapterBatch."""
        super().__init__(adapters, counts)
        self.own = make_own([None if one is None else one.own for one in adapters], counts)
        numbers = [_NONE if one is None else one.number for one in adapters]
        # (spans, 2)
        self.spans: np.ndarray = np.array([numbers, counts], np.int32).T
        self._adapters, self._make_own = adapters, make_own
        self._counts = counts
        self._sites = frozenset().union(*(one.sites for one in adapters if one is not None))

    def changes_site(self, site: int) -> bool:
        """See AdapterBatch."""
        return site in self._sites

    def select(self, rows: Sequence[int]) -> LeaderBatch:
        """See AdapterBatch."""
        by_row = np.repeat(np.arange(len(self._adapters)), self._counts)
        return LeaderBatch([self._adapters[by_row[row]] for row in rows], [1] * len(rows), self._make_own)


def part_of_rank(
    model: CausalLM,
    whole: ModelConfig,
    shard: Shard,
    sites: Mapping[int, Sequence[LoraPart]],
    embedding: EmbeddingPart | None,
) -> AdapterWeights:
    """Return the part of an adapter of the `whole` model that belongs to the part `model` of it."""
    own = {site: adapter_parts(site, parts, whole, shard) for site, parts in sites.items()}
    return model.adapter_weights({site: parts for site, parts in own.items() if parts}, embedding)


class RankAdapters:
    """Adapters of a rank other than 0, by their numbers."""

    def __init__(self, model: CausalLM, whole: ModelConfig, shard: Shard) -> None:
        """`model` is this rank's part of the model of `whole`."""
        self._model, self._whole, self._shard = model, whole, shard
        # Parts of adapters that are not complete: this rank's of each site, and the embedding's.
        self._sites: dict[int, dict[int, list[LoraPart]]] = {}
        self._embeddings: dict[int, EmbeddingPart] = {}
        self._complete: dict[int, AdapterWeights] = {}
        # The last spans that were asked for, as bytes, and their batch.
        self._last: tuple[bytes, AdapterBatch] | None = None

    def add_part(self, order: AdapterPartOrder) -> None:
        """Keep this rank's part of some matrices."""
        device = self._model.device
        a, b = order.a.to(device), order.b.to(device)
        if order.site is None:
            self._embeddings[order.adapter] = EmbeddingPart(a, b, order.scale)
            return
        parts = (LoraPart(order.first, a, b, order.scale),)
        own = adapter_parts(order.site, parts, self._whole, self._shard)
        if own:
            self._sites.setdefault(order.adapter, {}).setdefault(order.site, []).extend(own)

    def complete(self, number: int) -> None:
        """Make the adapter whose parts are all there."""
        embedding = self._embeddings.pop(number, None)
        self._complete[number] = self._model.adapter_weights(self._sites.pop(number, {}), embedding)

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop adapters, complete or not."""
        self._last = None
        for number in numbers:
            for kept in (self._sites, self._embeddings, self._complete):
                kept.pop(number, None)

    def batch(self, spans: Spans) -> AdapterBatch | None:
        """Return the adapters of a call's rows; None: no row has one."""
        if spans is None:
            return None
        key = spans.tobytes()
        # Decode steps of the same sequences follow one another.
        if self._last is None or self._last[0] != key:
            weights = [None if number == _NONE else self._complete[number] for number in spans[:, 0].tolist()]
            self._last = key, self._model.adapter_batch(weights, spans[:, 1].tolist())
        return self._last[1]
