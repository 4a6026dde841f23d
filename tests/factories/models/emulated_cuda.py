"""torch's FlashAttention computed exactly on the CPU, under the operator that a GPU runs, and a device over it.

The emulation computes what torch.nn.attention.varlen documents, in any dtype, head size and block size, and refuses
what the pool never means. It says nothing of a GPU's rounding, speed or memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from penstock.generation.attention.cuda import FlashLimits
from penstock.generation.devices.base import DeviceMemory
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.host.memory import host_memory
from torch import Tensor

_libraries: list[torch.library.Library] = []
# Calls of the operator in this process.
calls = [0]


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Attend over a paged pool (blocks, block, kv_heads, D): causal, aligned at the lower right."""
    calls[0] += 1
    assert cum_seq_q is not None
    assert seqused_k is not None
    assert block_table is not None
    assert cum_seq_k is None
    assert (dropout_p, return_debug_mask, window_size_right) == (0.0, False, 0)
    assert {cum_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert query.is_contiguous()
    size, kv_heads, head_dim = key.shape[1:]
    starts, lengths = cum_seq_q.tolist(), seqused_k.tolist()
    assert max(end - begin for begin, end in pairwise(starts)) == max_q
    assert max(lengths) <= max_k
    assert window_size_left is not None
    before = None if window_size_left < 0 else window_size_left
    out = torch.empty_like(query)
    for (begin, end), kv_len, table in zip(pairwise(starts), lengths, block_table, strict=True):
        blocks = table[: -(-kv_len // size)].long()
        keys, values = (pool[blocks].view(-1, kv_heads, head_dim)[:kv_len].transpose(0, 1) for pool in (key, value))
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
    nothing = query.new_empty(0, dtype=torch.float32)
    return out, nothing, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def install() -> None:
    """Register the implementation for tensors of the CPU, once a process."""
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        _libraries.append(library)
        library.impl("_flash_attention_forward", flash_attention_forward, "CPU")


class EmulatedCUDA(CUDADevice):
    """CUDADevice on tensors of the CPU. Its attention takes float32 and the small heads and blocks of test models."""

    limits = FlashLimits(
        (torch.float16, torch.bfloat16, torch.float32), max_head_dim=1024, head_multiple=1, block_multiple=1
    )

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return torch.device("cpu")

    def _claim(self) -> None:
        install()

    def _runtime(self) -> Any:
        raise AssertionError("there is no GPU here")

    def _has_bfloat16(self) -> bool:
        return True

    def memory(self) -> DeviceMemory:
        """See Device."""
        return DeviceMemory(*host_memory())

    def synchronize(self) -> None:
        """See Device."""

    def describe(self) -> str:
        """See Device."""
        return "cuda:0 (emulated)"
