"""How much of the pool and of the batch a request may take at most, by its mode: for admission, before it runs."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.engine.config import EngineConfig


def most_sequences(params: SamplingParams) -> int:
    """Most sequences of the request that are alive at once."""
    if params.beams is not None:
        return params.beams.num_beams
    if params.contrastive is not None:
        return params.contrastive.top_k
    return params.num_return_sequences * (2 if params.guidance is not None else 1)


def blocks_needed(config: EngineConfig, params: SamplingParams, prompt_tokens: int, output_tokens: int) -> int:
    """Most KV blocks that the request can ever hold."""
    if params.contrastive is not None:
        # Candidates share all but the block that each writes its one token to; the last token is computed, too.
        return config.blocks_needed(prompt_tokens, output_tokens + 1, 1) + params.contrastive.top_k - 1
    if params.beams is not None:
        needed = config.blocks_needed(prompt_tokens, output_tokens, params.beams.num_beams)
        # Each later group computes the prompt's last token again, into a block of its own.
        return needed + (params.beams.num_beam_groups - 1 if prompt_tokens % config.block_size == 0 else 0)
    count = params.num_return_sequences
    needed = config.blocks_needed(prompt_tokens, output_tokens, count)
    if params.guidance is not None:
        # Without a negative prompt a guide starts from one token.
        negative = max(len(params.guidance.negative_prompt_ids), 1)
        needed += config.blocks_needed(negative, output_tokens, count)
    return needed


def most_output_tokens(config: EngineConfig, params: SamplingParams, prompt_tokens: int) -> int:
    """Most new tokens per sequence that context and pool allow (what an unset length means); may be 0."""
    room = config.max_context_tokens - prompt_tokens
    # The need grows with the output: bisect for the longest that fits.
    return bisect_right(
        range(1, room + 1), config.num_blocks, key=lambda tokens: blocks_needed(config, params, prompt_tokens, tokens)
    )
