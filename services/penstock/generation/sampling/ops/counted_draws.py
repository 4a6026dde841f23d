"""Counter-based uniforms: the draw of (seed, position) is a pure function of the two, whatever the batch or process.

    mix(z)     = splitmix64's finaliser
    key        = mix(seed + GOLDEN)                       one stream per seed, so that near seeds share nothing
    u(seed, p) = (mix(key + GOLDEN * (p + 1)) >> 11) / 2**53

Gumbel noise needs a uniform per token id, of a stream of its own for every position and slot:

    key(seed, p, slot) = mix(mix(key + GOLDEN * (p + 1)) + GOLDEN * (slot + 1))
    u(seed, p, slot, id) = (mix(key(seed, p, slot) + GOLDEN * (id + 1)) >> 11) / 2**53

All sums and products are modulo 2**64. `position` is the number of output tokens before the drawn one. The function
is written out, with known answers, in docs/sampling.md: a client in any language can check a draw.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1
_ONE, _MANTISSA_SHIFT = np.uint64(1), np.uint64(11)


def stream_keys(seeds_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys of the streams of `seeds_N`; computed once per sequence."""
    return _mix(seeds_N + _GOLDEN)


def stream_key(seed: int) -> int:
    """As `stream_keys`, of one seed."""
    return _mix_one(seed + int(_GOLDEN))


def token_stream(key: int, position: int, slot: int) -> int:
    """Key of a stream with one uniform per token id: of a sequence's stream, a position and a slot (Gumbel top-k)."""
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
