"""Every documented limit of an NPU's operators is refused before the operator is called, and what is computed within
them, by an exact emulation of the operators, equals the portable attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from factories.models.emulated_npu import IMPLEMENTATIONS, PINNED, calls, install
from penstock.generation.attention import npu_operators
from penstock.generation.attention.base import AttentionLayer, AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.npu import NPUAttention
from penstock.generation.attention.npu_operators import AttentionLimits, OperatorLimit, PagedCall, causal_mask
from penstock.generation.attention.sdpa import SDPAAttention
from torch import Tensor

BLOCK, HEADS, KV_HEADS, DIM = 128, 4, 2, 64
BF16 = torch.bfloat16
LIMITS = AttentionLimits()


@pytest.fixture(autouse=True, scope="module")
def _operators() -> None:
    install()


def pool(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape or (4, BLOCK, KV_HEADS, DIM), dtype=dtype)


def rows(count: int = 5, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(count, heads, dim, dtype=dtype)


# Two sequences: a chunk of four rows, the last of 200 keys, and a decode row.
CALL = PagedCall(
    [4, 5], [200, 7], torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), causal_mask(torch.device("cpu")), None
)


def check(call: PagedCall = CALL, query: Tensor | None = None, keys: Tensor | None = None) -> None:
    keys = pool() if keys is None else keys
    call.check(rows() if query is None else query, keys, keys, LIMITS)


def test_what_is_within_the_limits_is_let_through() -> None:
    check()
    for dim in (64, 128, 192):
        check(query=rows(dim=dim), keys=pool(4, BLOCK, KV_HEADS, dim))
    check(replace(CALL, window=1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_lens": []}, "actual_seq_lengths_kv is mandatory"),
        ({"kv_lens": [200]}, "the same sequences"),
        ({"query_ends": [4, 6]}, "cumulative and end with 5"),
        ({"query_ends": [5, 5]}, "at least one row"),
        ({"kv_lens": [3, 7]}, "4 rows and 3 keys"),
        ({"kv_lens": [257, 7]}, "block_table has blocks for"),
        ({"block_tables": CALL.block_tables.long()}, "block_table must be 2-D int32"),
        ({"block_tables": CALL.block_tables.flatten()}, "block_table must be 2-D int32"),
        ({"block_tables": CALL.block_tables + 1}, "block_table must name blocks"),
        ({"block_tables": CALL.block_tables - 4}, "block_table must name blocks"),
        ({"mask": CALL.mask[:5, :5]}, "atten_mask must be 2048 x 2048"),
        ({"mask": CALL.mask.to(BF16)}, "atten_mask must be 2048 x 2048 int8"),
        ({"window": 0}, "pre_tokens"),
        ({"window": 2**31}, "pre_tokens"),
    ],
)
def test_lengths_tables_and_masks_outside_the_limits_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(OperatorLimit, match=f"npu_fused_infer_attention_score: .*{named}"):
        check(replace(CALL, **change))


@pytest.mark.parametrize(
    ("query", "keys", "named"),
    [
        (rows(dtype=torch.float32), pool(dtype=torch.float32), "one dtype of"),
        (rows(dtype=torch.float16), pool(), "one dtype of"),
        (rows(dim=256), pool(4, BLOCK, KV_HEADS, 256), "D must be 64 or 128 or 192"),
        (rows(dim=128), pool(), "D must be"),
        (rows(heads=5), pool(), "num_heads must be a multiple of 2"),
        (rows(), pool(8, 16, KV_HEADS, DIM), "block_size must be 128"),
        (rows().flatten(1), pool(), "query must be"),
        (rows(), pool(4, BLOCK, KV_HEADS * DIM), "key and value"),
        (rows(dim=2 * DIM)[..., ::2], pool(), "contiguous"),
        (rows(), pool(4, KV_HEADS, BLOCK, DIM).transpose(1, 2), "contiguous"),
    ],
)
def test_queries_and_pools_outside_the_limits_are_refused(query: Tensor, keys: Tensor, named: str) -> None:
    with pytest.raises(OperatorLimit, match=f"npu_fused_infer_attention_score: .*{named}"):
        check(query=query, keys=keys)


def slots(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("key", "cache", "places", "named"),
    [
        (rows(2, KV_HEADS), pool(), slots(3, 3), "a slot twice"),
        (rows(2, KV_HEADS), pool(), slots(3, 4 * BLOCK), "slot_mapping must be below 512"),
        (rows(2, KV_HEADS), pool(), slots(-1, 4), "slot_mapping must be below 512"),
        (rows(2, KV_HEADS), pool(), slots(3), "slot_mapping must be int32 or int64 of 2 rows"),
        (rows(2, KV_HEADS), pool(), slots(3, 4, dtype=torch.int16), "slot_mapping must be int32 or int64"),
        (rows(2, KV_HEADS), pool(), slots(3, 0, 4, 0)[::2], "slot_mapping must be contiguous"),
        (rows(2, KV_HEADS), pool(4, KV_HEADS, BLOCK, DIM).transpose(1, 2), slots(3, 4), "key_cache and value_cache"),
        (rows(2, HEADS), pool(), slots(3, 4), r"key and value must be \(T, 2, 64\)"),
        (rows(2, KV_HEADS, dtype=torch.float32), pool(), slots(3, 4), "the caches' dtype"),
    ],
)
def test_writes_outside_the_limits_are_refused(key: Tensor, cache: Tensor, places: Tensor, named: str) -> None:
    with pytest.raises(OperatorLimit, match=f"npu_scatter_pa_kv_cache: .*{named}"):
        npu_operators.check_scatter(key, key, cache, cache, places)


def turn(count: int = 2, dim: int = DIM, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(1, count, 1, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda: npu_operators.check_rotary(rows(2, dim=63), turn(dim=63), turn(dim=63)), "npu_rotary_mul: D must be"),
        (lambda: npu_operators.check_rotary(rows(2, dim=896), turn(dim=896), turn(dim=896)), "less than 896"),
        (lambda: npu_operators.check_rotary(rows(2).flatten(1), turn(), turn()), "self must be 4-D"),
        (lambda: npu_operators.check_rotary(rows(2), turn(dim=32), turn(dim=32)), "r1 and r2 must be"),
        (lambda: npu_operators.check_rotary(rows(2), turn(dtype=torch.float32), turn()), "r1 and r2 must have"),
        (lambda: npu_operators.rms_norm(pool(2, 8), pool(8, dtype=torch.float32), 1e-6), "npu_rms_norm: gamma"),
        (lambda: npu_operators.rms_norm(pool(2, 8), pool(4), 1e-6), r"gamma must be \(8,\)"),
        (lambda: npu_operators.rms_norm(pool(2, 8, dtype=torch.int8), pool(8, dtype=torch.int8), 1e-6), "gamma must"),
        (lambda: npu_operators.rms_norm(pool(2, 8), pool(8), 0.0), "epsilon"),
        (lambda: npu_operators.add_rms_norm(pool(2, 8), pool(1, 8), pool(8), 1e-6), "npu_add_rms_norm: x1 and x2"),
        (lambda: npu_operators.swiglu(pool(2, 7)), "npu_swiglu: self must have an even"),
        (lambda: npu_operators.swiglu(pool(2, 8, dtype=torch.int8)), "npu_swiglu"),
    ],
)
def test_other_operators_refuse_what_is_outside_their_limits(refused: Callable[[], object], named: str) -> None:
    with pytest.raises(OperatorLimit, match=named):
        refused()


@pytest.mark.parametrize("window", [None, 1, 100, 129])
@pytest.mark.parametrize("sinks", [None, torch.ones(HEADS)], ids=["plain", "sinks"])
def test_a_mixed_step_equals_the_portable_attention(window: int | None, sinks: Tensor | None) -> None:
    query_lens, kv_lens = [150, 1, 3], [150, 300, 200]
    tables = torch.tensor([[7, 2, 0], [1, 5, 3], [6, 4, 0]], dtype=torch.int32)
    torch.manual_seed(0)
    qkv = torch.randn(sum(query_lens), (HEADS + 2 * KV_HEADS) * DIM).to(BF16)
    norm = torch.rand(DIM).to(BF16)
    layer = AttentionLayer(HEADS, KV_HEADS, DIM, 0.125, window=window, q_norm=norm, k_norm=norm, eps=1e-6, sinks=sinks)
    angles = torch.rand(len(qkv), 1, DIM // 2)
    before = torch.randn(2, 8, BLOCK, KV_HEADS, DIM).to(BF16)
    found = []
    made = calls["npu_fused_infer_attention_score"]
    for attention in (NPUAttention(), SDPAAttention()):
        kv = KVCachePool(1, 8, BLOCK, KV_HEADS, DIM, BF16, torch.device("cpu"))
        kv.key(0).copy_(before[0])
        kv.value(0).copy_(before[1])
        metadata, _ = AttentionMetadata.build(query_lens, kv_lens, tables, BLOCK)
        turns = angles.cos().to(BF16), angles.sin().to(BF16)
        out = attention.forward_qkv(qkv.clone(), *turns, layer, metadata, kv)
        found.append((out, kv.key(0).clone(), kv.value(0).clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)
    assert calls["npu_fused_infer_attention_score"] - made == (sinks is None)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_emulation_has_the_parameters_of_the_wheels_schemas(name: str) -> None:
    schema = torch._C.parse_schema(PINNED[name])
    pinned = {argument.name: argument for argument in schema.arguments}
    for parameter in inspect.signature(IMPLEMENTATIONS[name]).parameters.values():
        argument = pinned[parameter.name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only
        assert (parameter.default is not parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            assert parameter.default == argument.default_value
    assert str(getattr(torch.ops.npu, name).default._schema) == str(torch._C.parse_schema(f"npu::{PINNED[name]}"))


def test_every_pinned_schema_can_be_parsed() -> None:
    assert len(PINNED) == 20
    for name, schema in PINNED.items():
        assert torch._C.parse_schema(schema).name == name
