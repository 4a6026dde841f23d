"""Check of a device's operators: each, at the shapes of a model, against the same in float32 on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionLayer, AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.base import Device
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear.base import INT4, INT8, LinearMethod, WholeRows
from penstock.generation.layers.linear.int4_search import GROUP

_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 128
_WIDTH = _HEADS * _HEAD_DIM
# Rows and keys of a prompt, a decoding sequence, and a chunk after a context; and of decoding sequences alone, one of
# them of several blocks on every device.
_MIXED, _DECODING = ([150, 1, 5], [150, 300, 200]), ([1, 1, 1], [150, 700, 1])
# Rows of linear layers: those of a step of one sequence may have a product of their own.
_ROWS = (7, 1)
# Results are rounded to the device's dtype, eight bits of it in bfloat16.
_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Finding:
    """One operation: the largest difference from the CPU's result, relative above 1, or its error."""

    name: str
    difference: float
    error: str = ""

    @property
    def is_right(self) -> bool:
        """True when it ran and gave the CPU's numbers up to rounding."""
        return not self.error and self.difference <= _TOLERANCE


def examine(device: Device, dtype: torch.dtype = torch.bfloat16) -> Iterator[Finding]:
    """Yield a finding for each operation of a model on `device`, which is started. An operation that raises is a
    finding, too."""
    for name, run in _operations(device, dtype):
        try:
            found, expected = run()
            device.synchronize()
            difference = ((found.cpu().float() - expected) / expected.abs().clamp_min(1)).abs().max()
            # A result that is no number is wrong by more than any other.
            yield Finding(name, float(difference.nan_to_num(float("inf"))))
        except (RuntimeError, ValueError, AttributeError) as error:
            yield Finding(name, float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _operations(device: Device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
    for rows in _ROWS:
        name = "linear layer" if rows > 1 else "linear layer, one row"
        yield name, lambda rows=rows: _linear(device, dtype, rows)  # type: ignore[misc]
        yield name.replace("linear", "gated"), lambda rows=rows: _gated(device, dtype, rows)  # type: ignore[misc]
        for form in (INT8, INT4):
            with contextlib.suppress(StartupError):
                method = device.linear_method(dtype, form)
                yield (
                    f"{name}, {form}",
                    lambda method=method, form=form, rows=rows: _whole(device, method, form, dtype, rows),  # type: ignore[misc]
                )
    kernels, reference = device.layer_kernels(dtype), LayerKernels()
    x, y, weight = (values.to(dtype) for values in (_numbers(7, _WIDTH), _numbers(7, _WIDTH, seed=1), _numbers(_WIDTH)))

    def beside(operation: str, *values: Tensor) -> tuple[Tensor, Tensor]:
        eps = (1e-5,) if "norm" in operation else ()
        found = getattr(kernels, operation)(*(value.to(device.torch_device, copy=True) for value in values), *eps)
        return found, getattr(reference, operation)(*(value.float() for value in values), *eps)

    yield "rms_norm", lambda: beside("rms_norm", x, weight)
    yield "add_rms_norm", lambda: beside("add_rms_norm", x, y, weight)
    yield "silu_mul", lambda: beside("silu_mul", x)
    for window in (None, 1, 100, 129):
        name = "attention" if window is None else f"attention, window {window}"
        yield name, lambda window=window: _attention(device, dtype, window, _MIXED)  # type: ignore[misc]
    yield "attention, decoding sequences", lambda: _attention(device, dtype, None, _DECODING)
    yield "attention, normed heads", lambda: _attention(device, dtype, None, _MIXED, has_norms=True)


def _linear(device: Device, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    weight = (_numbers(64, _WIDTH, seed=2) / 32).to(dtype)
    x = _numbers(rows, _WIDTH).to(dtype)
    linear = device.linear_method(dtype).linear(weight.to(device.torch_device), None)
    return linear(x.to(device.torch_device)), x.float() @ weight.float().T


def _gated(device: Device, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    weight = (_numbers(64, _WIDTH, seed=2) / 32).to(dtype)
    x, place = _numbers(rows, _WIDTH).to(dtype), device.torch_device
    gated = device.linear_method(dtype).gated(weight.to(place), None, device.layer_kernels(dtype))
    return gated(x.to(place)), LayerKernels().silu_mul(x.float() @ weight.float().T)


@dataclass(slots=True)
class _Whole:
    """A WholeWeight that is in memory."""

    shape: tuple[int, int]
    dtype: torch.dtype
    form: str
    rows: WholeRows

    def whole_pieces(self) -> Iterator[WholeRows]:
        yield self.rows


def _whole(device: Device, method: LinearMethod, form: str, dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the product with whole numbers, and the same in float32."""
    # Whole numbers too, and the largest of each row is 127: a product that quantises x finds these very ones.
    whole = (_numbers(num_rows, _WIDTH) * 30).round().clamp(-127, 127)
    whole[:, 0] = 127
    x = whole * 2.0**-5
    numbers = _numbers(64, _WIDTH, seed=2)
    if form == INT8:
        values, scale = (numbers * 30).round().clamp(-127, 127), 2.0**-10
        rows = WholeRows(values.to(torch.int8), torch.full((64,), scale))
    else:
        values, scale = (numbers * 3).round().clamp(-8, 7), 2.0**-7
        rows = WholeRows((values + 8).to(torch.uint8), torch.full((64, _WIDTH // GROUP), scale))
    place = device.torch_device
    weight = _Whole((64, _WIDTH), dtype, form, WholeRows(rows.values.to(place), rows.scale.to(place)))
    return method.whole(weight, None)(x.to(place, dtype)), x @ (values * scale).T


def _attention(
    device: Device,
    dtype: torch.dtype,
    window: int | None,
    lens: tuple[list[int], list[int]],
    *,
    has_norms: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norms of heads, rotary embedding, KV write and attention of a step with these rows and keys of each sequence,
    over a pool of random keys and values."""
    size = device.block_size(None)
    query_lens, kv_lens = lens
    tables = torch.zeros(len(kv_lens), -(-max(kv_lens) // size), dtype=torch.int32)
    blocks = iter(range(1, 1 + tables.numel()))
    for row, length in enumerate(kv_lens):
        for place in range(-(-length // size)):
            tables[row, place] = next(blocks)
    cpu = torch.device("cpu")
    qkv = (_numbers(sum(query_lens), (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM) / 2).to(dtype)
    angles = _numbers(len(qkv), 1, _HEAD_DIM // 2, seed=3)
    shape = (2, 1 + tables.numel(), size, _KV_HEADS, _HEAD_DIM)
    context = (_numbers(*shape, seed=4) / 2).to(dtype)

    def run(place: torch.device, kind: torch.dtype) -> Tensor:
        kv = KVCachePool(1, shape[1], size, _KV_HEADS, _HEAD_DIM, kind, place)
        kv.key(0).copy_(context[0])
        kv.value(0).copy_(context[1])
        metadata, _ = AttentionMetadata.build(query_lens, kv_lens, tables, size, place)
        turns = [part.to(dtype).to(place, kind) for part in (angles.cos(), angles.sin())]
        attention = SDPAAttention() if kind is torch.float32 else device.attention(kind, _HEAD_DIM)
        layer = AttentionLayer(_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM**-0.5, window=window)
        if has_norms:
            norms = [(1 + _numbers(_HEAD_DIM, seed=seed) / 8).to(dtype).to(place, kind) for seed in (5, 6)]
            layer = replace(layer, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
        rows = qkv.to(place, kind)
        return attention.forward_qkv(rows, turns[0], turns[1], layer, metadata, kv)

    return run(device.torch_device, dtype), run(cpu, torch.float32)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
