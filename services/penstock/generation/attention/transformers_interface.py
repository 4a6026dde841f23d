"""The attention function that transformers' own modules call, over the paged pool.

It is registered with transformers under `NAME`, without a mask function: transformers then makes no masks. Modules that
attended by themselves (models/own_attention.py) know it as `OWN_NAME`, with masks of no size, since some change their
mask. Rows of a step come as one sequence (1, heads, T, width). A context variable has the data of the step, since not
every model passes arguments down to its attention. The order in a forward pass identifies a call: layer numbers are not
unique in every model, and some models go through a layer twice.

Plain calls go to the device's own attention: different widths are padded with zeros, which change no product, and fewer
key/value heads are repeated up to those of the pool. Calls with chunks, or with numbers of heads that do not divide
each other, are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.attention.base import AttentionLayer
from penstock.generation.attention.chosen_rows import over_slots, split_sparse

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool

# Names of the function in transformers' registry.
NAME, OWN_NAME = "penstock", "penstock_own"
# Scores (heads, rows, keys) to compute at once; each takes some 12 bytes for a moment.
_MOST_SCORES = 1 << 24
# A group of decoding sequences pads none to more than twice its context, except below this number of keys.
_SMALL_CONTEXT = 128


class UnsupportedAttention(ValueError):
    """Error for a call of the attention function that Penstock cannot compute. Its text names the unsupported part."""


class SeesLaterRows(UnsupportedAttention):
    """Error for rows that see later positions, as those of an encoder do."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnCall:
    """Facts of a call by a module that attended by itself. It is causal, whatever mask the module was given."""

    # See AttentionCall.
    window: int | None = None
    slopes: Tensor | None = None
    biases: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Facts of one call in a forward pass. The i-th call has layer i of the pool."""

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    # Number of positions that a row sees, itself included; None: all.
    window: int | None = None
    # Positions per chunk; a row sees its own chunk only. None: there are no chunks.
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    # (H) float32: scores of a key get slope * its position, from the row's own on (ALiBi). None: they do not.
    slopes: Tensor | None = field(default=None, compare=False)
    # (H, positions) float32: what scores of the key at a position get. None: nothing.
    biases: Tensor | None = field(default=None, compare=False)

    def is_plain(self, num_kv_heads: int) -> bool:
        """True when `Attention.forward` can compute it over a pool of `num_kv_heads`."""
        divides = num_kv_heads % self.num_kv_heads == 0 and self.num_heads % num_kv_heads == 0
        return self.chunk is None and self.biases is None and divides


class BoundLayers:
    """Facts of a model's plain calls as its device's attention reads them, made when a module first calls.

    A call with other arguments than the last one's, or over another pool, makes its facts anew.
    """

    def __init__(self) -> None:
        # Number of the call -> what it depended on, the sinks as the module gave them, and the facts.
        self._known: dict[int, tuple[tuple[object, ...], Tensor | None, AttentionLayer]] = {}

    def layer(
        self,
        index: int,
        call: AttentionCall,
        kv: KVCachePool,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> AttentionLayer:
        """Return the facts of call `index`."""
        asked = (kv.num_kv_heads, kv.head_dim, scale, softcap)
        known = self._known.get(index)
        if known is not None and known[0] == asked and known[1] is sinks_H:
            return known[2]
        layer = AttentionLayer(
            call.num_heads,
            kv.num_kv_heads,
            kv.head_dim,
            scale,
            index,
            call.window,
            softcap=softcap or 0.0,
            sinks=None if sinks_H is None else sinks_H.float(),
            slopes=call.slopes,
        )
        self._known[index] = asked, sinks_H, layer
        return layer


class PagedStep:
    """One forward pass over the rows of a step. Used once."""

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        metadata: AttentionMetadata,
        kv: KVCachePool,
        attention: Attention,
        positions_T: Tensor | None = None,
        layers: BoundLayers | None = None,
    ) -> None:
        """`attention` computes the plain calls; `positions_T` are those of the rows, for `positions_of_step`. `layers`
        are the model's, for all of its steps; None: the step has its own."""
        self.positions_T = positions_T
        self.metadata = metadata
        self.kv = kv
        self._layers = layers or BoundLayers()
        self._calls = calls
        self._attention = attention
        # Positions that an indexer chose last, and the metadata of the rows over them.
        self._chosen: tuple[Tensor, AttentionMetadata] | None = None
        self.num_calls = 0

    @property
    def has_indexers(self) -> bool:
        """True where rows read positions that an indexer chose: masks of the model are not looked at."""
        return self.kv.index is not None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None,
        chosen_1TK: Tensor | None = None,
    ) -> Tensor:
        """Write key and value (B, kv_heads, T / B, width) and attend with query (B, heads, T / B, key width); return
        (B, T / B, heads, value width). The rows of a step are in order, B sequences with as many each. `chosen_1TK`:
        positions that each row reads if its context is longer than K; None: all."""
        layer = self.num_calls
        if layer >= len(self._calls) or key.shape[0] * key.shape[2] != self.metadata.num_rows:
            raise UnsupportedAttention("it attends more often than in the first pass, or to other rows")
        self.num_calls += 1
        call, kv = self._calls[layer], self.kv
        metadata = self.metadata.view(kv.view_of(layer))
        q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        if call.is_plain(kv.num_kv_heads):
            if call.num_kv_heads < kv.num_kv_heads:
                repeats = kv.num_kv_heads // call.num_kv_heads
                k_TKD, v_TKD = (x.repeat_interleave(repeats, 1) for x in (k_TKD, v_TKD))
            q_THD, k_TKD, v_TKD = (_padded(x, x.shape[1], kv.head_dim) for x in (q_THD, k_TKD, v_TKD))
            facts = self._layers.layer(layer, call, kv, scale, softcap, sinks_H)
            if chosen_1TK is None:
                out_THD = self._attention.forward(q_THD, k_TKD, v_TKD, facts, metadata, kv)
            else:
                out_THD = self._attend_chosen(q_THD, k_TKD, v_TKD, facts, chosen_1TK)
            out_THD = out_THD[..., : call.value_width]
        elif chosen_1TK is not None:
            raise UnsupportedAttention("its attention takes indices for odd numbers of heads")
        else:
            k_TKD, v_TKD = (_padded(x, kv.num_kv_heads, kv.head_dim) for x in (k_TKD, v_TKD))
            kv.write(layer, metadata.slot_mapping, k_TKD, v_TKD)
            out_THD = _attend(q_THD, layer, call, metadata, kv, scale, softcap, sinks_H)
        return out_THD.view(query.shape[0], -1, *out_THD.shape[1:])

    def _attend_chosen(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer, chosen_1TK: Tensor
    ) -> Tensor:
        """Attend to chosen positions, where there is a choice."""
        metadata, kv, attention = self.metadata, self.kv, self._attention
        split = split_sparse(metadata, chosen_1TK.shape[-1], kv.block_size)
        plan = None if split is None else split.singles
        if split is None or plan is None:
            return attention.forward(q_THD, k_TKD, v_TKD, layer, metadata, kv)
        if self._chosen is None or self._chosen[0] is not chosen_1TK:
            rows_TK = chosen_1TK[0] if plan.rows is None else chosen_1TK[0, plan.rows]
            self._chosen = chosen_1TK, plan.over(plan.slots_of(rows_TK, kv.block_size))
        any_block = over_slots(attention)
        if plan.rows is None:
            return any_block.forward(q_THD, k_TKD, v_TKD, layer, self._chosen[1], kv.by_slot)
        # Before any row attends: a sequence may read what another one writes in this step.
        kv.write(layer.index, metadata.slot_mapping, k_TKD, v_TKD)
        out_THD = torch.empty_like(q_THD)
        q, k, v = (x[plan.rows] for x in (q_THD, k_TKD, v_TKD))
        out_THD[plan.rows] = any_block.forward(q, k, v, layer, self._chosen[1], kv.by_slot)
        if split.dense is not None:
            part, dense = split.dense
            q, k, v = (x[dense] for x in (q_THD, k_TKD, v_TKD))
            out_THD[dense] = attention.forward(q, k, v, layer, part, kv)
        return out_THD


