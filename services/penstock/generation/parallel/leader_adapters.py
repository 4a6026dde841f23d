"""LoRA adapters of a model in several processes, at rank 0: its part of each, and a number for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from penstock.generation.layers.lora import AdapterBatch, AdapterWeights, EmbeddingPart, LoraPart
from penstock.generation.weights.sharding import Shard, adapter_parts

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.models.decoder import CausalLM

# Number in a batch for rows without an adapter.
NONE = -1
# CausalLM.adapter_batch of the part of the model in this process.
_MakeBatch = Callable[[Sequence[AdapterWeights | None], Sequence[int]], AdapterBatch]


class HeldAdapter:
    """An adapter of the other ranks. They forget it when this object is freed."""

    def __init__(self, number: int) -> None:
        """Take its number in all ranks."""
        self.number = number


class LeaderAdapter(AdapterWeights):
    """An adapter at rank 0: its number in the other ranks, and rank 0's part."""

    def __init__(self, held: HeldAdapter, own: AdapterWeights, sites: frozenset[int], num_bytes: int) -> None:
        """Take the sites of the whole adapter, and its bytes in all ranks."""
        self._held = held
        self.number = held.number
        self.own = own
        self.sites = sites
        self.num_bytes = num_bytes
        self.embedding = own.embedding


class LeaderBatch(AdapterBatch):
    """Adapters of a batch for all ranks.

    It changes the sites of the whole adapters: a rank may have no part of a site.
    """

    # Only `own` meets an operator.
    native = None

    def __init__(self, adapters: Sequence[LeaderAdapter | None], counts: Sequence[int], make_own: _MakeBatch) -> None:
        super().__init__(adapters, counts)
        self.own = make_own([None if one is None else one.own for one in adapters], counts)
        numbers = [NONE if one is None else one.number for one in adapters]
        # (spans, 2)
        self.spans: np.ndarray = np.array([numbers, counts], np.int32).T
        self._adapters, self._make_own = adapters, make_own
        self._counts = counts
        self._sites = frozenset().union(*(one.sites for one in adapters if one is not None))

    @override
    def changes_site(self, site: int) -> bool:
        return site in self._sites

    @override
    def select(self, rows: Sequence[int]) -> LeaderBatch:
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
