"""The minimum and maximum number of tokens that a request generates."""

from __future__ import annotations

from collections.abc import Callable

from penstock.common.errors import InvalidArgument
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults
from penstock.generation.options.table import RequestOptions


def resolve_lengths(
    request: GenerateOptions,
    defaults: ModelDefaults,
    room: int,
    pool_room: Callable[[int], int] | None,
    warnings: list[str],
) -> tuple[int, int]:
    """Return (max_new_tokens, min_new_tokens), and append to `warnings`.

    `room` is the number of output tokens that fit the context. `pool_room` takes a number of prompt tokens and returns
    the number of output tokens that fit the pool beside them; it is called only for an unset length. A limit on new
    tokens wins over a total length of the same origin. Raises InvalidArgument for a total length that the prompt fills.
    """
    prompt, asked, fallback = request.num_prompt_tokens, request.options, defaults.options
    maximum = _requested_maximum(asked, prompt, warnings)
    if maximum is None:
        open_room = room if pool_room is None else max(min(room, pool_room(prompt)), 1)
        maximum = _open_ended(fallback, prompt, open_room, warnings)
    if maximum > room:
        maximum = room
        warnings.append(f"the requested length exceeds the context: generating at most {room} tokens")
    if asked.min_new_tokens is not None and asked.min_length is not None:
        warnings.append("config.min_length has no effect: config.min_new_tokens is set and wins")
    minimum = _minimum(asked, prompt)
    if minimum is None:
        minimum = _minimum(fallback, prompt) or 0
    if minimum > maximum:
        warnings.append("the minimum length exceeds the maximum: generation stops at the maximum")
    return maximum, min(minimum, maximum)


def _open_ended(fallback: RequestOptions, prompt: int, room: int, warnings: list[str]) -> int:
    """Return the model's own limit, else the whole room. The caller set no limit, so none can be too large."""
    limit = _fallback_maximum(fallback, prompt)
    if limit is not None:
        return min(limit, room)
    warnings.append(f"config.max_new_tokens is unset: generating at most {room} tokens")
    return room


def _requested_maximum(asked: RequestOptions, prompt: int, warnings: list[str]) -> int | None:
    if asked.max_new_tokens is not None:
        if asked.max_length is not None:
            warnings.append("config.max_length has no effect: config.max_new_tokens is set and wins")
        return asked.max_new_tokens
    if asked.max_length is None:
        return None
    if prompt >= asked.max_length:
        raise InvalidArgument("config.max_length", "must exceed the number of prompt tokens")
    return asked.max_length - prompt


def _fallback_maximum(fallback: RequestOptions, prompt: int) -> int | None:
    """Return the model's own limit; None for a max_length that the prompt already fills: it does not apply to this
    request."""
    if fallback.max_new_tokens is not None:
        return fallback.max_new_tokens
    if fallback.max_length is not None and fallback.max_length > prompt:
        return fallback.max_length - prompt
    return None


def _minimum(asked: RequestOptions, prompt: int) -> int | None:
    if asked.min_new_tokens is not None:
        return asked.min_new_tokens
    return None if asked.min_length is None else max(asked.min_length - prompt, 0)
