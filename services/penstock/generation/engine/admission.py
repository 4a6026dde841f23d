"""What the engine refuses before it accepts anything: pure checks against its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.generation.core.request import Purpose

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.modes import ModeRegistry


def output_limit(config: EngineConfig, request: Request) -> int:
    """Most new tokens of a sequence: the request's limit, cut where the context of it or of its guide ends."""
    longest = max(len(request.prompt_token_ids), len(request.params.guidance.negative_prompt_ids))
    return min(request.params.max_new_tokens, config.max_context_tokens - longest)


def check_request(config: EngineConfig, modes: ModeRegistry, request: Request, *, has_stop_text: bool) -> None:
    """Raise what makes `request` impossible for this engine, however long it waited. Thread-safe.

    Raises InvalidArgument (prompt, priority, config.*, stop.*, resumed_token_ids), or ResourceExhausted EXCEEDS_KV_POOL
    when an empty pool could not hold it to its longest end.
    """
    if request.purpose is not Purpose.GENERATE:
        _check_given(config, request)
        return
    params = request.params
    if not request.prompt_token_ids:
        raise InvalidArgument("prompt", "must not be empty")
    if len(request.prompt_token_ids) >= config.max_context_tokens:
        raise InvalidArgument("prompt", f"must be shorter than the context of {config.max_context_tokens} tokens")
    if len(params.guidance.negative_prompt_ids) >= config.max_context_tokens:
        raise InvalidArgument(
            "config.negative_prompt_ids", f"must be shorter than the context of {config.max_context_tokens} tokens"
        )
    if abs(request.priority) > config.max_priority:
        raise InvalidArgument("priority", f"must be from -{config.max_priority} to {config.max_priority}")
    if params.max_new_tokens < 1:
        raise InvalidArgument("config.max_new_tokens", "must be at least 1")
    if not 1 <= params.num_return_sequences <= config.max_running_sequences:
        raise InvalidArgument("config.num_return_sequences", f"must be from 1 to {config.max_running_sequences}")
    if modes.most_sequences(params) > config.max_running_sequences:
        raise InvalidArgument(
            f"config.{modes.of(params).width_option}",
            f"needs more than the {config.max_running_sequences} sequences that run at once",
        )
    if params.stop_strings and not has_stop_text:
        raise InvalidArgument("stop.stop_strings", "the model's tokenizer does not allow exact stop strings")
    if not all(params.stop_strings):
        raise InvalidArgument("stop.stop_strings", "must not hold an empty string")
    if not all(params.stop_token_ids):
        raise InvalidArgument("stop.stop_token_ids", "must not hold an empty sequence")
    _check_resumed(config, request)
    needed = modes.blocks_needed(config, params, len(request.prompt_token_ids), output_limit(config, request))
    _check_pool(config, needed, "lower max_new_tokens, num_return_sequences or the prompt's length")


def _check_given(config: EngineConfig, request: Request) -> None:
    """Scoring and embedding compute what is given, of a scored text all but the last token."""
    computed = len(request.prompt_token_ids) - (request.purpose is Purpose.SCORE)
    if computed < 1:
        raise InvalidArgument("prompt", "must not be empty")
    if computed > config.max_context_tokens:
        raise InvalidArgument("prompt", f"must fit the context of {config.max_context_tokens} tokens")
    _check_pool(config, config.blocks_needed(computed, 1, 1), "shorten it")


def _check_pool(config: EngineConfig, needed: int, advice: str) -> None:
    if needed > config.num_blocks:
        raise ResourceExhausted(
            f"the request may need {needed} KV blocks and the pool has {config.num_blocks}: {advice}",
            reason="EXCEEDS_KV_POOL",
            metadata={"needed_blocks": str(needed), "pool_blocks": str(config.num_blocks)},
        )


def _check_resumed(config: EngineConfig, request: Request) -> None:
    resumed = request.resumed_token_ids
    if not resumed:
        return
    if len(resumed) != request.params.num_return_sequences:
        raise InvalidArgument("resumed_token_ids", "must have one list per returned sequence, or none")
    if max(map(len, resumed)) > output_limit(config, request):
        raise InvalidArgument("resumed_token_ids", "must not be longer than the output may be")
