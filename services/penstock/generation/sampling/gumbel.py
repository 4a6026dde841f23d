"""Gumbel noise that depends on nothing but (seed, position, slot, token id).

The k highest of score + Gumbel noise are k draws without replacement with probabilities softmax(score), in the order
drawn (Kool, van Hoof, Welling, "Stochastic Beams and Where to Find Them", ICML 2019). With the slot of its beam in
the noise, that holds for the tokens of several beams taken together, whatever is added to all scores of a beam.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.generation.sampling.rng import token_stream, uniforms

# Half of the smallest step: the logarithm of 0 would be a key that never wins.
_SMALLEST = 2.0**-54
# Tokens at a time: what is worked on stays in the processor's cache.
_CHUNK = 1 << 13


def gumbel_noise(key: int, position: int, slot: int, ids_E: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Noise of each token of `ids_E`, fp64; `key` is the stream key of the sequence's seed."""
    stream = np.array([token_stream(key, position, slot)], dtype=np.uint64)
    noise_E = np.empty(len(ids_E))
    for first in range(0, len(ids_E), _CHUNK):
        part = noise_E[first : first + _CHUNK]
        np.maximum(uniforms(stream, ids_E[first : first + _CHUNK].astype(np.uint64)), _SMALLEST, out=part)
        for _ in range(2):
            np.log(part, out=part)
            np.negative(part, out=part)
    return noise_E
