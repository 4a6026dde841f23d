"""One answer as it is made, read by any thread without an event loop."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Self, TypeAlias

from penstock_client._types import Completion, Delta

from penstock.common.errors import Cancelled
from penstock.generation.core.request import Request
from penstock.generation.wire.convert import Event
from penstock.generator.answer_reader import AnswerReader
from penstock.generator.local_engine import LocalEngine
from penstock.generator.requests import LocalRequest

_Item: TypeAlias = "tuple[Request, Event] | None"


class TextStream(Iterator[Delta]):
    """Deltas of one request, as they come. Iterate it, or call `result()` for the whole answer.

    Leaving the `with` block, `close()` or garbage collection aborts a request that has not ended: its blocks are free
    before the next step. Events wait here unread, no more of them than the request has tokens.
    """

    def __init__(self, engine: LocalEngine, request: LocalRequest, reader: AnswerReader) -> None:
        """Begin the request."""
        self._reader = reader
        items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._items = items
        # Neither of the two calls holds this object, so that garbage collection can end the request.
        self._future: Future[None] = engine.begin(engine.run(request, lambda made, event: items.put((made, event))))
        self._future.add_done_callback(lambda _: items.put(None))
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """Return the next delta, once it is there. Raises what the request ends with."""
        try:
            while (item := self._items.get()) is not None:
                delta = self._reader.read(*item)
                if delta is not None:
                    return delta
        except BaseException:
            self.close()
            raise
        # So that another call ends, too.
        self._items.put(None)
        try:
            self._future.result()
        except CancelledError:
            if not self._is_closed:
                raise Cancelled("the request was cancelled", reason="ABORTED") from None
        raise StopIteration

    def result(self) -> Completion:
        """Read to the end and return the whole answer. Raises what the request ends with."""
        for _ in self:
            pass
        if self._is_closed and not self._reader.is_over:
            raise Cancelled("the stream was closed before its end", reason="ABORTED")
        return self._reader.completion()

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._is_closed = True
        self._future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        future: Future[None] | None = getattr(self, "_future", None)
        if future is not None:
            future.cancel()
