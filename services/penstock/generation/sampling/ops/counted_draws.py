"""Counter-based uniforms: the draw of (seed, position) is a pure function of the two, in any batch or process.

    mix(z)     = splitmix64's finaliser
    key        = mix(seed + GOLDEN)                       one stream per seed, so that near seeds share nothing
    u(seed, p) = (mix(key + GOLDEN * (p + 1)) >> 11) / 2**53

That is the stream TOKEN for drawing tokens. Every other use of a uniform has a stream of its own (`Stream`), with this
key in place of the sequence's:

    key(stream)        = mix(key - GOLDEN * stream)

Gumbel noise needs a uniform per token id, of a stream of its own for every position and slot:

    key(seed, p, slot) = mix(mix(key + GOLDEN * (p + 1)) + GOLDEN * (slot + 1))
    u(seed, p, slot, id) = (mix(key(seed, p, slot) + GOLDEN * (id + 1)) >> 11) / 2**53

All sums and products are modulo 2**64. `position` is the number of output tokens before the drawn one. The function
is written out, with known answers, in docs/guide/sampling.md: a client in any language can check a draw.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1
_ONE, _MANTISSA_SHIFT = np.uint64(1), np.uint64(11)


class Stream(enum.IntEnum):
    """Register of a sequence's streams: one name for each use of a uniform, so that no two uses draw the same number.

    A number is a promise, like that of a proto field: it is never changed or reused. Gumbel noise has a uniform per
    token id; these begin at TOKEN's word of a position (`token_stream`).
    """

    # The draw of a token.
    TOKEN = 0
    # The chance of XTC at a position.
    XTC = 1


def keys_of(keys_N: npt.NDArray[np.uint64], stream: Stream) -> npt.NDArray[np.uint64]:
    """Return the keys of the stream of that name, from those of the sequences (`stream_key`)."""
    if stream is Stream.TOKEN:
        return keys_N
    return _mix(keys_N - np.uint64(int(_GOLDEN) * stream % 2**64))


def stream_keys(seeds_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys of the streams of `seeds_N`; computed once per sequence."""
    return _mix(seeds_N + _GOLDEN)


def stream_key(seed: int) -> int:
    """Key of the stream of one seed: see `stream_keys`."""
    return _mix_one(seed + int(_GOLDEN))


def token_stream(key: int, position: int, slot: int) -> int:
    """Key of a stream with one uniform per token id, from a sequence's stream, a position and a slot (Gumbel top-k)."""
    return _mix_one(_mix_one(key + int(_GOLDEN) * (position + 1)) + int(_GOLDEN) * (slot + 1))


def uniforms(keys_N: npt.NDArray[np.uint64], positions_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One uniform of 53 bits in [0, 1) per row, from `stream_keys` and the rows' positions."""
    bits_N = _mix(keys_N + _GOLDEN * (positions_N + _ONE))
    return (bits_N >> _MANTISSA_SHIFT).astype(np.float64) * 2.0**-53


def _mix_one(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * int(_MIX_1)) & _MASK
    z = ((z ^ (z >> 27)) * int(_MIX_2)) & _MASK
    return z ^ (z >> 31)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> _SHIFT_1)) * _MIX_1
    z = (z ^ (z >> _SHIFT_2)) * _MIX_2
    return z ^ (z >> _SHIFT_3)


_BLOCK = 128


def draw_from_candidates(
    weights_RC: torch.Tensor, ids_RC: torch.Tensor, uniforms_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (R) in the candidates, drawn with probability proportional to `weights_RC` (fp64, 0 = dropped), and a bool
    for each row (R, 1): False if its weights do not sum to a number; the place is then meaningless.
    """
    order_RC = ids_RC.argsort(dim=-1)
    cumulative_RC = weights_RC.gather(1, order_RC).cumsum(-1)
    places_R1 = _invert(cumulative_RC, _targets(cumulative_RC, uniforms_R))
    return order_RC.gather(1, places_R1)[:, 0], _are_numbers(cumulative_RC)


def draw_from_vocabulary(weights_RV: torch.Tensor, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (R), drawn with probability proportional to `weights_RV` (fp32, 0 = dropped), and for each row a bool
    as `draw_from_candidates` has it.

    It draws on two levels, first the block of ids, then the id: only one block per row is summed token by token.
    """
    vocab_size = weights_RV.shape[1]
    whole = vocab_size // _BLOCK
    sums_RB = torch.unflatten(weights_RV[:, : whole * _BLOCK], 1, (whole, _BLOCK)).sum(-1)
    tail_R1 = weights_RV[:, whole * _BLOCK :].sum(-1, keepdim=True)
    cumulative_RB = torch.cat([sums_RB, tail_R1], dim=1).cumsum(-1, dtype=torch.float64)
    targets_R1 = _targets(cumulative_RB, uniforms_R)
    blocks_R1 = _invert(cumulative_RB, targets_R1)
    before_R1 = torch.where(blocks_R1 > 0, cumulative_RB.gather(1, (blocks_R1 - 1).clamp_(min=0)), 0.0)
    ids_RW = blocks_R1 * _BLOCK + torch.arange(_BLOCK, device=weights_RV.device)
    weights_RW = weights_RV.gather(1, ids_RW.clamp(max=vocab_size - 1)).masked_fill_(ids_RW >= vocab_size, 0.0)
    cumulative_RW = before_R1 + weights_RW.cumsum(-1, dtype=torch.float64)
    return ids_RW.gather(1, _invert(cumulative_RW, targets_R1))[:, 0], _are_numbers(cumulative_RB)


def _are_numbers(cumulative_RC: torch.Tensor) -> torch.Tensor:
    """Return (R, 1): True for a row with a total. A NaN among the scores leaves a NaN, or no weight at all where it was
    compared with something before."""
    totals_R1 = cumulative_RC[:, -1:]
    return (totals_R1 > 0) & (totals_R1 < torch.inf)


def _targets(cumulative_RC: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    return uniforms_R[:, None] * cumulative_RC[:, -1:]


def _invert(cumulative_RC: torch.Tensor, targets_R1: torch.Tensor) -> torch.Tensor:
    """First place (R, 1) with a cumulative weight above the target: never one of weight 0.

    If rounding leaves the target at or above the last sum, it is the last place with a weight.
    """
    places_R1 = (cumulative_RC <= targets_R1).sum(-1, keepdim=True)
    return torch.minimum(places_R1, (cumulative_RC < cumulative_RC[:, -1:]).sum(-1, keepdim=True))
