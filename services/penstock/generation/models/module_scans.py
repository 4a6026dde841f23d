"""Scans of recurrent modules over prompts, as a CPU computes them quickly.

Modules of transformers go through a prompt by a function of their file: in chunks, padded to whole ones, with work by
the square of a chunk's length (Mamba-2, delta rules), or row by row (Mamba's first version). Chunks of 256 rows are for
GPUs. Within a step chunks are short here, and the row-by-row scan keeps each row's states together in memory. Outside
of a step the modules are as they were, so that both can be compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.generation.attention.transformers_interface import step_of_thread

_Scan = Callable[..., Any]
# Parameter by which a scan has chunks, and the name of the one that goes row by row.
_CHUNKS, _BY_ROW = "chunk_size", "mamba_selective_scan"
# Most rows of a chunk. States between chunks cost by the square of their number: they are fewer in long prompts.
_MOST, _MOST_OF_LONG, _LONG = 32, 64, 1024
# Numbers of the states of rows that are computed together: they stay in the caches, and in memory that torch has.
_TOGETHER = 1 << 17


def shorten_scans(causal: nn.Module) -> None:
    """Let the recurrent modules of a model on a CPU scan as told above."""
    for module in causal.modules():
        method = inspect.unwrap(type(module).forward)
        if isinstance(method, FunctionType):
            scans = {name: ours for name in method.__code__.co_names if (ours := _scan(method, name)) is not None}
            if scans:
                # The function of the class, with other functions of its file. The file itself is transformers'.
                module.forward = MethodType(_with_globals(method, scans), module)


def _scan(method: FunctionType, name: str) -> _Scan | None:
    """Return our scan in the place of a function that a module calls; None: it is no scan."""
    own = method.__globals__.get(name)
    if not inspect.isfunction(own):
        return None
    if name == _BY_ROW:
        return _switched(own, selective_scan)
    # Other files have functions with such a parameter, too (transformers' apply_chunking_to_forward).
    is_scan = own.__module__ == method.__module__ and _CHUNKS in inspect.signature(own).parameters
    return _switched(own, _shortened(own)) if is_scan else None


def _with_globals(function: FunctionType, changes: dict[str, _Scan]) -> FunctionType:
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **changes},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _switched(own: _Scan, ours: _Scan) -> _Scan:
    def scan(*arguments: Any, **named: Any) -> Any:
        return (own if step_of_thread() is None else ours)(*arguments, **named)

    return scan


def _shortened(own: _Scan) -> _Scan:
    known = inspect.signature(own)
    usual = known.parameters[_CHUNKS].default

    def scan(*arguments: Any, **named: Any) -> Any:
        given = known.bind(*arguments, **named)
        # (B, rows, heads, width).
        rows = given.args[0].shape[1]
        given.arguments[_CHUNKS] = chunk_length(rows, given.arguments.get(_CHUNKS, usual))
        return own(*given.args, **given.kwargs)

    return scan


def chunk_length(rows: int, own: int) -> int:
    """Return the number of rows of a chunk for `rows` rows, where the module's `own` is no shorter."""
    whole = 1 << (rows - 1).bit_length()
    return min(own, whole, _MOST if rows <= _LONG else _MOST_OF_LONG)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Return (B, width, rows), and the last state (B, width, states) where it is asked for: Mamba's scan from an empty
    state. Arguments as of transformers' function: hidden states and `dt` (B, width, rows), A (width, states), B and C
    (B, states, rows)."""
    batch, width, count = hidden_states.shape
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    # (rows, B, …): what a row reads lies together.
    dt_TBW = dt.float().permute(2, 0, 1)
    input_TBW = dt_TBW * hidden_states.float().permute(2, 0, 1)
    b_TBN, c_TBN = (x.float().permute(2, 0, 1) for x in (B, C))
    state = hidden_states.new_zeros((batch, width, A.shape[-1]), dtype=torch.float32)
    found, each = [], max(1, _TOGETHER // state.numel())
    for first in range(0, count, each):
        rows = slice(first, first + each)
        decay = torch.exp(dt_TBW[rows, :, :, None] * A.float())
        states = input_TBW[rows, :, :, None] * b_TBN[rows, :, None]
        for row in range(len(states)):
            state = states[row].addcmul_(decay[row], state)
        found.append((states @ c_TBN[rows, :, :, None]).squeeze(3))
    out = torch.cat(found).permute(1, 2, 0).to(hidden_states.dtype)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * functional.silu(z)
    # The last rows' memory is not kept for it.
    return (out, state.clone()) if return_last_state else out
