"""The text of /metrics: prometheus_client's own, made in several turns of the event loop."""

from __future__ import annotations

import asyncio

import pytest
from penstock.gateway.exposition import exposition
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

FORMATS = {
    "plain": "",
    "plain 1.0.0": "text/plain;version=1.0.0;escaping=allow-utf-8",
    "OpenMetrics": "application/openmetrics-text;version=1.0.0",
}


@pytest.mark.parametrize("families", [0, 1, 40])
@pytest.mark.parametrize("accept", FORMATS.values(), ids=FORMATS)
async def test_the_text_is_that_of_one_piece_and_takes_turns(accept: str, families: int) -> None:
    registry = CollectorRegistry()
    for number in range(families):
        Histogram(f"seconds_{number}", "Of a request.", ["route"], registry=registry).labels("/v1").observe(0.1)
    if families:
        Counter("requests", "All.", registry=registry).inc(3)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    found, content_type = await exposition(registry, accept)
    counting.cancel()
    encode, wanted_type = choose_encoder(accept)
    assert (found, content_type) == (encode(registry), wanted_type)
    assert turns >= families // 8
