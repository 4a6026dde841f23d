"""Conversion of Score and Embed: messages to plain data and results to messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.common.errors import Internal, InvalidArgument
from penstock.generation.core.request import ItemResult
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.score_embed_commands import EmbedCommand, ScoreCommand, ScoreItem
from penstock.generation.wire.convert import from_positions
from penstock.v1 import common_pb2, generation_pb2


def to_score(message: generation_pb2.ScoreRequest, limits: RequestLimits) -> ScoreCommand:
    """Return a ScoreRequest as plain data, unchecked except for the number of items. Raises InvalidArgument."""
    _bound("items", len(message.items), limits.max_score_items)
    return ScoreCommand(
        items=[ScoreItem(list(item.prompt_token_ids), list(item.continuation_token_ids)) for item in message.items],
        model=message.model,
        cache_salt=message.cache_salt,
        fair_share_key=message.fair_share_key,
        adapter=message.adapter,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def to_embed(message: generation_pb2.EmbedRequest, limits: RequestLimits) -> EmbedCommand:
    """Return an EmbedRequest as plain data, unchecked except for the number of inputs. Raises InvalidArgument."""
    _bound("inputs", len(message.inputs), limits.max_embed_inputs)
    return EmbedCommand(
        inputs=[list(entry.ids) for entry in message.inputs],
        model=message.model,
        cache_salt=message.cache_salt,
        fair_share_key=message.fair_share_key,
        adapter=message.adapter,
        normalize=message.normalize,
    )


def from_scores(results: Sequence[ItemResult]) -> generation_pb2.ScoreResponse:
    """Return one ScoreResult per item. Raises Internal when the model gave no numbers."""
    response = generation_pb2.ScoreResponse(usage=_usage(results))
    for result in results:
        chosen = [position.chosen for position in result.logprobs if position.chosen is not None]
        total = math.fsum(entry.logprob for entry in chosen)
        if math.isnan(total) or not chosen:
            raise _not_a_number()
        response.results.add(
            logprob=total,
            logprobs=from_positions(result.logprobs),
            is_greedy=all(entry.rank == 1 for entry in chosen),
        )
    return response


def from_embeddings(results: Sequence[ItemResult], *, normalize: bool) -> generation_pb2.EmbedResponse:
    """Return one Embedding per input, divided by its Euclidean norm when `normalize`. Raises Internal like
    `from_scores`."""
    response = generation_pb2.EmbedResponse(usage=_usage(results))
    for result in results:
        values = np.frombuffer(result.finished.embedding or b"", dtype="<f4")
        norm = float(np.linalg.norm(values.astype(np.float64)))
        if not values.size or not math.isfinite(norm):
            raise _not_a_number()
        # A vector of zeros has no direction and stays as it is.
        scaled = values / norm if normalize and norm > 0.0 else values
        response.embeddings.add(values=scaled.tolist())
    return response


def _bound(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgument(field, f"must have between 1 and {most} entries")


def _usage(results: Sequence[ItemResult]) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=sum(result.finished.prompt_tokens for result in results),
        cached_tokens=sum(result.finished.cached_tokens for result in results),
    )


def _not_a_number() -> Internal:
    return Internal("the model's output is not a number", reason="MODEL_OUTPUT_NAN")
