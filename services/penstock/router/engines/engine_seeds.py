"""Seeds of the calls that make one request at another engine."""

from __future__ import annotations

from penstock.generation.core.sampling_params import SamplingParams, derive_seed

# vLLM's seeds are of 32 bits, with a sign.
_MASK = (1 << 31) - 1


def call_seed(params: SamplingParams, index: int, num_resumed: int) -> int:
    """Return the seed of returned sequence `index`: what goes on after `num_resumed` tokens of an earlier attempt draws
    other numbers than the beginning did."""
    return derive_seed(derive_seed(params.seed, index), num_resumed) & _MASK