_STEP: ContextVar[PagedStep | None] = ContextVar("penstock_paged_step", default=None)


@contextmanager
def paged(step: PagedStep) -> Iterator[None]:
    """Let the registered function compute `step` inside the block, on this thread."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def step_of_thread() -> PagedStep | None:
    """Return this thread's current step; None outside a step."""
    return _STEP.get()


def positions_of_step() -> Tensor | None:
    """Return the positions of the rows of this thread's current step; None outside a step."""
    step = _STEP.get()
    return None if step is None else step.positions_T


def register() -> None:
    """Register the function with transformers, which must be installed. Calling it again is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (NAME, OWN_NAME):
        ALL_ATTENTION_FUNCTIONS.register(name, _attend_in_step)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OWN_NAME, _no_mask)


def _no_mask(device: torch.device | None = None, **_: Any) -> Tensor:
    """Return a mask of no size in place of one that nobody reads."""
    return torch.empty(0, device=device)


def check_arguments(mask: object, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedAttention for a mask that the model made by itself, and for arguments that change scores."""
    if mask is not None:
        raise UnsupportedAttention("it makes attention masks by itself")
    check_biases(arguments)


def check_biases(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedAttention for arguments that change scores in a way that is not known here."""
    for name in ("position_bias", "indices", "block_indices", "head_mask"):
        if arguments.get(name) is not None:
            raise UnsupportedAttention(f"its attention takes {name}")


def _attend_in_step(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: see its AttentionInterface."""
    step = _STEP.get()
    if step is None:
        raise RuntimeError("a model of the fallback runs through TransformersModel.forward only")
    chosen = arguments.pop("indices", None) if step.has_indexers else None
    check_arguments(None if step.has_indexers else attention_mask, arguments)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return step.attend(query, key, value, scale, softcap, s_aux, chosen), None


def _padded(x_THD: Tensor, num_heads: int, width: int) -> Tensor:
    """Return x with zeros for further heads and a greater width, contiguous."""
    heads, own = num_heads - x_THD.shape[1], width - x_THD.shape[2]
    return F.pad(x_THD, (0, own, 0, heads)) if heads or own else x_THD.contiguous()


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows attended at once: N sequences with `num_rows` each, over C keys."""

    num_seqs: int
    num_rows: int
    # (N * num_rows), or a slice where they are adjacent.
    rows: Tensor | slice
    # (N * C): slots of the pool.
    slots: Tensor
    # (N, C): positions of the keys, below 0 where there is none.
    positions: Tensor
    # (N, 1, 1, num_rows, C): True where a row does not see the key.
    unseen: Tensor


def _attend(
    q_THD: Tensor,
    layer: int,
    call: AttentionCall,
    metadata: AttentionMetadata,
    kv: KVCachePool,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attend over the keys in the pool, group by group. Scores and softmax are float32."""
    heads, kv_heads = call.num_heads, call.num_kv_heads
    out_THD = q_THD.new_empty(q_THD.shape[0], heads, call.value_width)
    for group in _plan(metadata, call, kv.block_size):
        k, v = (
            x.view(group.num_seqs, -1, kv.num_kv_heads, kv.head_dim)[:, :, :kv_heads].transpose(1, 2)
            for x in kv.read(layer, group.slots, q_THD.dtype)
        )
        k, v = k[..., : call.key_width], v[..., : call.value_width]
        # The query heads of one key/value head become rows: keys are read once.
        split = (group.num_seqs, group.num_rows, kv_heads, heads // kv_heads, -1)
        q = q_THD[group.rows].reshape(split).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (q @ k.transpose(-1, -2)).float().mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        biases = _biases(call, group)
        # (N, K, heads of a key/value head, num_rows, C).
        split = (group.num_seqs, kv_heads, heads // kv_heads, group.num_rows, -1)
        scores = scores.view(split)
        if biases is not None:
            scores += biases.reshape(biases.shape[0], kv_heads, heads // kv_heads, *biases.shape[2:])
        scores = scores.masked_fill_(group.unseen, -torch.inf)
        if sinks_H is None:
            weights = scores.softmax(-1)
        else:
            sinks = sinks_H.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        out = (weights.flatten(2, 3).to(v.dtype) @ v).view(split)
        out_THD[group.rows] = out.permute(0, 3, 1, 2, 4).reshape(-1, heads, call.value_width)
    return out_THD


def _biases(call: AttentionCall, group: _RowGroup) -> Tensor | None:
    """Return what is added to scores by the keys' positions, (N, heads, 1 or num_rows, C) in float32; None: nothing."""
    positions_NC = group.positions
    if call.biases is not None:
        return call.biases[:, positions_NC.clamp(min=0)].transpose(0, 1).unsqueeze(2)
    if call.slopes is not None:
        behind_NQC = positions_NC[:, None] - positions_NC[:, -group.num_rows :, None]
        return call.slopes.view(-1, 1, 1) * behind_NQC.unsqueeze(1)
    return None


def _plan(metadata: AttentionMetadata, call: AttentionCall, block_size: int) -> list[_RowGroup]:
    """Return the groups of a step, made once for all layers of the same sight."""
    key = ("transformers", call.window, call.chunk, call.num_heads)
    plan = metadata.plans.get(key)
    if plan is None:
        plan = metadata.plans[key] = list(_groups(metadata, call, block_size))
    return cast("list[_RowGroup]", plan)


def _groups(metadata: AttentionMetadata, call: AttentionCall, block_size: int) -> Iterator[_RowGroup]:
    """Yield decoding sequences in groups of similar contexts, and longer queries piece by piece."""
    # (keys, sequence) of sequences of one row.
    single: list[tuple[int, int]] = []
    first = 0
    starts = []
    for index, (count, length) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        starts.append(first)
        if count == 1:
            single.append((length - _first_seen(length - 1, call), index))
        else:
            begin = 0
            while begin < count:
                # Fewer keys are seen by earlier rows.
                longest = length - count + min(count, begin + max(1, _MOST_SCORES // (call.num_heads * length)))
                end = longest - length + count
                yield _group(metadata, [index], [first + begin], end - begin, longest, call, block_size)
                begin = end
        first += count
    single.sort(reverse=True)
    begin = 0
    while begin < len(single):
        longest = single[begin][0]
        most = max(1, _MOST_SCORES // (call.num_heads * longest))
        end = begin + 1
        while end < len(single) and end - begin < most and (longest <= _SMALL_CONTEXT or single[end][0] * 2 >= longest):
            end += 1
        members = sorted(index for _, index in single[begin:end])
        yield _group(metadata, members, [starts[index] for index in members], 1, None, call, block_size)
        begin = end


def _first_seen(position: int, call: AttentionCall) -> int:
    """Return the first position that a row at `position` sees."""
    first = 0
    if call.window is not None:
        first = max(first, position - call.window + 1)
    if call.chunk is not None:
        first = max(first, position // call.chunk * call.chunk)
    return first


def _group(
    metadata: AttentionMetadata,
    members: list[int],
    first_rows: list[int],
    num_rows: int,
    length: int | None,
    call: AttentionCall,
    block_size: int,
) -> _RowGroup:
    """Return the group of `num_rows` rows from `first_rows` on of each of `members`; `length`: the only member's
    context at the last of these rows, None: contexts are whole."""
    device = metadata.slot_mapping.device
    lengths = [metadata.kv_lens[index] for index in members] if length is None else [length]
    span = max(own - _first_seen(own - num_rows, call) for own in lengths)
    length_N1 = torch.tensor(lengths, device=device).unsqueeze(1)
    # Aligned at the newest key. Positions that none of a sequence's rows sees repeat it, and are masked: their blocks
    # may be others' by now.
    position_NC = length_N1 - span + torch.arange(span, device=device)
    query_NQ = length_N1 - num_rows + torch.arange(num_rows, device=device)
    key_N1C, row_NQ1 = position_NC.unsqueeze(1), query_NQ.unsqueeze(2)
    visible = (key_N1C <= row_NQ1) & (key_N1C >= 0)
    if call.window is not None:
        visible &= key_N1C > row_NQ1 - call.window
    if call.chunk is not None:
        visible &= key_N1C >= row_NQ1 // call.chunk * call.chunk
    first_N1 = torch.tensor([_first_seen(own - num_rows, call) for own in lengths], device=device).unsqueeze(1)
    source_NC = torch.where(position_NC >= first_N1, position_NC, length_N1 - 1)
    tables = metadata.block_tables[torch.tensor(members, device=device)].long()
    slots = (tables.gather(1, source_NC // block_size) * block_size + source_NC % block_size).flatten()
    rows: Tensor | slice
    if num_rows * len(members) == first_rows[-1] + num_rows - first_rows[0] and first_rows == sorted(first_rows):
        rows = slice(first_rows[0], first_rows[-1] + num_rows)
    else:
        rows = (torch.tensor(first_rows, device=device).unsqueeze(1) + torch.arange(num_rows, device=device)).flatten()
    return _RowGroup(len(members), num_rows, rows, slots, position_NC, ~visible[:, None, None])
