"""torch's operators of a GPU computed exactly on the CPU, under the names that a GPU runs, and a device over them.

The emulation computes what torch.nn.attention.varlen documents, in any dtype, head size and block size. It refuses what
the pool never means, and what torch 2.13 computes wrongly. It says nothing of a GPU's rounding, speed or memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from penstock.generation.attention.cuda import FlashLimits
from penstock.generation.devices.base import DeviceMemory
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.devices.graph_capture import CapturedGraph, GraphCapture
from penstock.generation.host.memory import host_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

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
    assert cum_seq_k is not None, "torch 2.13 wants both"
    assert cum_seq_k.shape == cum_seq_q.shape
    assert (dropout_p, return_debug_mask) == (0.0, False)
    is_grouped = max_q == 1 and window_size_left == window_size_right == -1 and query.shape[1] > key.shape[2]
    assert is_grouped or (window_size_right, num_splits) == (0, 1), "torch 2.13 gives wrong numbers here"
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


def convert_weight_to_int4pack(halves: Tensor, inner_tiles: int) -> Tensor:
    """Keep the bytes of (outputs, inputs / 2) in the shape that a GPU has them in."""
    outputs, inputs = halves.shape[0], 2 * halves.shape[1]
    assert halves.dtype is torch.uint8
    assert inner_tiles in (2, 4, 8)
    assert outputs % 8 == 0
    assert inputs % (16 * inner_tiles) == 0
    return halves.contiguous().view(torch.int32).view(outputs // 8, inputs // (16 * inner_tiles), 32, inner_tiles // 2)


def weight_int4pack_mm(x: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
    """Multiply by (value - 8) * scale + zero, which is rounded to bfloat16 as a GPU's is; sums are in float32."""
    assert x.dtype is scale_and_zero.dtype is torch.bfloat16
    assert x.is_contiguous()
    assert scale_and_zero.is_contiguous()
    outputs = packed.shape[0] * 8
    halves = packed.view(torch.uint8).view(outputs, -1)
    values = torch.stack([halves >> 4, halves & 15], dim=-1).flatten(1).float()
    assert scale_and_zero.shape == (values.shape[1] // group, outputs, 2)
    scale, zero = (part.t().float().repeat_interleave(group, dim=1) for part in scale_and_zero.unbind(-1))
    weight = ((values - 8) * scale + zero).bfloat16()
    return (x.float() @ weight.float().t()).bfloat16()


def int_mm(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply whole numbers of the shapes and layout that cuBLASLt takes."""
    assert x.dtype is weight.dtype is torch.int8
    assert x.shape[0] > 16
    assert not any(size % 8 for size in weight.shape)
    assert x.is_contiguous()
    assert weight.t().is_contiguous()
    return (x.double() @ weight.double()).int()


def scaled_mm(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply e4m3 by rows' and columns' scales, in the shapes and layout that a GPU takes."""
    assert x.dtype is weight.dtype is torch.float8_e4m3fn
    assert out_dtype is torch.bfloat16
    assert (bias, scale_result) == (None, None)
    assert not any(size % 16 for size in weight.shape)
    assert x.is_contiguous()
    assert weight.t().is_contiguous()
    assert (scale_a.shape, scale_b.shape) == ((x.shape[0], 1), (1, weight.shape[1]))
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    return ((x.float() @ weight.float()) * scale_a * scale_b).to(out_dtype)


def install() -> None:
    """Register the implementations for tensors of the CPU, once a process."""
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        _libraries.append(library)
        library.impl("_flash_attention_forward", flash_attention_forward, "CPU")
        library.impl("_convert_weight_to_int4pack", convert_weight_to_int4pack, "CPU")
        library.impl("_weight_int4pack_mm", weight_int4pack_mm, "CPU")


# What a capture refuses: a number of the device on the host, or a size that depends on one.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2"}


class _Reads(TorchDispatchMode):
    """Record of the memory that a call reads and did not make; that of a replay must be that of the capture."""

    def __init__(self, known: dict[int, Any] | None = None) -> None:
        super().__init__()
        # Storage by its address, so that no other gets the address.
        self.outside: dict[int, Any] = {} if known is None else known
        self._is_replay = known is not None
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._can_decompose():
            # Seen whole in inference mode.
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        assert func.name() not in WAITS, f"{func.name()} waits for the device"
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self._made and storage.data_ptr() not in self.outside:
                assert not self._is_replay, f"{func.name()} reads a tensor that the capture did not"
                self.outside[storage.data_ptr()] = storage
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage.data_ptr() not in self.outside:
                self._made[storage.data_ptr()] = storage
        return result


def _storages(tree: Any) -> list[Any]:
    """Return the memory of all tensors; of a pretended one, of the tensor that it stands for."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [getattr(tensor, "twin", tensor).untyped_storage() for tensor in tensors]


class EmulatedGraphs(GraphCapture):
    """Graphs that compute by the captured call itself, on the memory that it read when it was captured."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    @override
    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        self.num_captured += 1
        reads = _Reads()
        with reads:
            outputs = call()

        def replay(_lengths: list[int] | None = None) -> None:
            self.num_replayed += 1
            with _Reads(reads.outside):
                found = call()
            for output, result in zip(outputs, found, strict=True):
                output.copy_(result)

        return CapturedGraph(replay, outputs)


class EmulatedCUDA(CUDADevice):
    """CUDADevice on tensors of the CPU. Its attention takes float32 and the small heads and blocks of test models."""

    limits = FlashLimits(
        (torch.float16, torch.bfloat16, torch.float32), max_head_dim=1024, head_multiple=1, block_multiple=1
    )

    @property
    @override
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _claim(self) -> None:
        install()

    def _runtime(self) -> Any:
        raise AssertionError("there is no GPU here")

    # Triton compiles for a GPU.
    _has_triton = False

    def _check_capability(self, quantization: str, least: tuple[int, int]) -> None:
        """Have every product."""

    def _has_bfloat16(self) -> bool:
        return True

    @override
    def memory(self) -> DeviceMemory:
        return DeviceMemory(*host_memory())

    @override
    def graph_capture(self) -> GraphCapture:
        return EmulatedGraphs()

    @override
    def synchronize(self) -> None:
        pass

    @override
    def describe(self) -> str:
        return "cuda:0 (emulated)"
