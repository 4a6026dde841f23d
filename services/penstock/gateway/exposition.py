"""Text of /metrics, written in several turns of the event loop: streams beside it wait for one part, not for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

# Lines of samples in a turn: some 0.2 ms.
_SAMPLES_PER_TURN = 24
# OpenMetrics ends with this; the encoder writes it behind each part.
_END = b"# EOF\n"


class _SomeFamilies(Collector):
    """Some families of a registry, for an encoder."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


async def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return all metrics of `registry` in the format that an Accept header asks for, and its content type.

    Families are read one after the other, so two of them may be of different turns.
    """
    encode, content_type = choose_encoder(accept)
    # prometheus_client types it for a registry, and asks it for `collect` alone.
    write: Callable[[Collector], bytes] = encode
    parts: list[bytes] = []
    families: list[Metric] = []
    samples, has_end = 0, False

    def take() -> None:
        nonlocal samples, has_end
        part = write(_SomeFamilies(families))
        has_end = part.endswith(_END)
        parts.append(part.removesuffix(_END))
        families.clear()
        samples = 0

    for family in registry.collect():
        families.append(family)
        samples += len(family.samples)
        if samples >= _SAMPLES_PER_TURN:
            take()
            await asyncio.sleep(0)
    take()
    return b"".join(parts) + (_END if has_end else b""), content_type
