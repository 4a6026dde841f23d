"""Score and Embed: requests made of plain values, and answers made into them."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.v1 import text_pb2

from penstock_client._state import logprob_entry
from penstock_client._types import Embeddings, Score, Scores


def score_request(items: Iterable[tuple[str, str]], top_logprobs: int | None, model: str) -> text_pb2.ScoreTextRequest:
    """A request for (prompt, continuation) pairs."""
    request = text_pb2.ScoreTextRequest(model=model)
    if top_logprobs is not None:
        request.top_logprobs = top_logprobs
    for prompt, continuation in items:
        request.items.add(prompt=prompt, continuation=continuation)
    return request


def embed_request(texts: str | Iterable[str], normalize: bool, model: str) -> text_pb2.EmbedTextRequest:
    """A request for texts; a string is one text."""
    return text_pb2.EmbedTextRequest(
        model=model, texts=[texts] if isinstance(texts, str) else texts, normalize=normalize
    )


def scores_of(response: text_pb2.ScoreTextResponse) -> Scores:
    """The answer as plain values."""
    scores = (
        Score(result.logprob, result.is_greedy, tuple(map(logprob_entry, result.logprobs)))
        for result in response.results
    )
    return Scores(tuple(scores), response.usage)


def embeddings_of(response: text_pb2.EmbedTextResponse) -> Embeddings:
    """The answer as plain values."""
    return Embeddings(tuple(tuple(embedding.values) for embedding in response.embeddings), response.usage)
