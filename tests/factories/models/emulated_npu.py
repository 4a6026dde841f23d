"""An NPU's operators computed exactly on the CPU, under torch-npu's own names and schemas, and a device over them.

The emulation computes what the operators are documented to, in any dtype, head size and block size, and refuses what
the real ones would silently get wrong. It says nothing of an NPU's rounding, speed or memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from factories.models.emulated_cuda import EmulatedGraphs
from penstock.generation.attention import npu_operators
from penstock.generation.attention.npu_operators import MASK_SIZE, AttentionLimits
from penstock.generation.devices.base import DeviceMemory
from penstock.generation.devices.graph_capture import CapturedGraph, GraphCapture
from penstock.generation.devices.npu import NPUDevice
from penstock.generation.devices.npu_graphs import NPUGraphs
from penstock.generation.host.memory import host_memory
from torch import Tensor
from typing_extensions import override

PINNED: dict[str, str] = json.loads(
    (Path(__file__).parents[2] / "data" / "npu_schemas.json").read_text(encoding="utf-8")
)["schemas"]
CAUSAL, BAND = 3, 4
# Calls of each operator in this process.
calls: Counter[str] = Counter()
_libraries: list[torch.library.Library] = []
# What `actual_seq_lengths_kv` is in the replay that runs; None: none does.
_lengths_of_replay: list[int] | None = None


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend in layout TND over a paged pool (blocks, block, kv_heads * D), in the causal or the band mode."""
    if _lengths_of_replay is not None:
        actual_seq_lengths_kv = _lengths_of_replay
    assert input_layout == "TND"
    assert atten_mask is not None
    assert actual_seq_lengths is not None
    assert actual_seq_lengths_kv is not None
    assert block_table is not None
    assert torch.equal(atten_mask, torch.ones(MASK_SIZE, MASK_SIZE, dtype=atten_mask.dtype).triu_(1))
    assert key.shape[1] == block_size
    assert query.shape[1] == num_heads
    # In the causal mode the operator takes no notice of pre_tokens and next_tokens.
    before = pre_tokens if sparse_mode == BAND else None
    assert sparse_mode in (CAUSAL, BAND)
    assert sparse_mode == CAUSAL or next_tokens == 0
    head_dim = query.shape[2]
    out = torch.empty_like(query)
    sequences = zip(pairwise((0, *actual_seq_lengths)), actual_seq_lengths_kv, block_table, strict=True)
    for (begin, end), kv_len, table in sequences:
        blocks = table[: -(-kv_len // block_size)].long()
        keys, values = (
            pool[blocks].view(-1, num_key_value_heads, head_dim)[:kv_len].transpose(0, 1) for pool in (key, value)
        )
        # Aligned at the lower right: the last row sees the last key.
        row = torch.arange(kv_len - (end - begin), kv_len).unsqueeze(1)
        column = torch.arange(kv_len)
        visible = column <= row
        if before is not None:
            visible &= column >= row - before
        # The newest keys that any row sees: sums over fewer terms, as the CPU's.
        first = 0 if before is None else max(0, kv_len - (end - begin) - before)
        out[begin:end] = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1).unsqueeze(0),
            keys[:, first:].unsqueeze(0),
            values[:, first:].unsqueeze(0),
            attn_mask=visible[:, first:],
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out, query.new_empty(0, dtype=torch.float32)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write rows at their slots."""
    assert cache_mode == "Norm"
    assert key.is_contiguous()
    assert value.is_contiguous()
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping.long(), rows)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Norm over the last dimension."""
    inverse = (self.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return F.rms_norm(self, gamma.shape, gamma, epsilon), inverse


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """Norm of the sum, the inverse deviation, the sum."""
    total = x1 + x2
    return (*npu_rms_norm(total, gamma, epsilon), total)


def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Turn by halves."""
    assert rotary_mode == "half"
    assert rotate is None
    assert self.dim() == r1.dim() == r2.dim() == 4
    first, second = self.chunk(2, -1)
    return self * r1 + torch.cat((-second, first), -1) * r2


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """Multiply the second half by silu of the first."""
    gate, up = self.chunk(2, dim)
    return F.silu(gate).mul_(up)


def npu_dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise row by row to int8, by the largest magnitude."""
    assert input.dtype in (torch.float16, torch.bfloat16)
    x = input.float()
    scale = x.abs().amax(-1) / 127.0
    # Of a row of zeros; what the operator gives there is not documented.
    safe = torch.where(scale > 0, scale, 1.0)
    return (x / safe.unsqueeze(-1)).round().to(torch.int8), scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
) -> Tensor:
    """Multiply whole numbers; scale the sums by output and by row, and add a bias of fractions."""
    assert pertoken_scale is not None
    assert output_dtype is not None
    # Sums of 65 535 products of bytes are exact in float64.
    sums = (x1.double() @ x2.double()).float()
    found = sums * scale * pertoken_scale.unsqueeze(1)
    return (found if bias is None else found + bias).to(_OUTPUT_DTYPES[output_dtype])


def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """Pack eight columns into one number, the first in its lowest bits."""
    assert inner_k_tiles == 0
    parts = (weight & 15).unflatten(1, (-1, 8)).long()
    packed = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """Multiply by (weight + offset) * scale, as torch-npu's own test of it."""
    assert quant_scale is None
    assert quant_offset is None
    nibbles = ((weight.unsqueeze(-1) >> (4 * torch.arange(8))) & 15).flatten(1)
    values = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    group = antiquant_group_size or len(values)

    def spread(rows: Tensor) -> Tensor:
        return rows.float().repeat_interleave(group, dim=0)[: len(values)]

    if antiquant_offset is not None:
        values = values + spread(antiquant_offset)
    found = x.float() @ (values * spread(antiquant_scale))
    return (found if bias is None else found + bias.float()).to(x.dtype)


# Numbers that torch's dtypes have where an operator takes one as a number.
_OUTPUT_DTYPES = {5: torch.float16, 15: torch.bfloat16}
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(npu_fused_infer_attention_score, npu_scatter_pa_kv_cache, npu_rms_norm, npu_add_rms_norm),
        *(npu_rotary_mul, npu_swiglu, npu_dynamic_quant, npu_quant_matmul),
        *(npu_convert_weight_to_int4pack, npu_weight_quant_batchmatmul),
    )
}


