"""Messages between ranks say the same at both ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.step import BlockCopy, CopyKind
from penstock.generation.parallel.rank_messages import (
    AdapterPartOrder,
    IncomingPart,
    MessageKind,
    PoolOrder,
    StepOrder,
    adapter_of_part,
    decode_adapter,
    decode_copies,
    decode_forget,
    decode_hidden,
    encode_adapter,
    encode_copies,
    encode_forget,
    encode_hidden,
    kind_of,
)

HIDDEN = 6
SPANS = np.array([[3, 1], [-1, 2], [70_000, 1]], np.int32)


def assert_spans(found: np.ndarray | None, expected: np.ndarray | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_embeds", [False, True])
@pytest.mark.parametrize("spans", [None, SPANS])
def test_a_step_is_the_same_at_both_ends(dtype: torch.dtype, has_embeds: bool, spans: np.ndarray | None) -> None:
    tables = torch.tensor([[4, 9, 0], [1, 0, 0]], dtype=torch.int32)
    metadata, positions = AttentionMetadata.build([3, 1], [9, 2], tables, 4)
    ids = torch.tensor([100_000, 7, -1, 3])
    embeds = torch.randn(4, HIDDEN).to(dtype) if has_embeds else None
    kind, body = kind_of(StepOrder.of(2, ids, metadata, embeds, spans).encoded())
    order = StepOrder.decoded(body, HIDDEN, dtype)
    again, places = AttentionMetadata.build(
        order.query_lens.tolist(), order.kv_lens.tolist(), torch.from_numpy(order.tables), 4
    )
    assert (kind, order.num_layers) == (MessageKind.STEP, 2)
    assert torch.equal(torch.from_numpy(order.ids).long(), ids)
    assert torch.equal(places, positions)
    for name in ("query_start", "context_lens", "block_tables", "slot_mapping"):
        assert torch.equal(getattr(again, name), getattr(metadata, name))
    assert_spans(order.adapters, spans)
    assert (order.embeds is None) == (embeds is None)
    if order.embeds is not None and embeds is not None:
        assert torch.equal(order.embeds, embeds)


def test_rows_copies_and_pools_are_the_same_at_both_ends() -> None:
    hidden = torch.randn(3, HIDDEN).bfloat16()
    for spans in (None, SPANS):
        kind, body = kind_of(encode_hidden(hidden, spans))
        assert kind is MessageKind.LOGITS
        again, adapters = decode_hidden(body, HIDDEN, torch.bfloat16)
        assert torch.equal(again, hidden)
        assert_spans(adapters, spans)
    copies = [BlockCopy(1, 2), BlockCopy(3, 4, CopyKind.OUT), BlockCopy(5, 6, CopyKind.IN)]
    kind, body = kind_of(encode_copies(copies))
    assert (kind, decode_copies(body)) == (MessageKind.COPIES, copies)
    order = PoolOrder(10, 16, "bfloat16", 3, "/a folder/meeting")
    kind, body = kind_of(order.encoded())
    assert (kind, PoolOrder.decoded(body)) == (MessageKind.POOL, order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", [None, 0, 97])
def test_adapters_are_the_same_at_both_ends(dtype: torch.dtype, site: int | None) -> None:
    # As matrices of a column-major view, too.
    a, b = torch.randn(HIDDEN, 3).to(dtype).T, torch.randn(5, 3).to(dtype)
    head, *pieces = (kind_of(message) for message in AdapterPartOrder(7, site, 12, 1 / 3, a, b).encoded())
    assert (head[0], adapter_of_part(head[1])) == (MessageKind.ADAPTER_PART, 7)
    part, found = IncomingPart(head[1], dtype), []
    for kind, body in pieces:
        assert kind is MessageKind.PIECE
        found.append(part.add(body))
    assert found[:-1] == [None]
    order = found[-1]
    assert order is not None
    assert (order.adapter, order.site, order.first, order.scale) == (7, site, 12, 1 / 3)
    assert torch.equal(order.a, a)
    assert torch.equal(order.b, b)
    kind, body = kind_of(encode_adapter(7))
    assert (kind, decode_adapter(body)) == (MessageKind.ADAPTER, 7)
    kind, body = kind_of(encode_forget([7, 0]))
    assert (kind, decode_forget(body)) == (MessageKind.FORGET, [7, 0])


@pytest.mark.parametrize("rows", [1, 1 << 19, (1 << 19) + 1, 5 << 18])
def test_large_matrices_come_in_pieces_of_a_megabyte(rows: int) -> None:
    a, b = torch.randn(rows, 1).bfloat16(), torch.randn(3, rows).bfloat16()
    _, *pieces = AdapterPartOrder(0, 0, 0, 1.0, a, b).encoded()
    assert len(pieces) == -(-rows // (1 << 19)) + -(-3 * rows // (1 << 19))
    assert max(map(len, pieces)) <= (1 << 20) + 4
    head, *bodies = (kind_of(message)[1] for message in AdapterPartOrder(0, 0, 0, 1.0, a, b).encoded())
    part = IncomingPart(head, torch.bfloat16)
    *early, order = [part.add(body) for body in bodies]
    assert not any(early)
    assert order is not None
    assert torch.equal(order.a, a)
    assert torch.equal(order.b, b)
    # Neither keeps the other in memory.
    assert (order.a.untyped_storage().nbytes(), order.b.untyped_storage().nbytes()) == (a.nbytes, b.nbytes)
