"""Indexers of transformers' modules over the paged pool. The choice of positions is their own code.

Such a module asks its cache for the index keys of a whole context, and returns positions. In a step it is called once
for all rows, up to the moment in which it gives its keys. Then it is called for each batch of sequences that have
something to choose, equal numbers of rows and similar contexts, with a cache that reads the contexts from the pool.
Where a step is one such batch, as decode steps are, both are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from penstock.generation.attention.transformers_interface import PagedStep, step_of_thread
from penstock.generation.core.index_heads import IndexHeads
from penstock.generation.models.own_attention import class_key

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata

# What an attention module calls its indexer, and the classes that choose single positions. Those of others choose
# blocks, or keep more than keys: such models are refused by what their attention takes.
_NAME = "indexer"
_KNOWN = {
    ("axk2", "AXK2Indexer"),
    ("deepseek_v32", "DeepseekV32Indexer"),
    ("glm_moe_dsa", "GlmMoeDsaIndexer"),
    ("hy_v4", "HYV4Indexer"),
}
# Products of heads at once: the modules make those of all rows that they get.
_MOST_PRODUCTS = 1 << 24
# No context of a batch is padded to more than twice its length, except below this number of keys.
_SMALL_CONTEXT = 128


class PagedIndexers:
    """The indexers of a model, in the order of its layers. Outside a step they are as they were."""

    def __init__(self, causal: nn.Module) -> None:
        """Find them, and put our call around each."""
        self._layers, self.modules = list[bool](), list[nn.Module]()
        for layer in (module for module in causal.modules() if hasattr(module, _NAME)):
            own: Any = getattr(layer, _NAME)
            if own is not None and class_key(own) not in _KNOWN:
                continue
            self._layers.append(own is not None)
            if own is not None:
                own.forward = _PagedIndexer(len(self.modules), own)
                self.modules.append(own)

    @property
    def heads(self) -> IndexHeads | None:
        """Widths of what they keep and choose; None: there are none."""
        if not self.modules:
            return None
        first: Any = self.modules[0]
        return IndexHeads(first.n_heads, first.head_dim, first.index_topk, tuple(self._layers))


class _Written(Exception):
    """The index keys of a step are in the pool."""


class _StepKeys:
    """A cache that takes the index keys of all rows of a step, and ends the call."""

    def __init__(self, place: int, step: PagedStep) -> None:
        self._place, self._step = place, step

    def update_indexer(self, key_1TD: Tensor, layer: int) -> Tensor:
        self._step.kv.write_index(self._place, self._step.metadata.slot_mapping, key_1TD.flatten(0, 1))
        raise _Written


class _ContextKeys:
    """A cache that has the index keys of the contexts of some sequences. `writes`: it takes those of the step first.
    All rows of the step are of these sequences then."""

    def __init__(self, place: int, batch: _Batch, step: PagedStep, *, writes: bool) -> None:
        self._place, self._batch, self._step, self._writes = place, batch, step, writes

    def update_indexer(self, key_NQD: Tensor, layer: int) -> Tensor:
        kv = self._step.kv
        if self._writes:
            kv.write_index(self._place, self._step.metadata.slot_mapping, key_NQD.flatten(0, 1))
        return kv.read_index(self._place, self._batch.slots).view(len(key_NQD), -1, key_NQD.shape[2])


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one call: N sequences with Q each, over C keys."""

    # Of the step; None: all rows.
    rows: Tensor | None
    # (N * C) slots of the contexts. Behind a sequence's end its newest one stands.
    slots: Tensor
    # (N, Q, 1) positions of the rows.
    own: Tensor
    # (N, Q, C): True for keys that a row sees.
    mask: Tensor


