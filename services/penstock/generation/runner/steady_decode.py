"""Decode step of the same sequences as the last step, each one token further, with greedy draws.

Nearly all steps of plain requests are of that kind. A gigabyte of weights has gone through the caches since the last
step, so every line of Python and every operator begins with cache misses. Therefore no object is made anew, and one
call computes the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.core.step import CopyKind, RunnerOutput, SampledToken

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.cache_layout import CacheLayout
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import Bundles, ScheduledSequence, SchedulerOutput
    from penstock.generation.layers.lora import AdapterBatch
    from penstock.generation.models.language_model import LanguageModel
    from penstock.generation.runner.feature_tap import TappedStep

# Blocks by which the sequences may grow before the tables are made anew.
_SPARE_BLOCKS = 16


class SteadyDecode:
    """State that lasts until a step is not of this kind. For models that `can_draw`."""

    def __init__(
        self,
        scheduled: Seq[ScheduledSequence],
        metadata: AttentionMetadata,
        tables: np.ndarray,
        block_size: int,
        adapters: AdapterBatch | None = None,
        layout: CacheLayout | None = None,
        tapped: TappedStep | None = None,
    ) -> None:
        """Begin after a step of these entries on the fast path, for which `goes_on` is true. `adapters`: of its rows;
        none may change the embedding; `tables`: as ModelInputs.tables; `layout`: as KVCachePool.layout; `tapped`: its
        taps."""
        self._block_size = block_size
        self._sequences = [entry.sequence for entry in scheduled]
        self._draws = [entry.sequence.draw for entry in scheduled]
        # Lengths with the tokens of the last step: a token's position is one less.
        self._lengths = list(metadata.kv_lens)
        self._longest = metadata.max_context_len
        # A sequence keeps the same one for life.
        self._adapters = adapters
        self._tables = np.pad(tables, (*[(0, 0)] * (tables.ndim - 1), (0, _SPARE_BLOCKS)))
        # A tensor over the same memory: (S, blocks), or (V, S, blocks) of all views.
        self._tables_SB = torch.from_numpy(self._tables)
        self._layout = layout
        self._tapped = tapped
        # Sequences that a head may begin or cease to read, and whether it does.
        self._may_change = [(one, one.is_tapped) for one in self._sequences if one.params.mode.asks_draft_model]
        # Of the step that is put together.
        self._bundles: Bundles | None = None

    def step(self, output: SchedulerOutput, model: LanguageModel, kv: KVCachePool) -> RunnerOutput | None:
        """Run the step if it directly follows the last one. None: it does not, or some row has no token.

        After None the usual path must run the whole step again, and this object must not be used again.
        """
        if output.forks or output.released or output.parked:
            return None
        # Copies from and to the host pool leave the tables of running sequences as they are.
        if output.copies and any(copy.kind is CopyKind.WITHIN for copy in output.copies):
            return None
        if self._may_change and any(one.is_tapped is not was for one, was in self._may_change):
            return None
        self._bundles = output.bundles
        ids = self._advance(output.scheduled)
        if ids is None:
            return None
        tapped = self._tapped
        if tapped is None:
            drawn = model.decode(ids, self._lengths, self._longest, self._tables_SB, kv, self._adapters)
        else:
            tapped.follow(output.scheduled)
            drawn = model.decode(ids, self._lengths, self._longest, self._tables_SB, kv, self._adapters, tapped.layers)
        if -1 in drawn:
            return None
        if tapped is not None:
            tapped.hand_over(model.embed)
        sampled = {}
        for sequence, token_id in zip(self._sequences, drawn, strict=True):
            sampled[sequence.seq_id] = SampledToken(token_id)
        return RunnerOutput(sampled, {})

    def _advance(self, scheduled: Seq[ScheduledSequence]) -> list[int] | None:
        """Return the tokens to compute, and advance the state by one token.

        None: an entry does not follow the last step's, or the tables are too narrow for it.
        """
        if len(scheduled) != len(self._sequences):
            return None
        ids, lengths = [], self._lengths
        for index, (entry, sequence) in enumerate(zip(scheduled, self._sequences, strict=True)):
            start = lengths[index]
            if not (
                entry.sequence is sequence
                and entry.start == start
                and entry.num_tokens == 1
                and len(entry.sample) == 1
                and not entry.verifiers
                and sequence.draw is self._draws[index]
                and sequence.unconditional is None
                # A grammar of calls begins to hold within a steady decode.
                and not sequence.is_constrained
            ):
                return None
            ids.append(sequence.token_ids[start])
            lengths[index] = start + 1
            number, offset = divmod(start, self._block_size)
            if not offset:
                if number == self._tables.shape[-1]:
                    return None
                if self._layout is None:
                    self._tables[index, number] = sequence.block_table[number]
                else:
                    self._tables[:, index, number] = self._blocks_of(sequence, number)
        self._longest += 1
        return ids

    def _blocks_of(self, sequence: Sequence, number: int) -> list[int]:
        """Return the blocks of all views with the tokens of block `number`."""
        heads, bundles = [table.blocks[number] for table in sequence.tables], self._bundles
        return heads if bundles is None else [block for head in heads for block in bundles[head]]
