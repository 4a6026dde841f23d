"""Score and Embed as plain data: the requests, their checks, and the engine's requests for them. No torch, no proto."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.common.request_context import new_request_id
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.request import Purpose, Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import ModelFacts
from penstock.generation.options.validate import check_adapter, check_model

# Bytes of an answer, out of the 4 MiB that clients receive by default; the rest is framing.
MAX_EMBEDDING_BYTES = (4 << 20) - (64 << 10)


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A continuation to score after a prompt."""

    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True, slots=True)
class ScoreCommand:
    """A ScoreRequest as plain data."""

    items: list[ScoreItem]
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    fair_share_key: str = ""
    # None and 0: the continuation's own tokens only.
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class EmbedCommand:
    """An EmbedRequest as plain data."""

    inputs: list[list[int]]
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    fair_share_key: str = ""
    normalize: bool = False


def check_score(command: ScoreCommand, model: ModelFacts, limits: RequestLimits) -> None:
    """Check the request. Raises NotFound (model, adapter) and InvalidArgument naming `items[i].…`."""
    check_model(command.model, model.name)
    check_adapter(command.adapter, model)
    _check_salt("cache_salt", command.cache_salt, limits)
    _check_salt("fair_share_key", command.fair_share_key, limits)
    alternatives = command.top_logprobs or 0
    if alternatives > limits.max_top_logprobs:
        raise InvalidArgument("top_logprobs", f"must be in [0, {limits.max_top_logprobs}]")
    _check_count("items", len(command.items), limits.max_score_items)
    entries = (alternatives + 1) * sum(len(item.continuation) for item in command.items)
    if entries > limits.max_prompt_logprob_entries:
        most = limits.max_prompt_logprob_entries
        raise InvalidArgument("items", f"continuation tokens times (top_logprobs + 1) must be at most {most} in all")
    for index, item in enumerate(command.items):
        _check_ids(f"items[{index}].prompt_token_ids", item.prompt, model)
        _check_ids(f"items[{index}].continuation_token_ids", item.continuation, model)
        # The last token is never computed.
        if len(item.prompt) + len(item.continuation) - 1 > model.max_context_tokens:
            raise InvalidArgument(
                f"items[{index}].prompt_token_ids",
                f"must, with the continuation, have at most {model.max_context_tokens + 1} tokens",
                reason="PROMPT_TOO_LONG",
            )


def check_embed(command: EmbedCommand, model: ModelFacts, limits: RequestLimits, hidden_size: int) -> None:
    """Check the request. Raises NotFound (model, adapter) and InvalidArgument naming `inputs[i]`."""
    check_model(command.model, model.name)
    check_adapter(command.adapter, model)
    _check_salt("cache_salt", command.cache_salt, limits)
    _check_salt("fair_share_key", command.fair_share_key, limits)
    _check_count("inputs", len(command.inputs), min(limits.max_embed_inputs, MAX_EMBEDDING_BYTES // (4 * hidden_size)))
    for index, ids in enumerate(command.inputs):
        _check_ids(f"inputs[{index}]", ids, model)
        if len(ids) > model.max_context_tokens:
            raise InvalidArgument(
                f"inputs[{index}]", f"must have at most {model.max_context_tokens} tokens", reason="PROMPT_TOO_LONG"
            )


def score_requests(
    command: ScoreCommand, arrival: float, deadline: float | None, adapter: Adapter | None = None
) -> list[Request]:
    """Return one request per item. Times are time.monotonic()."""
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=command.top_logprobs or 0)
    return [
        Request(
            request_id=new_request_id(),
            prompt_token_ids=item.prompt + item.continuation,
            params=params,
            arrival_time=arrival,
            cache_salt=command.cache_salt,
            fair_share_key=command.fair_share_key,
            deadline=deadline,
            adapter=adapter,
            purpose=Purpose.SCORE,
            first_needed_row=len(item.prompt) - 1,
        )
        for item in command.items
    ]


def embed_requests(
    command: EmbedCommand, arrival: float, deadline: float | None, adapter: Adapter | None = None
) -> list[Request]:
    """Return one request per input. Every row is summed, so none may come from the prefix cache."""
    params = SamplingParams(max_new_tokens=1)
    return [
        Request(
            request_id=new_request_id(),
            prompt_token_ids=ids,
            params=params,
            arrival_time=arrival,
            cache_salt=command.cache_salt,
            fair_share_key=command.fair_share_key,
            deadline=deadline,
            adapter=adapter,
            purpose=Purpose.EMBED,
            first_needed_row=0,
        )
        for ids in command.inputs
    ]


def followers(items: Iterable[ScoreItem]) -> dict[int, list[int]]:
    """Return first item with a prompt -> later items with the same prompt, which find its blocks in the cache if they
    run after it."""
    first: dict[tuple[int, ...], int] = {}
    after: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        leader = first.setdefault(tuple(item.prompt), index)
        if leader != index:
            after.setdefault(leader, []).append(index)
    return after


def _check_salt(field: str, salt: str, limits: RequestLimits) -> None:
    if len(salt) > limits.max_identifier_chars:
        raise InvalidArgument(field, f"must be at most {limits.max_identifier_chars} characters long")


def _check_count(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidArgument(field, f"must have between 1 and {most} entries")


def _check_ids(field: str, ids: Sequence[int], model: ModelFacts) -> None:
    if not ids:
        raise InvalidArgument(field, "must hold at least one token", reason="EMPTY_PROMPT")
    if max(ids) >= model.vocab_size:
        raise InvalidArgument(field, f"every id must be below {model.vocab_size}", reason="TOKEN_OUT_OF_VOCABULARY")
