"""Metrics of keys. Their label is the key's in the file, a closed set: neither secrets nor users."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.router.metrics import PREFIX


class KeyMetrics:
    """Metrics of the keys of one router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counters(name: str, help: str, *labels: str) -> Callable[..., Counter]:
            return cache(Counter(PREFIX + name, help, labels, registry=registry).labels)

        self.requests = counters("key_requests_total", "Requests ended, by key and status.", "key", "status")
        self.refusals = counters("key_refusals_total", "Requests that a quota refused.", "key", "quota")
        self.tokens = counters("key_tokens_total", "Tokens of prompts and answers, by key.", "key", "kind")
        live = Gauge(
            PREFIX + "key_requests_live", "Requests that have come and not ended.", ("key",), registry=registry
        )
        self.live: Callable[..., Gauge] = cache(live.labels)
        self.ledger_waiting = Gauge(
            PREFIX + "key_ledger_waiting", "Reservations and ends that wait for the ledger.", registry=registry
        )
