"""Checks of acceptance: find a request that the engine could never run, or not in time, before it is accepted."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from penstock.common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from penstock.common.pace import Demand
from penstock.generation.core.request import Purpose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.common.pace import Pace
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.mode_registry import ModeRegistry


def output_limit(config: EngineConfig, request: Request) -> int:
    """Most new tokens of a sequence: the request's limit, cut to its own and its unconditional branch's context."""
    longest = max(len(request.prompt_token_ids), len(request.params.guidance.negative_prompt_ids))
    return min(request.params.max_new_tokens, config.max_context_tokens - longest)


def demand_of(config: EngineConfig, request: Request, width: int) -> Demand:
    """Size of a request that computes at most `width` sequences at once."""
    prompt_tokens = len(request.prompt_token_ids)
    output = output_limit(config, request) if request.purpose is Purpose.GENERATE else 0
    resumed = max((len(ids) for ids in request.resumed_token_ids), default=0)
    return Demand(request.fair_share_key, prompt_tokens + resumed * width, max(output - resumed, 0), width)


def must_end_in_time(request: Request) -> bool:
    """True when a request must not begin if it would end after its deadline.

    Two kinds are begun all the same: a request that another backend began, since its caller has tokens of it, and an
    item of Score or Embed, since other items of its call may be computed already.
    """
    return not request.resumed_token_ids and request.purpose is Purpose.GENERATE


def check_deadline(
    config: EngineConfig,
    modes: ModeRegistry,
    request: Request,
    now: float,
    pace: Pace,
    coming: Mapping[str, float],
) -> float:
    """Refuse a request that would end after its deadline. Return its expected tokens. Thread-safe.

    `coming` are tokens, by tenant, of accepted requests that `pace` does not know yet. Raises ResourceExhausted
    OVERLOADED if `must_end_in_time`, and DeadlineExceeded.
    """
    demand = demand_of(config, request, modes.most_sequences(request.params))
    if request.deadline is not None:
        left = request.deadline - now
        if left <= 0:
            raise DeadlineExceeded("the deadline passed", reason="DEADLINE_EXCEEDED", metadata={"stage": "queue"})
        late = pace.seconds_late(demand, left, coming) if must_end_in_time(request) else 0.0
        if late > 0:
            raise ResourceExhausted(
                "the deadline would pass before the answer is complete: too much waits or runs",
                reason="OVERLOADED",
                retry_after_seconds=max(late, config.queue_full_retry_seconds),
            )
    return pace.tokens(demand)


def check_capacity(config: EngineConfig, modes: ModeRegistry, request: Request) -> None:
    """Refuse a request that would wait for ever. Its options, ids and lengths are checked already. Thread-safe.

    Raises InvalidArgument for a priority out of bounds or more sequences than run at once, and ResourceExhausted
    EXCEEDS_KV_POOL when an empty pool has no room for its longest answer.
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


def shareable(config: EngineConfig, request: Request, weights_version: int) -> tuple[list[int], str]:
    """Return the tokens of a prompt that surely reuse cached blocks, if these exist, and the blocks' salt.

    `weights_version`: of the weights that the request would begin on. One token is always computed, and so is every
    row that is needed. Nothing is sure for a model with states, which goes on from a snapshot that may be gone, nor for
    a window, which holds few blocks anyway.
    """
    if config.keeps_states or any(group.span for group in config.block_groups):
        return [], ""
    salt = request.block_salt_on(weights_version)
    limit, needed = len(request.prompt_token_ids) - 1, request.first_needed_row
    if request.params.prompt_logprobs is not None and request.purpose is not Purpose.SCORE:
        needed = 0
    return request.prompt_token_ids[: limit if needed is None else min(limit, needed)], salt


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
