"""Prompts over compressed keys and values, which are expanded for a prompt's rows, some heads at a time, and thrown
away.

Expanding a latent costs one product for all rows of a step, and each row then attends over short keys and values.
Attention over the latents themselves (layers.latent_attention) has no such product, and takes three times the work a
row: so it is for few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.attention.chosen_rows import context_slots

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionLayer, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.latent_heads import LatentHeads

# Rows of a sequence in a step from which on it is expanded. With DeepSeek's widths the work is equal at 186; general
# products of matrices are faster than the attention kernels in bfloat16, and slower in float32.
LEAST_ROWS = 128
# Expanded keys and values at once.
_MOST_BYTES = 1 << 26
# Numbers of a mask at once: one of a large step over a long context would take gigabytes.
_MOST_MASK = 1 << 24


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows [first, last) of a step, the newest ones of one sequence."""

    first: int
    last: int
    # (C) slots of its context; None: its context is these rows.
    slots_C: Tensor | None
    # (rows, C) additive; None: plain causal, or too large to be kept.
    mask: Tensor | None
    # (rows, K) positions that each row reads; None: all up to its own.
    chosen: Tensor | None = None

    def mask_of(self, first: int, last: int, seen: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (last - first, seen) of some of the rows: the last one is at position seen - 1."""
        if self.chosen is not None:
            return chosen_mask(self.chosen[first:last], seen, dtype)
        assert self.slots_C is not None
        return _mask(last - first, seen, dtype, self.slots_C.device)


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """A step's long queries, and the metadata and rows of all others; None: there are none."""

    prompts: tuple[PromptRows, ...]
    others: tuple[AttentionMetadata, Tensor] | None


def has_prompts(metadata: AttentionMetadata) -> bool:
    """True where a sequence is long enough to be expanded. It looks at no tensor."""
    return max(metadata.query_lens) >= LEAST_ROWS


def split_prompts(metadata: AttentionMetadata, kv: KVCachePool, dtype: torch.dtype) -> PromptSplit | None:
    """Return the split of a step, made once for all layers; None: no sequence is long enough."""
    # The usual step.
    if not has_prompts(metadata):
        return None
    known = metadata.plans.get("latent prompts")
    if known is None:
        known = metadata.plans["latent prompts"] = _split(metadata, kv, dtype)
    return cast("PromptSplit", known)


def _split(metadata: AttentionMetadata, kv: KVCachePool, dtype: torch.dtype) -> PromptSplit:
    prompts, others, first = [], [], 0
    for index, count in enumerate(metadata.query_lens):
        if count >= LEAST_ROWS:
            prompts.append(_prompt(metadata, kv, index, first, dtype))
        else:
            others.append(index)
        first += count
    return PromptSplit(tuple(prompts), metadata.select(others) if others else None)


def _prompt(metadata: AttentionMetadata, kv: KVCachePool, index: int, first: int, dtype: torch.dtype) -> PromptRows:
    count, length = metadata.query_lens[index], metadata.kv_lens[index]
    # What an int8 pool keeps is not what was written.
    if length == count and kv.dtype is dtype:
        return PromptRows(first, first + count, None, None)
    slots_C = context_slots(metadata, index, kv.block_size)
    mask = _mask(count, length, dtype, slots_C.device) if count * length <= _MOST_MASK else None
    return PromptRows(first, first + count, slots_C, mask)


def chosen_prompt(first: int, slots_C: Tensor, position_TK: Tensor, dtype: torch.dtype) -> PromptRows:
    """Return rows of a step from `first` on that read some positions of their context each."""
    count, length = len(position_TK), len(slots_C)
    mask = chosen_mask(position_TK, length, dtype) if count * length <= _MOST_MASK else None
    return PromptRows(first, first + count, slots_C, mask, position_TK)


def chosen_mask(position_TK: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask (T, length) of rows that read these positions."""
    mask = torch.full((len(position_TK), length), -torch.inf, dtype=dtype, device=position_TK.device)
    return mask.scatter_(1, position_TK, 0.0)


def _mask(count: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask (count, length) of a context's last `count` rows."""
    positions_C = torch.arange(length, device=device)
    unseen = positions_C > positions_C[length - count :, None]
    return torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)


class LatentPrompts:
    """Attention of one layer's prompts."""

    def __init__(self, layer: AttentionLayer, sizes: LatentHeads, both_HXR: Tensor) -> None:
        """Take what expands a latent: (heads, plain dims + value dims, rank)."""
        self._layer = layer
        self._sizes = sizes
        self._both_HXR = both_HXR
        # torch's fast attention has keys and values of one width.
        self._width = max(sizes.query_dim, sizes.value_dim)

    def attend(self, q_THX: Tensor, row_T1E: Tensor, prompt: PromptRows, kv: KVCachePool) -> Tensor:
        """Return o (rows, H, value dims) of a prompt. `q_THX` and `row_T1E` are of the whole step, turned, and the
        rows are in the pool."""
        sizes, width = self._sizes, self._width
        if prompt.slots_C is None:
            row_CE = row_T1E[prompt.first : prompt.last, 0]
        else:
            row_CE = kv.read(self._layer.index, prompt.slots_C, q_THX.dtype)[0][:, 0]
        latent_CR, turned_CX = row_CE[:, : sizes.rank], row_CE[:, sizes.rank :]
        q_HTX = _widened(q_THX[prompt.first : prompt.last].transpose(0, 1), width)
        heads = len(self._both_HXR)
        each = max(1, _MOST_BYTES // (2 * width * len(row_CE) * row_CE.element_size()))
        parts = []
        for first in range(0, heads, each):
            both_HXR = self._both_HXR[first : first + each]
            both_CHX = F.linear(latent_CR, both_HXR.flatten(0, 1)).view(len(row_CE), len(both_HXR), -1)
            plain_CHX, value_CHX = both_CHX[..., : sizes.plain_dim], both_CHX[..., sizes.plain_dim :]
            turned_CHX = turned_CX[:, None].expand(-1, len(both_HXR), -1)
            keys = _widened(torch.cat((plain_CHX, turned_CHX), dim=-1).transpose(0, 1), width)
            values = _widened(value_CHX.transpose(0, 1), width)
            parts.append(self._over_expanded(q_HTX[first : first + each], keys, values, prompt))
        return torch.cat(parts).transpose(0, 1)

    def _over_expanded(self, q_HTX: Tensor, k_HCX: Tensor, v_HCX: Tensor, prompt: PromptRows) -> Tensor:
        """Return o (H, rows, value dims) by attention over expanded keys and values."""
        if prompt.slots_C is None or prompt.mask is not None:
            return self._attended(q_HTX, k_HCX, v_HCX, prompt.mask)
        rows, length = q_HTX.shape[1], k_HCX.shape[1]
        parts = []
        for first in range(0, rows, each := max(1, _MOST_MASK // length)):
            last = min(first + each, rows)
            # Nothing behind a row is read.
            seen = length - rows + last
            mask = prompt.mask_of(first, last, seen, q_HTX.dtype)
            parts.append(self._attended(q_HTX[:, first:last], k_HCX[:, :seen], v_HCX[:, :seen], mask))
        return torch.cat(parts, dim=1)

    def _attended(self, q_HTX: Tensor, k_HCX: Tensor, v_HCX: Tensor, mask: Tensor | None) -> Tensor:
        """Return o (H, rows, value dims); without a mask it is causal."""
        out = F.scaled_dot_product_attention(
            q_HTX[None], k_HCX[None], v_HCX[None], attn_mask=mask, is_causal=mask is None, scale=self._layer.scale
        )
        return out[0, ..., : self._sizes.value_dim]


def _widened(x: Tensor, width: int) -> Tensor:
    """Return x with zeros up to a width: they change no product."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
