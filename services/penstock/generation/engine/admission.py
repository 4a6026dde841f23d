"""What the engine refuses before it accepts anything: pure checks against its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.request import Request


def output_limit(config: EngineConfig, request: Request) -> int:
    """Most new tokens a sequence of `request` may have: its own limit, cut at the context's end."""
    return min(request.params.max_new_tokens, config.max_context_tokens - len(request.prompt_token_ids))


def check_request(config: EngineConfig, request: Request, *, has_stop_text: bool) -> None:
    """Raise what makes `request` impossible for this engine, however long it waited. Thread-safe.

    Raises InvalidArgument (prompt, priority, config.*, stop.*, resumed_token_ids), or ResourceExhausted EXCEEDS_KV_POOL
    when an empty pool could not hold it to its longest end.
    """
    params = request.params
    if not request.prompt_token_ids:
        raise InvalidArgument("prompt", "must not be empty")
    if len(request.prompt_token_ids) >= config.max_context_tokens:
        raise InvalidArgument("prompt", f"must be shorter than the context of {config.max_context_tokens} tokens")
    if abs(request.priority) > config.max_priority:
        raise InvalidArgument("priority", f"must be from -{config.max_priority} to {config.max_priority}")
    if params.max_new_tokens < 1:
        raise InvalidArgument("config.max_new_tokens", "must be at least 1")
    if not 1 <= params.num_return_sequences <= config.max_running_sequences:
        raise InvalidArgument("config.num_return_sequences", f"must be from 1 to {config.max_running_sequences}")
    if params.stop_strings and not has_stop_text:
        raise InvalidArgument("stop.stop_strings", "the model's tokenizer does not allow exact stop strings")
    if not all(params.stop_strings):
        raise InvalidArgument("stop.stop_strings", "must not hold an empty string")
    if not all(params.stop_token_ids):
        raise InvalidArgument("stop.stop_token_ids", "must not hold an empty sequence")
    _check_resumed(config, request)
    needed = config.blocks_needed(
        len(request.prompt_token_ids), output_limit(config, request), params.num_return_sequences
    )
    if needed > config.num_blocks:
        raise ResourceExhausted(
            f"the request may need {needed} KV blocks and the pool has {config.num_blocks}: "
            "lower max_new_tokens, num_return_sequences or the prompt's length",
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
