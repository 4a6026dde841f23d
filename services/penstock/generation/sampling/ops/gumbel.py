"""Gumbel noise that depends only on (seed, position, slot, token id).

The k highest of score + Gumbel noise are k draws without replacement with probabilities softmax(score), in the order
drawn (Kool, van Hoof, Welling, "Stochastic Beams and Where to Find Them", ICML 2019). With the slot of its beam in
the noise, that holds for the tokens of several beams together, for any number added to all scores of a beam.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.counted_draws import uniforms

# Ids and the keys that they are ranked by, best first.
Ranked = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]

# Noise is made for every token, unless fewer than one in this many remain.
_FEW = 8
# At most this many keys are sorted as a whole.
_SORTED_WHOLE = 2048
# Half of the smallest step: the logarithm of 0 would be a key that never wins.
_SMALLEST = 2.0**-54
# Tokens at a time: the arrays stay in the processor's cache.
_CHUNK = 1 << 13


def gumbel_noise(stream: int, ids_E: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Noise of each token of `ids_E`, fp64; `stream` is `counted_draws.token_stream` of a sequence's key, a position
    and a slot."""
    streams = np.array([stream], dtype=np.uint64)
    noise_E = np.empty(len(ids_E))
    for first in range(0, len(ids_E), _CHUNK):
        part = noise_E[first : first + _CHUNK]
        np.maximum(uniforms(streams, ids_E[first : first + _CHUNK].astype(np.uint64)), _SMALLEST, out=part)
        for _ in range(2):
            np.log(part, out=part)
            np.negative(part, out=part)
    return noise_E


def top_noisy(scores_V: torch.Tensor, stream: int, count: int) -> Ranked:
    """The `count` highest finite scores of a row with the noise of a stream: (ids, scores with noise), best first."""
    given_V = scores_V.cpu().numpy()
    is_left_V = given_V > -np.inf
    num_left = int(np.count_nonzero(is_left_V))
    if not num_left:
        return np.empty(0, dtype=np.int64), np.empty(0)
    ids_E = np.flatnonzero(is_left_V) if num_left * _FEW < len(given_V) else np.arange(len(given_V))
    keys_E = given_V[ids_E] if len(ids_E) < len(given_V) else given_V
    keys_E = keys_E + gumbel_noise(stream, ids_E)
    if len(keys_E) <= _SORTED_WHOLE:
        order = np.argsort(-keys_E, kind="stable")
    else:
        # Two keys of 53 random bits are not equal, so the order of equals does not matter.
        only_row = torch.zeros(1, dtype=torch.int64)
        order = top_candidates(torch.from_numpy(keys_E)[None], only_row, max(count, 1)).ids_RC[0].numpy()
    order = order[: min(count, num_left)]
    return ids_E[order], keys_E[order]
