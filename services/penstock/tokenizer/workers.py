"""Threads that encode and decode, each with its own tokenizer, in two lanes.

tokenizers works outside the interpreter lock, so threads are enough to keep the event loop free. Large texts have their
own lane: a small text never queues behind a 200 k-character prompt, it only shares the cores with it. Texts of a few
sentences are encoded on the event loop: handing them to a thread and back costs several times as much as encoding.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.common.errors import ResourceExhausted
from penstock.tokenizer.metrics import Lane, TokenizerMetrics
from penstock.tokenizer.tokenizer import TextTokenizer, Vocabulary

T = TypeVar("T")


class Workers:
    """Runs functions that need a tokenizer. Their number is limited: further ones are refused at once."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        metrics: TokenizerMetrics,
        *,
        small: int,
        large: int,
        large_bytes: int,
        max_queued: int,
        inline_bytes: int = 0,
    ) -> None:
        """Make the threads. `inline_bytes`: `encode` does not leave the event loop for requests up to this size."""
        self._inline = TextTokenizer(vocabulary) if inline_bytes else None
        self._inline_bytes = inline_bytes
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._large_bytes = large_bytes
        self._max_queued = max_queued
        self._local = threading.local()
        self._lanes: dict[Lane, ThreadPoolExecutor] = {
            "small": ThreadPoolExecutor(small, "tokenizer", self._enter_thread),
            "large": ThreadPoolExecutor(large, "tokenizer-large", self._enter_thread),
        }
        self._queued: dict[Lane, int] = {"small": 0, "large": 0}

    async def encode(self, size_bytes: int, work: Callable[[TextTokenizer], T]) -> T:
        """Return `work`'s result; work on few bytes is expected to be quick. Raises as `run`."""
        if self._inline is not None and size_bytes <= self._inline_bytes and size_bytes < self._large_bytes:
            return work(self._inline)
        return await self.run(size_bytes, work)

    async def run(self, size_bytes: int, work: Callable[[TextTokenizer], T]) -> T:
        """Return `work`'s result. Raises ResourceExhausted when too many wait or run, and the errors of `work`.

        Cancelling the caller removes waiting work from the queue; running work may end.
        """
        lane: Lane = "large" if size_bytes >= self._large_bytes else "small"
        if self._queued[lane] >= self._max_queued:
            raise ResourceExhausted("too many requests are waiting", reason="QUEUE_FULL", retry_after_seconds=0.1)
        arrived = time.perf_counter()

        def call() -> T:
            self._metrics.queue_seconds.observe(time.perf_counter() - arrived)
            return work(self._local.tokenizer)

        self._count(lane, 1)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], call)
        finally:
            self._count(lane, -1)

    def close(self) -> None:
        """Finish running work, drop waiting work."""
        for lane in self._lanes.values():
            lane.shutdown(wait=True, cancel_futures=True)

    def _enter_thread(self) -> None:
        self._local.tokenizer = TextTokenizer(self._vocabulary)

    def _count(self, lane: Lane, change: int) -> None:
        self._queued[lane] += change
        self._metrics.queue_depth[lane].set(self._queued[lane])
