"""The numbers of the SynthID watermark, as transformers' SynthIDTextWatermarkLogitsProcessor makes them on CPU.

A context is the last ngram_len - 1 output tokens, zeros before the first. Its hash, each token's and each key's make a
place in a table of coin flips: the g values, one per token and layer. Source: Dathathri et al., "Scalable watermarking
for identifying large language model outputs", Nature 2024; transformers 5.23.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.ops.seeded_generator import seeded_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.generation.core.decoding_mode import SynthIdOptions

# The linear congruential generator of newlib and musl, in 64 bits.
_FACTOR, _STEP = 6364136223846793005, 1
_MASK_64 = (1 << 64) - 1
_FIRST = 1


def context_hash(tokens: Iterable[int]) -> int:
    """Hash of a context, as the signed 64-bit number that torch has."""
    value = _FIRST
    for token_id in tokens:
        value = ((value + token_id) * _FACTOR + _STEP) & _MASK_64
    return value - (1 << 64) if value >> 63 else value


def g_values(
    options: SynthIdOptions, flips: torch.Tensor, hashed: int | torch.Tensor, ids_C: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield the g values (C; zeros and ones, fp32) of the tokens `ids_C` (int64), layer by layer.

    `flips` are `coin_flips` of the options; `hashed` is the hash of the context, one of all tokens or one of each (C).
    One layer at a time: all layers of a whole vocabulary would not fit the processor's cache together.
    """
    size = options.sampling_table_size
    # int64 wraps as torch's does in transformers.
    hashes_C = (ids_C + hashed).mul_(_FACTOR).add_(_STEP)
    for key in options.keys:
        places_C = (hashes_C + key).mul_(_FACTOR).add_(_STEP)
        # The remainder by a power of two is its lower bits, also of a negative number, and division takes long.
        places_C = places_C.bitwise_and_(size - 1) if size & (size - 1) == 0 else places_C.remainder_(size)
        yield flips[places_C].float()


def tournament(probs_C: torch.Tensor, layers: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the probabilities after all layers: in each, tokens with a 1 gain the probability that those with a 0
    lose."""
    for g_C in layers:
        mass = torch.dot(g_C, probs_C)
        probs_C = probs_C * g_C.add_(1.0).sub_(mass)
    return probs_C


def coin_flips(options: SynthIdOptions) -> torch.Tensor:
    """Return the table (uint8) of a request: a byte per entry, nine while it is made."""
    return _table(options.sampling_table_seed, options.sampling_table_size)


# Most requests have the same table. A request with another one keeps it: a large one takes milliseconds to make.
@lru_cache(maxsize=4)
def _table(seed: int, size: int) -> torch.Tensor:
    return torch.randint(low=0, high=2, size=(size,), generator=seeded_generator(seed)).to(torch.uint8)
