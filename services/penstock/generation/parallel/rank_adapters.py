"""LoRA adapters of a rank other than 0: a thread of their own takes them during the steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.generation.layers.lora import AdapterBatch, AdapterWeights, EmbeddingPart, LoraPart
from penstock.generation.parallel.leader_adapters import NONE
from penstock.generation.parallel.rank_messages import (
    FAILED,
    NO_MEMORY,
    READY,
    AdapterPartOrder,
    IncomingPart,
    MessageKind,
    Spans,
    adapter_of_part,
    decode_adapter,
    decode_forget,
)
from penstock.generation.weights.sharding import Shard, adapter_parts

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.models.decoder import CausalLM

_log = get_logger("penstock.generation")


@dataclass(slots=True)
class _Coming:
    """Incomplete adapter: this rank's parts of each site, and the embedding's."""

    number: int
    sites: dict[int, list[LoraPart]] = field(default_factory=dict)
    embedding: EmbeddingPart | None = None
    part: IncomingPart | None = None
    # Answer for an adapter that could not be taken; nothing of it is kept.
    failure: bytes | None = None


class RankAdapters:
    """Adapters of a rank other than 0, by their numbers.

    Threads: that of the steps calls `take` and `batch`; a thread of this object carries out the messages. Rank 0 sends
    one adapter at a time, and no step names it before the answer.
    """

    def __init__(self, model: CausalLM, whole: ModelConfig, shard: Shard, answer: Callable[[bytes], None]) -> None:
        """`model` is this rank's part of the model of `whole`; `answer` tells rank 0, once for each adapter."""
        self._model, self._whole, self._shard = model, whole, shard
        self._answer = answer
        self._messages: SimpleQueue[tuple[MessageKind, memoryview]] = SimpleQueue()
        self._coming: _Coming | None = None
        self._complete: dict[int, AdapterWeights] = {}
        # The last spans that were asked for, as bytes, and their batch.
        self._last: tuple[bytes, AdapterBatch] | None = None
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def take(self, kind: MessageKind, body: memoryview) -> None:
        """Queue a message about adapters."""
        if kind is MessageKind.FORGET:
            self._last = None
        self._messages.put((kind, body))

    def batch(self, spans: Spans) -> AdapterBatch | None:
        """Return the adapters of a call's rows; None: no row has one."""
        if spans is None:
            return None
        key = spans.tobytes()
        # Decode steps of the same sequences follow one another.
        if self._last is None or self._last[0] != key:
            weights = [None if number == NONE else self._complete[number] for number in spans[:, 0].tolist()]
            self._last = key, self._model.adapter_batch(weights, spans[:, 1].tolist())
        return self._last[1]

    def _run(self) -> None:
        # Rank 0 is gone where an answer cannot be sent: this process ends.
        with contextlib.suppress(OSError):
            while True:
                kind, body = self._messages.get()
                if kind is MessageKind.FORGET:
                    self._forget(decode_forget(body))
                elif kind is MessageKind.ADAPTER:
                    self._answer(self._completed(decode_adapter(body)))
                else:
                    self._receive(kind, body)
                # While this waits for the next one, it would keep the bytes.
                del body

    def _receive(self, kind: MessageKind, body: memoryview) -> None:
        """Keep shapes, or a piece, of the incoming adapter."""
        if kind is MessageKind.ADAPTER_PART:
            number = adapter_of_part(body)
            if self._coming is None or self._coming.number != number:
                # Anything before it was abandoned.
                self._coming = _Coming(number)
        coming = self._coming
        if coming is None or coming.failure is not None:
            return
        try:
            if kind is MessageKind.ADAPTER_PART:
                coming.part = IncomingPart(body, self._model.dtype)
            elif coming.part is not None and (part := coming.part.add(body)) is not None:
                coming.part = None
                self._add(coming, part)
        except Exception as error:
            self._coming = _Coming(coming.number, failure=_failure(error))

    def _add(self, coming: _Coming, part: AdapterPartOrder) -> None:
        """Keep this rank's part of two matrices."""
        device = self._model.device
        a, b = part.a.to(device), part.b.to(device)
        if part.site is None:
            coming.embedding = EmbeddingPart(a, b, part.scale)
            return
        own = adapter_parts(part.site, (LoraPart(part.first, a, b, part.scale),), self._whole, self._shard)
        if own:
            coming.sites.setdefault(part.site, []).extend(own)

    def _completed(self, number: int) -> bytes:
        """Make the adapter after its last part has come; return the answer."""
        coming, self._coming = self._coming, None
        if coming is None or coming.number != number:
            coming = _Coming(number)
        if coming.failure is not None:
            return coming.failure
        try:
            self._complete[number] = self._model.adapter_weights(coming.sites, coming.embedding)
        except Exception as error:
            return _failure(error)
        del coming
        # Parts were whole for a moment.
        trim_heap()
        return READY

    def _forget(self, numbers: list[int]) -> None:
        """Drop adapters, complete or not."""
        for number in numbers:
            self._complete.pop(number, None)
        if self._coming is not None and self._coming.number in numbers:
            self._coming = None


def _failure(error: Exception) -> bytes:
    """Return the answer for an adapter that could not be taken, and log the cause."""
    _log.error("an adapter could not be taken", exc_info=error)
    # torch's errors of memory have no type of their own on every device.
    words = str(error).lower()
    is_memory = isinstance(error, MemoryError) or "out of memory" in words or "allocate memory" in words
    return NO_MEMORY if is_memory else FAILED
