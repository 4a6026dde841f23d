"""A model with decode steps as captured graphs of its device: one call queues a step from ids to ids.

There are graphs for a few numbers of rows. A step uses the next larger one; padding rows write into a block of the pool
that no sequence has. Only the drawn ids are read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.to_device import uploaded
from penstock.generation.layers.decoder_layer import SelfAttention, SwiGLU
from penstock.generation.models.decoder import CausalLM

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.devices.graph_capture import CapturedGraph, GraphCapture
    from penstock.generation.layers.lora import AdapterBatch
    from penstock.generation.models.hidden_keeper import LayerTaps, StateKeeper
    from penstock.generation.models.language_model import LanguageModel

# Rows of `_Bucket.rows_4B`.
_IDS, _POSITIONS, _SLOTS, _LENGTHS = range(4)
# Keys of a row that no sequence has.
_PADDED_LENGTH = 1


@dataclass(slots=True)
class _Bucket:
    """Inputs and graph of decode steps of up to B rows. The inputs stay where they are."""

    # int64.
    rows_4B: Tensor
    # (B, most blocks of a sequence) int32.
    tables_BW: Tensor
    # Values of a padding row.
    padding_4B: Tensor
    graph: CapturedGraph | None = None
    # Rows that are not padding.
    num_filled: int = 0


class CapturedLM(CausalLM):
    """A CausalLM on the same weights, for one pool. Only plain decode steps of that pool use graphs; other steps run as
    in the original model.

    The result of `forward` is valid until the next call; the first `compute_logits` of all of it costs nothing.
    """

    def __init__(self, model: CausalLM, kv: KVCachePool, graphs: GraphCapture, most_rows: int) -> None:
        """Take a model that `can_capture` accepted. Steps of more than `most_rows` sequences are not captured."""
        assert kv.scrap_block is not None
        vars(self).update(vars(model))
        self._kv = kv
        self._scrap = kv.scrap_block
        self._graphs = graphs
        # Rows that are padding write into one block.
        self._sizes = bucket_sizes(min(most_rows, kv.block_size) if graphs.needs_slots else most_rows)
        self._buckets: dict[int, _Bucket] = {}
        # Hidden states of the last replay, and the logits of these rows while nothing has changed them.
        self._results: tuple[Tensor, Tensor] | None = None
        # The table that `decode` put into a bucket, and the bucket.
        self._in_place: tuple[Tensor, _Bucket] | None = None

    @property
    @override
    def can_draw(self) -> bool:
        return True

    def capture_all(self) -> None:
        """Capture the graph of every number of rows, the largest first: the others then reuse its memory."""
        for size in reversed(self._sizes):
            self._captured(self._bucket(size))

    @torch.inference_mode()
    @override
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
        self._results = None
        is_plain = embeds_TI is None and keeper is None and attention is None and adapters is None
        if not is_plain or not self._takes(metadata, kv):
            return super().forward(
                input_ids_T,
                positions_T,
                metadata,
                kv,
                rows_R,
                embeds_TI=embeds_TI,
                keeper=keeper,
                attention=attention,
                adapters=adapters,
            )
        hidden, logits, _ = self._decoded(input_ids_T, positions_T, metadata)
        if rows_R is not None:
            return hidden[rows_R]
        self._results = hidden, logits
        return hidden

    @torch.inference_mode()
    @override
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
    ) -> tuple[Tensor, Tensor]:
        """The logits of the rows are in memory."""
        self._results = None
        is_plain = rows_R is None and embeds_TI is None and adapters is None and taps is None
        if is_plain and self._takes(metadata, kv):
            hidden, _, ids = self._decoded(input_ids_T, positions_T, metadata)
            return hidden, ids
        hidden = super().forward(
            input_ids_T, positions_T, metadata, kv, rows_R, embeds_TI=embeds_TI, keeper=taps, adapters=adapters
        )
        if rows_R is not None and adapters is not None and adapters.changes_site(self.head_site):
            adapters = adapters.select(rows_R.tolist())
        return hidden, _best(super().compute_logits(hidden, adapters))

    @torch.inference_mode()
    @override
    def decode(
        self,
        ids: list[int],
        lengths: list[int],
        longest: int,
        tables_SB: Tensor,
        kv: KVCachePool,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> list[int]:
        self._results = None
        count, size = len(ids), kv.block_size
        positions = np.array(lengths, dtype=np.int64) - 1
        blocks, offsets = np.divmod(positions, size)
        tables = tables_SB.numpy()
        slots = tables[np.arange(count), blocks].astype(np.int64) * size + offsets
        rows_4N = uploaded(np.array((ids, positions, slots, lengths), dtype=np.int64), self.device)
        width = -(-longest // size)
        if adapters is not None or taps is not None or kv is not self._kv or count > self._sizes[-1]:
            metadata = AttentionMetadata(
                query_start=torch.arange(count + 1, dtype=torch.int32, device=self.device),
                context_lens=rows_4N[_LENGTHS].to(torch.int32),
                block_tables=uploaded(np.ascontiguousarray(tables[:, :width]), self.device),
                slot_mapping=rows_4N[_SLOTS],
                query_lens=[1] * count,
                kv_lens=list(lengths),
                max_context_len=longest,
            )
            _, drawn = self.forward_and_draw(
                rows_4N[_IDS], rows_4N[_POSITIONS], metadata, kv, adapters=adapters, taps=taps
            )
            return _read(drawn)
        bucket = self._bucket(count)
        bucket.rows_4B[:, :count] = rows_4N
        if self._in_place is None or self._in_place[0] is not tables_SB or not offsets.all():
            # Some row has a new block: a sequence gets one every `block_size` steps at most.
            bucket.tables_BW[:count, :width] = uploaded(np.ascontiguousarray(tables[:, :width]), self.device)
            self._in_place = tables_SB, bucket
        _, _, drawn = self._replayed(bucket, lengths)
        return _read(drawn)

    @torch.inference_mode()
    @override
    def compute_logits(self, hidden_NI: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """May return memory that the next call overwrites."""
        results, self._results = self._results, None
        if results is not None and results[0] is hidden_NI and adapters is None:
            return results[1]
        return super().compute_logits(hidden_NI, adapters)

    def _takes(self, metadata: AttentionMetadata, kv: KVCachePool) -> bool:
        """True for a decode step with a graph."""
        return kv is self._kv and metadata.num_rows == metadata.num_seqs <= self._sizes[-1]

    def _decoded(
        self, input_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, logits and greedy ids of a decode step."""
        count = metadata.num_rows
        bucket = self._bucket(count)
        for row, values in (
            (_IDS, input_ids_T),
            (_POSITIONS, positions_T),
            (_SLOTS, metadata.slot_mapping),
            (_LENGTHS, metadata.context_lens),
        ):
            bucket.rows_4B[row, :count] = values
        tables = metadata.block_tables
        bucket.tables_BW[:count, : tables.shape[1]] = tables
        self._in_place = None
        return self._replayed(bucket, metadata.kv_lens)

    def _replayed(self, bucket: _Bucket, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Run the step of a bucket; its first rows are filled, with contexts of these lengths."""
        count = len(lengths)
        if count < bucket.num_filled:
            self._pad(bucket, count, bucket.num_filled)
        bucket.num_filled = count
        graph = self._captured(bucket)
        if self._graphs.needs_lengths:
            graph.replay([*lengths, *[_PADDED_LENGTH] * (len(bucket.tables_BW) - count)])
        else:
            graph.replay(None)
        hidden, logits, ids = graph.outputs
        return hidden[:count], logits[:count], ids[:count]

    def _bucket(self, count: int) -> _Bucket:
        """Return the bucket for `count` rows; a new one is all padding."""
        size = next(size for size in self._sizes if size >= count)
        bucket = self._buckets.get(size)
        if bucket is None:
            block = self._scrap
            rows = np.zeros((4, size), dtype=np.int64)
            # Each row has a place of its own, as far as the block has enough, and attends to the first.
            rows[_SLOTS] = block * self._kv.block_size + np.arange(size) % self._kv.block_size
            rows[_LENGTHS] = _PADDED_LENGTH
            padding = uploaded(rows, self.device)
            width = -(-min(self.config.max_position_embeddings, self._kv.num_slots) // self._kv.block_size)
            tables = torch.full((size, width), block, dtype=torch.int32, device=self.device)
            bucket = self._buckets[size] = _Bucket(padding.clone(), tables, padding)
        return bucket

    def _pad(self, bucket: _Bucket, first: int, last: int) -> None:
        bucket.rows_4B[:, first:last] = bucket.padding_4B[:, first:last]
        bucket.tables_BW[first:last] = self._scrap

    @torch.inference_mode()
    def _captured(self, bucket: _Bucket) -> CapturedGraph:
        if bucket.graph is None:
            bucket.graph = self._graphs.capture(self._step_of(bucket))
        return bucket.graph

    def _step_of(self, bucket: _Bucket) -> Callable[[], tuple[Tensor, ...]]:
        """Return the call to capture for a bucket: it gives hidden states, logits and greedy ids of all its rows."""
        size, width = bucket.tables_BW.shape
        query_start = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        ids, positions, slots, lengths = bucket.rows_4B.unbind()

        def step() -> tuple[Tensor, ...]:
            metadata = AttentionMetadata(
                query_start=query_start,
                context_lens=lengths.to(torch.int32),
                block_tables=bucket.tables_BW,
                slot_mapping=slots,
                query_lens=[1] * size,
                # Of other steps than this one: nothing may know them, unless a replay is given its own.
                kv_lens=[_PADDED_LENGTH] * size if self._graphs.needs_lengths else [],
                max_context_len=width * self._kv.block_size,
            )
            hidden = CausalLM.forward(self, ids, positions, metadata, self._kv)
            logits = CausalLM.compute_logits(self, hidden)
            return hidden, logits, _best(logits)

        return step


def can_capture(model: LanguageModel, kv: KVCachePool) -> TypeGuard[CausalLM]:
    """True when decode steps of the model over this pool queue the same work for all lengths, and never wait for the
    device."""
    if not isinstance(model, CausalLM) or model.can_draw or kv.states is not None or kv.scrap_block is None:
        return False
    if kv.layout is not None or not kv.has_values:
        return False
    # Experts wait for the number of their rows.
    return all(
        type(layer.mlp) is SwiGLU
        and isinstance(layer.attention, SelfAttention)
        and model.attention.can_be_captured(layer.attention.layer, model.dtype, kv)
        for layer in model.layers
    )


def _best(logits_NV: Tensor) -> Tensor:
    """Return the id of each row's highest logit, the first of equals; -1 where it is not finite."""
    ids_N = logits_NV.argmax(-1)
    highest_N = logits_NV.gather(1, ids_N[:, None])[:, 0]
    return torch.where(highest_N.isfinite(), ids_N, -1)


def _read(ids_N: Tensor) -> list[int]:
    """Return the ids on the host: the one wait of a step."""
    ids: list[int] = ids_N.tolist()
    return ids


def bucket_sizes(most_rows: int) -> list[int]:
    """Return the numbers of rows to make graphs for: powers of two, and the largest."""
    sizes = [1 << power for power in range(most_rows.bit_length()) if 1 << power < most_rows]
    return [*sizes, most_rows]
