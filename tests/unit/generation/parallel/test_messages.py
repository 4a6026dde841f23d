"""Messages between ranks say the same at both ends."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.step import BlockCopy, CopyKind
from penstock.generation.parallel.messages import (
    Kind,
    PoolOrder,
    StepOrder,
    decode_copies,
    decode_hidden,
    encode_copies,
    encode_hidden,
    kind_of,
)

HIDDEN = 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_embeds", [False, True])
def test_a_step_is_the_same_at_both_ends(dtype: torch.dtype, has_embeds: bool) -> None:
    tables = torch.tensor([[4, 9, 0], [1, 0, 0]], dtype=torch.int32)
    metadata, positions = AttentionMetadata.build([3, 1], [9, 2], tables, 4)
    ids = torch.tensor([100_000, 7, -1, 3])
    embeds = torch.randn(4, HIDDEN).to(dtype) if has_embeds else None
    kind, body = kind_of(StepOrder.of(2, ids, metadata, embeds).encoded())
    order = StepOrder.decoded(body, HIDDEN, dtype)
    again, places = AttentionMetadata.build(
        order.query_lens.tolist(), order.kv_lens.tolist(), torch.from_numpy(order.tables), 4
    )
    assert (kind, order.num_layers) == (Kind.STEP, 2)
    assert torch.equal(torch.from_numpy(order.ids).long(), ids)
    assert torch.equal(places, positions)
    for name in ("query_start", "context_lens", "block_tables", "slot_mapping"):
        assert torch.equal(getattr(again, name), getattr(metadata, name))
    assert (order.embeds is None) == (embeds is None)
    if order.embeds is not None and embeds is not None:
        assert torch.equal(order.embeds, embeds)


def test_rows_copies_and_pools_are_the_same_at_both_ends() -> None:
    hidden = torch.randn(3, HIDDEN).bfloat16()
    kind, body = kind_of(encode_hidden(hidden))
    assert kind is Kind.LOGITS
    assert torch.equal(decode_hidden(body, HIDDEN, torch.bfloat16), hidden)
    copies = [BlockCopy(1, 2), BlockCopy(3, 4, CopyKind.OUT), BlockCopy(5, 6, CopyKind.IN)]
    kind, body = kind_of(encode_copies(copies))
    assert (kind, decode_copies(body)) == (Kind.COPIES, copies)
    order = PoolOrder(10, 16, "bfloat16", 3, "/a folder/meeting")
    kind, body = kind_of(order.encoded())
    assert (kind, PoolOrder.decoded(body)) == (Kind.POOL, order)