def install() -> None:
    """Define the operators by the pinned schemas and register the implementations, once a process."""
    if _libraries:
        return
    library = torch.library.Library("npu", "DEF")
    _libraries.append(library)
    for name, schema in PINNED.items():
        if name in IMPLEMENTATIONS:
            library.define(schema)
            library.impl(name, _counted(name, IMPLEMENTATIONS[name]), "CompositeExplicitAutograd")


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **options)

    return call


def _not_readable() -> Any:
    """Make the operators' checks take no tensor for one of the host: none is, on an NPU."""
    return mock.patch.object(npu_operators, "_is_readable", return_value=False)


class EmulatedNPUGraphs(EmulatedGraphs):
    """Graphs in which attention has the lengths that a replay is given, as `NPUGraph.update` leaves them: those of the
    capture are wrong in every step."""

    needs_lengths = NPUGraphs.needs_lengths
    needs_slots = NPUGraphs.needs_slots

    @override
    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        # What an attention keeps for all of its steps is made in the first runs, as on the device.
        call()
        with _not_readable():
            graph = super().capture(call)

        def replay(lengths: list[int] | None) -> None:
            global _lengths_of_replay
            assert lengths is not None
            _lengths_of_replay = list(lengths)
            try:
                with _not_readable():
                    graph.replay(None)
            finally:
                _lengths_of_replay = None

        return CapturedGraph(replay, graph.outputs)


class EmulatedNPU(NPUDevice):
    """NPUDevice on tensors of the CPU. Its attention takes float32 and the small heads and blocks of test models."""

    limits = AttentionLimits((torch.float16, torch.bfloat16, torch.float32), head_dims=None, block_size=None)

    @property
    @override
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _claim(self) -> None:
        install()

    @override
    def memory(self) -> DeviceMemory:
        return DeviceMemory(*host_memory())

    @override
    def graph_capture(self) -> GraphCapture:
        return EmulatedNPUGraphs()

    @override
    def synchronize(self) -> None:
        pass

    @override
    def describe(self) -> str:
        return "npu:0 (emulated)"
