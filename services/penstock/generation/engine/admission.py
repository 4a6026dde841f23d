"""Capacity checks: find a request that the engine could never run, before it is accepted."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.generation.core.request import Purpose

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.modes import ModeRegistry


def output_limit(config: EngineConfig, request: Request) -> int:
    """Most new tokens of a sequence: the request's limit, cut where its or its unconditional branch's context ends."""
    longest = max(len(request.prompt_token_ids), len(request.params.guidance.negative_prompt_ids))
    return min(request.params.max_new_tokens, config.max_context_tokens - longest)


def check_capacity(config: EngineConfig, modes: ModeRegistry, request: Request) -> None:
    """Refuse a request that would wait for ever. Its options, ids and lengths are checked already. Thread-safe.

    Raises InvalidArgument for a priority out of bounds or more sequences than run at once, and ResourceExhausted
    EXCEEDS_KV_POOL when an empty pool could not hold it to its longest end.
    """
    prompt_tokens, params = len(request.prompt_token_ids), request.params
    if request.purpose is not Purpose.GENERATE:
        # The whole input is computed, but not the last token of a scored text.
        computed = prompt_tokens - (request.purpose is Purpose.SCORE)
        _check_pool(config, config.blocks_needed(computed, 1, 1), "shorten it")
        return
    if abs(request.priority) > config.max_priority:
        raise InvalidArgument("priority", f"must be from -{config.max_priority} to {config.max_priority}")
    most = config.max_running_sequences
    if params.num_return_sequences > most:
        raise InvalidArgument("config.num_return_sequences", f"must be from 1 to {most}")
    if modes.most_sequences(params) > most:
        option = modes.of(params).width_option
        raise InvalidArgument(f"config.{option}", f"needs more than the {most} sequences that run at once")
    needed = modes.blocks_needed(config, params, prompt_tokens, output_limit(config, request))
    _check_pool(config, needed, "lower max_new_tokens, num_return_sequences or the prompt's length")


def most_output_tokens(config: EngineConfig, modes: ModeRegistry, params: SamplingParams, prompt_tokens: int) -> int:
    """Most new tokens per sequence that context and pool allow; an unset length means this. May be 0."""
    room = config.max_context_tokens - prompt_tokens
    # The need grows with the output: bisect for the longest that fits.
    return bisect_right(
        range(1, room + 1),
        config.num_blocks,
        key=lambda tokens: modes.blocks_needed(config, params, prompt_tokens, tokens),
    )


def _check_pool(config: EngineConfig, needed: int, advice: str) -> None:
    if needed > config.num_blocks:
        raise ResourceExhausted(
            f"the request may need {needed} KV blocks and the pool has {config.num_blocks}: {advice}",
            reason="EXCEEDS_KV_POOL",
            metadata={"needed_blocks": str(needed), "pool_blocks": str(config.num_blocks)},
        )
