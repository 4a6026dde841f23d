"""Indexers of transformers' modules over the paged pool. The choice of positions is their own code.

Such a module asks its cache for the index keys of a whole context, and returns positions. In a step it is called once
for all rows, up to the moment in which it gives its keys, and then once for each sequence that has something to choose,
with a cache that reads the context from the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.generation.attention.transformers_interface import PagedStep, step_of_thread
from penstock.generation.core.index_heads import IndexHeads
from penstock.generation.models.own_attention import class_key

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool

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
        self._step.kv.write_index(self._place, self._step.metadata.slot_mapping, key_1TD[0])
        raise _Written


class _ContextKeys:
    """A cache that has the index keys of one sequence's context."""

    def __init__(self, place: int, slots_C: Tensor, kv: KVCachePool) -> None:
        self._place, self._slots_C, self._kv = place, slots_C, kv

    def update_indexer(self, key_1TD: Tensor, layer: int) -> Tensor:
        return self._kv.read_index(self._place, self._slots_C).unsqueeze(0)


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
        cos, sin = position_embeddings
        with torch.inference_mode():
            try:
                everything = slice(None)
                self._called(hidden_states, q_resid, cos, sin, everything, attention_mask, _StepKeys(self._place, step))
            except _Written:
                pass
            most: int = self._module.index_topk
            chosen = torch.zeros((1, hidden_states.shape[1], most), dtype=torch.int32, device=hidden_states.device)
            for start, end, slots_C in step.sparse_sequences(most):
                length, reader = len(slots_C), _ContextKeys(self._place, slots_C, step.kv)
                position_C = torch.arange(length, device=chosen.device)
                for first in range(start, end, each := max(1, _MOST_PRODUCTS // (length * self._module.n_heads))):
                    rows = slice(first, min(first + each, end))
                    own_T1 = position_C[length - end + first : length - end + rows.stop, None]
                    mask = (position_C <= own_T1)[None]
                    found = self._called(hidden_states, q_resid, cos, sin, rows, mask, reader)
                    # A row with fewer positions before it got some behind it: its own stands for them.
                    chosen[0, rows] = torch.minimum(found[0], own_T1).sort(-1).values.to(torch.int32)
        return chosen

    def _called(
        self, hidden: Tensor, narrow: Tensor, cos: Tensor, sin: Tensor, rows: slice, mask: Tensor, cache: object
    ) -> Tensor:
        turn = (cos[:, rows], sin[:, rows])
        return self._forward(hidden[:, rows], narrow[:, rows], turn, mask, None, cache=cache)
