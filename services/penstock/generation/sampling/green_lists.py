"""The green lists of the watermark, as transformers' WatermarkLogitsProcessor makes them on CPU.

A list is the head of the permutation of the vocabulary that torch's CPU generator gives for a seed; the seed comes from
the tokens before. Source: Kirchenbauer et al., "A Watermark for Large Language Models", ICML 2023; transformers 5.23.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.sampling.modes import WatermarkOptions

_TABLE_SIZE = 1_000_003
_MASK_64 = (1 << 64) - 1
SELF_HASH = "selfhash"


def num_green(vocab_size: int, options: WatermarkOptions) -> int:
    """Tokens of a green list."""
    return int(vocab_size * options.greenlist_ratio)


def green_bits(vocab_size: int, options: WatermarkOptions, context: Seq[int]) -> npt.NDArray[np.uint8]:
    """Which tokens are green after `context` (for selfhash: with the drawn one as its last): one bit per id, as
    numpy.packbits has them."""
    return _green_bits(vocab_size, num_green(vocab_size, options), _seed(options, context))


def is_green(vocab_size: int, options: WatermarkOptions, context: Seq[int], token_id: int) -> bool:
    """Whether `token_id` is green after `context`."""
    if options.seeding_scheme == SELF_HASH:
        # A list of its own for nearly every token: only the answer is worth keeping.
        return _is_in_head(vocab_size, num_green(vocab_size, options), _seed(options, context), token_id)
    bits = green_bits(vocab_size, options, context)
    return token_id < vocab_size and bool(bits[token_id >> 3] >> (7 - (token_id & 7)) & 1)


def _seed(options: WatermarkOptions, context: Seq[int]) -> int:
    if options.seeding_scheme != SELF_HASH:
        return int(options.hashing_key * context[-1]) % _MASK_64
    table = _table(options.hashing_key)
    last = np.array(context[-options.context_width :], dtype=np.int64) % _TABLE_SIZE
    hashes = table[last].astype(np.int64) + 1
    # Wraps as torch's int64 does.
    key = np.array([options.hashing_key & ((1 << 64) - 1)], dtype=np.uint64).view(np.int64)
    return int((key * hashes * hashes[-1]).min()) % _MASK_64


@lru_cache(maxsize=1 << 16)
def _is_in_head(vocab_size: int, count: int, seed: int, token_id: int) -> bool:
    return bool((_head(vocab_size, count, seed) == token_id).any())


@lru_cache(maxsize=1024)
def _green_bits(vocab_size: int, count: int, seed: int) -> npt.NDArray[np.uint8]:
    """18 KiB each for a vocabulary of 150 000."""
    is_green_V = np.zeros(vocab_size, dtype=np.bool_)
    is_green_V[_head(vocab_size, count, seed).numpy()] = True
    return np.packbits(is_green_V)


def _head(vocab_size: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab_size, generator=generator)[:count]


@lru_cache(maxsize=4)
def _table(hashing_key: int) -> npt.NDArray[np.int32]:
    generator = torch.Generator().manual_seed(hashing_key)
    return torch.randperm(_TABLE_SIZE, generator=generator).to(torch.int32).numpy()