class _PagedIndexer:
    """The call of one indexer."""

    def __init__(self, place: int, module: Any) -> None:
        self._place = place
        self._module = module
        self._forward: Callable[..., Tensor] = module.forward

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return positions (1, T, index_topk) int32; rows with nothing to choose have any."""
        step = step_of_thread()
        if step is None:
            return self._forward(hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache=cache)
        given = (hidden_states, q_resid, *position_embeddings)
        most: int = self._module.index_topk
        batches = _plan(step.metadata, most, self._module.n_heads, step.kv.block_size)
        with torch.inference_mode():
            if len(batches) == 1 and batches[0].rows is None:
                return self._chosen(given, batches[0], step, writes=True).view(1, hidden_states.shape[1], most)
            with suppress(_Written):
                self._called(given, attention_mask, _StepKeys(self._place, step))
            chosen = torch.zeros((1, hidden_states.shape[1], most), dtype=torch.int32, device=hidden_states.device)
            for batch in batches:
                rows = slice(None) if batch.rows is None else batch.rows
                chosen[0, rows] = self._chosen(given, batch, step, writes=False).flatten(0, 1)
        return chosen

    def _chosen(self, given: tuple[Tensor, ...], batch: _Batch, step: PagedStep, *, writes: bool) -> Tensor:
        """Return positions (N, Q, index_topk) int32, in order."""
        shape = batch.own.shape[:2]
        own = tuple((x[0] if batch.rows is None else x[0, batch.rows]).view(*shape, x.shape[2]) for x in given)
        found = self._called(own, batch.mask, _ContextKeys(self._place, batch, step, writes=writes))
        # A row with fewer positions before it got some behind it: its own stands for them.
        return torch.minimum(found, batch.own).sort(-1).values.to(torch.int32)

    def _called(self, given: tuple[Tensor, ...], mask: Tensor, cache: object) -> Tensor:
        hidden, narrow, cos, sin = given
        return self._forward(hidden, narrow, (cos, sin), mask, None, cache=cache)


def _plan(metadata: AttentionMetadata, most: int, num_heads: int, block_size: int) -> list[_Batch]:
    """Return the batches of a step's sequences with more than `most` positions, made once for all layers."""
    key = ("indexers", most, num_heads)
    known = metadata.plans.get(key)
    if known is None:
        known = metadata.plans[key] = list(_batches(metadata, most, num_heads, block_size))
    return cast("list[_Batch]", known)


def _batches(metadata: AttentionMetadata, most: int, num_heads: int, block_size: int) -> Iterator[_Batch]:
    # (rows of the sequence in the step, context, its first row, its number).
    found, first = [], 0
    for index, (count, length) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if length > most:
            found.append((count, length, first, index))
        first += count
    found.sort(key=lambda one: (one[0], -one[1], one[2]))
    begin = 0
    while begin < len(found):
        count, longest, start, index = found[begin]
        most_rows = max(1, _MOST_PRODUCTS // (longest * num_heads))
        end = begin + 1
        while (
            end < len(found)
            and found[end][0] == count
            and (end - begin + 1) * count <= most_rows
            and (longest <= _SMALL_CONTEXT or found[end][1] * 2 >= longest)
        ):
            end += 1
        if count <= most_rows:
            # In the order of the step: then the rows may be all of them.
            members = sorted(found[begin:end], key=lambda one: one[2])
            yield _batch(metadata, [one[3] for one in members], [one[2] for one in members], count, 0, block_size)
        else:
            for done in range(0, count, most_rows):
                rows = min(most_rows, count - done)
                yield _batch(metadata, [index], [start + done], rows, count - done - rows, block_size)
        begin = end


def _batch(
    metadata: AttentionMetadata, members: list[int], starts: list[int], num_rows: int, later: int, block_size: int
) -> _Batch:
    """Return the batch of `num_rows` rows from `starts` on of each of `members`, which have `later` rows after them."""
    device = metadata.slot_mapping.device
    length_N1 = torch.tensor([metadata.kv_lens[index] for index in members], device=device).unsqueeze(1)
    row_Q = torch.arange(num_rows, device=device)
    position_C = torch.arange(max(metadata.kv_lens[index] for index in members), device=device)
    own_NQ1 = (length_N1 - later - num_rows + row_Q).unsqueeze(2)
    source_NC = torch.minimum(position_C, length_N1 - 1)
    tables_NB = metadata.block_tables[torch.tensor(members, device=device)].long()
    slots_NC = tables_NB.gather(1, source_NC // block_size) * block_size + source_NC % block_size
    rows = None
    if len(members) * num_rows < metadata.num_rows:
        rows = (torch.tensor(starts, device=device).unsqueeze(1) + row_Q).flatten()
    return _Batch(rows, slots_NC.flatten(), own_NQ1, position_C <= own_NQ1)
