"""Metrics of the tokenizer. Label values are the closed sets named here."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.common.histograms import StepHistogram
from penstock.common.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS

Operation = Literal["encode", "chat", "decode", "decode_stream"]
Lane = Literal["small", "large", "template"]
OPERATIONS: tuple[Operation, ...] = ("encode", "chat", "decode", "decode_stream")
LANES: tuple[Lane, ...] = ("small", "large", "template")
# Seconds. One message of DecodeStream is tens of microseconds.
DETOKENIZE_BUCKETS = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0,
)  # fmt: skip


class TokenizerMetrics:
    """Metrics on the process's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> StepHistogram:
            return StepHistogram(f"penstock_tokenizer_{name}", text, {}, buckets, registry)

        self.template_seconds = histogram("template_seconds", "Rendering one chat template.", LATENCY_BUCKETS)
        self.tokenize_seconds = histogram("tokenize_seconds", "Encoding one request.", LATENCY_BUCKETS)
        self.detokenize_seconds = histogram(
            "detokenize_seconds", "Decoding one Decode request or DecodeStream message.", DETOKENIZE_BUCKETS
        )
        self.queue_seconds = histogram("queue_seconds", "Waiting for a worker.", LATENCY_BUCKETS)
        self.request_tokens = histogram("request_tokens", "Tokens of one encoded request.", TOKEN_BUCKETS)
        self._tokens = Counter("penstock_tokenizer_tokens_total", "Ids in or out.", ["operation"], registry=registry)
        self._characters = Counter(
            "penstock_tokenizer_characters_total", "Characters in or out.", ["operation"], registry=registry
        )
        self._queue_depth = Gauge(
            "penstock_tokenizer_queue_depth", "Requests waiting for a worker.", ["lane"], registry=registry
        )
        self.streams = Gauge("penstock_tokenizer_streams", "Open DecodeStream calls.", registry=registry)
        self.sequences = Gauge("penstock_tokenizer_sequences", "Sequences being decoded.", registry=registry)
        self.template_processes_replaced = Counter(
            "penstock_tokenizer_template_processes_replaced_total",
            "Template processes that died or were killed for overrunning.",
            registry=registry,
        )
        # Label children are looked up once: DecodeStream counts in every engine step.
        self.tokens = {operation: self._tokens.labels(operation) for operation in OPERATIONS}
        self.characters = {operation: self._characters.labels(operation) for operation in OPERATIONS}
        self.queue_depth = {lane: self._queue_depth.labels(lane) for lane in LANES}
