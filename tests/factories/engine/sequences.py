"""Sequences as the engine hands them to the runner, and their options with everything switched off."""

from __future__ import annotations

from typing import Any

from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence


def params(**options: Any) -> SamplingParams:
    """Make options that differ from "off" only where named."""
    return SamplingParams(**{"max_new_tokens": 1 << 20, **options})


def sequence(
    prompt: list[int], options: SamplingParams, *, seq_id: int = 0, output: list[int] | None = None
) -> Sequence:
    """Make a sequence with its prompt and output so far."""
    return Sequence(
        seq_id=seq_id,
        index=0,
        params=options,
        seed=options.seed,
        token_ids=[*prompt, *(output or [])],
        num_prompt_tokens=len(prompt),
        first_logprob_row=None if options.prompt_logprobs is None else 0,
    )
