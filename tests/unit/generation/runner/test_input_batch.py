"""The persistent block tables: always what a batch built from nothing would hold."""

from __future__ import annotations

import random

import pytest
import torch
from factories.engine.sequences import params, sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.step import ScheduledSequence
from penstock.generation.runner.input_batch import InputBatch, ModelInputs

CPU = torch.device("cpu")
BLOCK_SIZE = 2


def assert_same(one: ModelInputs, other: ModelInputs) -> None:
    assert torch.equal(one.input_ids_T, other.input_ids_T)
    assert torch.equal(one.positions_T, other.positions_T)
    assert torch.equal(one.metadata.slot_mapping, other.metadata.slot_mapping)
    assert one.row_starts == other.row_starts
    width = one.metadata.block_tables.shape[1]
    for row, length in enumerate(one.metadata.kv_lens):
        used = -(-length // BLOCK_SIZE)
        assert used <= width
        assert torch.equal(one.metadata.block_tables[row, :used], other.metadata.block_tables[row, :used])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_incremental_tables_equal_new_ones(seed: int) -> None:
    rng = random.Random(seed)
    # More sequences than the first slots, longer than the first blocks: both dimensions grow.
    live = [sequence([rng.randrange(99) for _ in range(rng.randrange(1, 300))], params(), seq_id=i) for i in range(24)]
    batch, next_block = InputBatch(BLOCK_SIZE, CPU), 0
    for _ in range(12):
        scheduled = []
        for one in rng.sample(live, rng.randrange(1, len(live) + 1)):
            if one.block_table and rng.random() < 0.1:
                # Preempted: released, and computed again in other blocks.
                batch.release([one.seq_id])
                one.block_table.clear()
                one.num_computed_tokens = 0
            start = one.num_computed_tokens
            if start == one.num_tokens:
                one.token_ids.append(rng.randrange(99))
            elif start % BLOCK_SIZE and rng.random() < 0.2:
                # Copy-on-write of the block that the next token falls into.
                one.block_table[start // BLOCK_SIZE] = next_block = next_block + 1
            elif rng.random() < 0.3 and (
                taken := rng.randrange(start // BLOCK_SIZE, (one.num_tokens + 1) // BLOCK_SIZE)
            ):
                # Blocks of others from the next token's on.
                for index in range(start // BLOCK_SIZE, taken):
                    one.block_table[index : index + 1] = [next_block := next_block + 1]
                start = one.num_computed_tokens = max(start, taken * BLOCK_SIZE)
            count = rng.randrange(1, one.num_tokens - start + 1)
            while len(one.block_table) * BLOCK_SIZE < start + count:
                one.block_table.append(next_block := next_block + 1)
            scheduled.append(ScheduledSequence(one, start, count))
            one.num_computed_tokens += count
        assert_same(batch.build(scheduled), InputBatch(BLOCK_SIZE, CPU).build(scheduled))


def test_inputs_of_a_mixed_step() -> None:
    prompt, decoding = sequence([5, 6, 7], params(), seq_id=0), sequence([1, 2], params(), seq_id=1, output=[3])
    prompt.block_table[:], decoding.block_table[:] = [4, 9], [7, 2]
    inputs = InputBatch(BLOCK_SIZE, CPU).build(
        [ScheduledSequence(prompt, 0, 3, (prompt,)), ScheduledSequence(decoding, 2, 1, (decoding,))]
    )
    assert inputs.input_ids_T.tolist() == [5, 6, 7, 3]
    assert inputs.positions_T.tolist() == [0, 1, 2, 2]
    assert inputs.metadata.slot_mapping.tolist() == [8, 9, 18, 4]
    assert inputs.row_starts == [0, 3, 4]


@pytest.mark.parametrize("lengths", [[5], [1, 8, 3, 30]])
def test_inputs_of_a_decode_step_are_those_of_any_step(lengths: list[int]) -> None:
    batch, live = InputBatch(BLOCK_SIZE, CPU), []
    for seq_id, length in enumerate(lengths):
        one = sequence(list(range(10, 10 + length)), params(), seq_id=seq_id)
        one.block_table[:] = range(100 * seq_id, 100 * seq_id + 20)
        live.append(one)
    for _ in range(5):
        inputs = batch.build([ScheduledSequence(one, one.num_tokens - 1, 1, (one,)) for one in live])
        kv_lens = [one.num_tokens for one in live]
        tables = torch.tensor([one.block_table for one in live], dtype=torch.int32)
        metadata, positions = AttentionMetadata.build([1] * len(live), kv_lens, tables, BLOCK_SIZE)
        assert inputs.input_ids_T.tolist() == [one.token_ids[-1] for one in live]
        assert torch.equal(inputs.positions_T, positions)
        assert inputs.row_starts == list(range(len(live) + 1))
        for name in ("query_start", "context_lens", "slot_mapping"):
            found, expected = getattr(inputs.metadata, name), getattr(metadata, name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        width = inputs.metadata.block_tables.shape[1]
        assert width == -(-max(kv_lens) // BLOCK_SIZE)
        assert torch.equal(inputs.metadata.block_tables, tables[:, :width])
        for name in ("query_lens", "kv_lens", "max_context_len"):
            assert getattr(inputs.metadata, name) == getattr(metadata, name)
        for one in live:
            one.token_ids.append(7)
