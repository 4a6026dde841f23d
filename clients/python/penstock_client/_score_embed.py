"""Score, Embed and DetectWatermark: requests from plain values, and answers as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.v1 import text_pb2

from penstock_client._config_values import token_ids, watermarking_config
from penstock_client._state import logprob_entry
from penstock_client._types import Embeddings, Score, Scores, Usage, WatermarkEvidence
from penstock_client._wrong_values import expected, naming


def score_request(
    items: Iterable[tuple[str, str]], top_logprobs: int | None, model: str, adapter: str
) -> text_pb2.ScoreTextRequest:
    """Return a request for (prompt, continuation) pairs."""
    request = text_pb2.ScoreTextRequest(model=model, adapter=adapter)
    if top_logprobs is not None:
        request.top_logprobs = top_logprobs
    for prompt, continuation in items:
        request.items.add(prompt=prompt, continuation=continuation)
    return request


def embed_request(texts: str | Iterable[str], normalize: bool, model: str, adapter: str) -> text_pb2.EmbedTextRequest:
    """Return a request for texts; a string is one text."""
    return text_pb2.EmbedTextRequest(
        model=model, texts=[texts] if isinstance(texts, str) else texts, normalize=normalize, adapter=adapter
    )


def scores_of(response: text_pb2.ScoreTextResponse) -> Scores:
    """The answer as plain values."""
    scores = (
        Score(result.logprob, result.is_greedy, tuple(map(logprob_entry, result.logprobs)))
        for result in response.results
    )
    return Scores(tuple(scores), Usage.of(response.usage))


def embeddings_of(response: text_pb2.EmbedTextResponse) -> Embeddings:
    """The answer as plain values."""
    return Embeddings(tuple(tuple(embedding.values) for embedding in response.embeddings), Usage.of(response.usage))


def watermark_request(
    output: str | Sequence[int],
    watermark: Any,
    z_threshold: float | None,
    ignore_repeated_ngrams: bool,
    model: str,
) -> text_pb2.DetectWatermarkTextRequest:
    """Return a request for a text or its ids. Raises ValueError or TypeError naming `watermarking_config`."""
    request = text_pb2.DetectWatermarkTextRequest(model=model, ignore_repeated_ngrams=ignore_repeated_ngrams)
    if isinstance(output, str):
        request.text = output
    else:
        request.token_ids.CopyFrom(token_ids(output))
    if watermark is not None:
        with naming("watermarking_config", expected(request, "watermarking_config", "watermark"), watermark):
            request.watermarking_config.CopyFrom(watermarking_config(watermark))
    if z_threshold is not None:
        request.z_threshold = z_threshold
    return request


def evidence_of(response: text_pb2.DetectWatermarkTextResponse) -> WatermarkEvidence:
    """The answer as plain values."""
    evidence = response.evidence
    return WatermarkEvidence(
        num_tokens_scored=evidence.num_tokens_scored,
        num_green_tokens=evidence.num_green_tokens,
        green_fraction=evidence.green_fraction,
        z_score=evidence.z_score,
        p_value=evidence.p_value,
        prediction=evidence.prediction,
        token_ids=tuple(response.token_ids),
        green_positions=tuple(evidence.green_positions),
        first_scored_position=evidence.first_scored_position,
    )
