"""Messages between ranks say the same at both ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.step import BlockCopy, CopyKind
from penstock.generation.parallel.messages import (
    AdapterPartOrder,
    Fragments,
    Kind,
    PoolOrder,
    StepOrder,
    decode_adapter,
    decode_copies,
    decode_forget,
    decode_hidden,
    encode_adapter,
    encode_copies,
    encode_forget,
    encode_fragments,
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
    assert (kind, order.num_layers) == (Kind.STEP, 2)
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
        assert kind is Kind.LOGITS
        again, adapters = decode_hidden(body, HIDDEN, torch.bfloat16)
        assert torch.equal(again, hidden)
        assert_spans(adapters, spans)
    copies = [BlockCopy(1, 2), BlockCopy(3, 4, CopyKind.OUT), BlockCopy(5, 6, CopyKind.IN)]
    kind, body = kind_of(encode_copies(copies))
    assert (kind, decode_copies(body)) == (Kind.COPIES, copies)
    order = PoolOrder(10, 16, "bfloat16", 3, "/a folder/meeting")
    kind, body = kind_of(order.encoded())
    assert (kind, PoolOrder.decoded(body)) == (Kind.POOL, order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", [None, 0, 97])
def test_adapters_are_the_same_at_both_ends(dtype: torch.dtype, site: int | None) -> None:
    # As matrices of a column-major view, too.
    a, b = torch.randn(HIDDEN, 3).to(dtype).T, torch.randn(5, 3).to(dtype)
    kind, body = kind_of(AdapterPartOrder(7, site, 12, 1 / 3, a, b).encoded())
    assert kind is Kind.ADAPTER_PART
    order = AdapterPartOrder.decoded(body, dtype)
    assert (order.adapter, order.site, order.first, order.scale) == (7, site, 12, 1 / 3)
    assert torch.equal(order.a, a)
    assert torch.equal(order.b, b)
    kind, body = kind_of(encode_adapter(7))
    assert (kind, decode_adapter(body)) == (Kind.ADAPTER, 7)
    kind, body = kind_of(encode_forget([7, 0]))
    assert (kind, decode_forget(body)) == (Kind.FORGET, [7, 0])


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1, 5 << 19])
def test_a_long_message_comes_in_fragments_and_one_that_is_given_up_leaves_none(size: int) -> None:
    message, fragments = bytes(range(251)) * (size // 251) + b"x" * (size % 251), Fragments()
    given_up = next(encode_fragments(bytes(3 << 20)))
    found = []
    for encoded in (given_up, *encode_fragments(message)):
        kind, body = kind_of(encoded)
        assert kind is Kind.FRAGMENT
        found.append(fragments.add(body))
    assert [one for one in found if one is not None] == [found[-1]] == [message]
    assert len(found) == 1 + -(-size // (1 << 20))
