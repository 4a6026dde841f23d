"""The green lists of the watermark, as transformers' WatermarkLogitsProcessor makes them on CPU.

A list is the head of the permutation of the vocabulary that torch's CPU generator gives for a seed; the seed comes from
the tokens before. Source: Kirchenbauer et al., "A Watermark for Large Language Models", ICML 2023; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.ops.seeded_generator import seeded_generator

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.decoding_mode import WatermarkOptions

# (vocabulary, ids of a list, seeds, ids) -> answers: see `in_head`.
HeadSearch = Callable[[int, int, "Seq[int]", "Seq[int]"], list[bool]]

_TABLE_SIZE = 1_000_003
_MASK_64 = (1 << 64) - 1
SELF_HASH = "selfhash"
# Answers by (vocabulary, ids of a list, seed, id); emptied when it is full.
_MOST_ANSWERS = 1 << 16
_answers: dict[tuple[int, int, int, int], bool] = {}


def num_green(vocab_size: int, options: WatermarkOptions) -> int:
    """Number of tokens in a green list."""
    return int(vocab_size * options.greenlist_ratio)


def green_bits(vocab_size: int, options: WatermarkOptions, context: Seq[int]) -> npt.NDArray[np.uint8]:
    """Green tokens after `context` (for selfhash: with the drawn one as its last), one bit per id as numpy.packbits has
    them."""
    return _green_bits(vocab_size, num_green(vocab_size, options), _seed(options, context))


def is_green(vocab_size: int, options: WatermarkOptions, context: Seq[int], token_id: int) -> bool:
    """True when `token_id` is in the green list after `context`, for either scheme. Keeps nothing, so any thread may
    call it."""
    return _is_in_head(vocab_size, num_green(vocab_size, options), _seed(options, context), token_id)


def are_green(
    vocab_size: int, options: WatermarkOptions, pairs: Seq[tuple[Seq[int], int]], search: HeadSearch | None = None
) -> list[bool]:
    """Tell for each (context, id) whether the id is green under selfhash. `search` None: `in_head`.

    Nearly every token has a list of its own. So only the answers are cached, and only the one id is followed through
    the permutation.
    """
    count = num_green(vocab_size, options)
    asked = [(vocab_size, count, _seed(options, context), token_id) for context, token_id in pairs]
    unknown = [question for question in dict.fromkeys(asked) if question not in _answers]
    if unknown:
        seeds, ids = [question[2] for question in unknown], [question[3] for question in unknown]
        _answers.update(zip(unknown, (search or in_head)(vocab_size, count, seeds, ids), strict=True))
    answers = [_answers[question] for question in asked]
    if len(_answers) > _MOST_ANSWERS:
        _answers.clear()
    return answers


def in_head(vocab_size: int, count: int, seeds: Seq[int], ids: Seq[int]) -> list[bool]:
    """Tell for each seed and id whether the id is among the first `count` of torch.randperm(vocab_size) with that
    seed."""
    return [_is_in_head(vocab_size, count, seed, token_id) for seed, token_id in zip(seeds, ids, strict=True)]


def _seed(options: WatermarkOptions, context: Seq[int]) -> int:
    if options.seeding_scheme != SELF_HASH:
        return int(options.hashing_key * context[-1]) % _MASK_64
    table = _table(options.hashing_key)
    last = np.array(context[-options.context_width :], dtype=np.int64) % _TABLE_SIZE
    hashes = table[last].astype(np.int64) + 1
    # Wraps as torch's int64 does.
    key = np.array([options.hashing_key & ((1 << 64) - 1)], dtype=np.uint64).view(np.int64)
    return int((key * hashes * hashes[-1]).min()) % _MASK_64


def _is_in_head(vocab_size: int, count: int, seed: int, token_id: int) -> bool:
    """True when the id is in the head. randperm exchanges place i with one of [i, vocab_size), for i from 0 on; after
    `count` exchanges the head is final.

    Its numbers are those of MT19937 with the lower 32 bits of the seed. The places that the id is moved to are few.
    """
    steps = min(count, vocab_size - 1)
    step_S = np.arange(steps, dtype=np.uint32)
    numbers_S = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, size=steps, dtype=np.uint32)
    others_S = numbers_S % (np.uint32(vocab_size) - step_S) + step_S
    place, start = token_id, 0
    while True:
        if (others_S[start : place + 1] == place).any():
            return True
        if place >= steps:
            return place < count
        start, place = place + 1, int(others_S[place])


@lru_cache(maxsize=1024)
def _green_bits(vocab_size: int, count: int, seed: int) -> npt.NDArray[np.uint8]:
    """The green list of a seed as packed bits: 18 KiB for a vocabulary of 150 000."""
    is_green_V = np.zeros(vocab_size, dtype=np.bool_)
    is_green_V[_head(vocab_size, count, seed).numpy()] = True
    return np.packbits(is_green_V)


def _head(vocab_size: int, count: int, seed: int) -> torch.Tensor:
    return torch.randperm(vocab_size, generator=seeded_generator(seed))[:count]


@lru_cache(maxsize=4)
def _table(hashing_key: int) -> npt.NDArray[np.int32]:
    return torch.randperm(_TABLE_SIZE, generator=seeded_generator(hashing_key)).to(torch.int32).numpy()
