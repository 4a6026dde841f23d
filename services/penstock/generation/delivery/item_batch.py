"""Requests that are answered together: the items of one Score or Embed call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.common.errors import Cancelled, InvalidArgument, PenstockError
from penstock.generation.core.request import FinishedOutput, ItemResult, PositionLogprobs, Request, RequestOutput
from penstock.generation.delivery.hub import OutputStream


class Hub(Protocol):
    """The part of OutputHub that is used here."""

    def attach(self, stream: OutputStream) -> None:
        """Register a stream."""

    def detach(self, stream: OutputStream) -> None:
        """Forget a stream. Its live requests are aborted."""

    def submit(self, request: Request, stream: OutputStream) -> None:
        """Hand a request to the engine. Raises a PenstockError when it cannot be taken."""


class ItemBatch:
    """OutputStream of its items, used from the event loop.

    At most `window` items are in the engine at a time, so that one call neither fills the queue nor delays later
    requests. They are batched with all other requests. The first failed item fails the call.
    """

    is_session = False
    takes_parts = False

    def __init__(
        self, hub: Hub, requests: Sequence[Request], field: str, window: int, after: Mapping[int, Sequence[int]]
    ) -> None:
        """`field` names the items in errors. `after`: item -> items that wait for its end."""
        self._hub = hub
        self._requests = requests
        self._field = field
        self._window = window
        self._after = after
        waiting = {index for group in after.values() for index in group}
        self._ready = deque(index for index in range(len(requests)) if index not in waiting)
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._in_flight = 0
        self._logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}
        self._results: dict[int, ItemResult] = {}
        self._done: asyncio.Future[list[ItemResult]] = asyncio.get_running_loop().create_future()

    async def run(self) -> list[ItemResult]:
        """Return the results in the order of the requests. Raises the first error of an item; all items then end."""
        self._hub.attach(self)
        try:
            self._submit_ready()
            return await self._done
        finally:
            self._hub.detach(self)

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Take one engine step's outputs, and submit items that may follow."""
        for output in outputs:
            index = self._index[output.request.request_id]
            if output.started is not None:
                self._logprobs[index] = output.started.prompt_logprobs
            if output.finished is not None:
                self._in_flight -= 1
                self._finish(index, output.finished)
        self._submit_ready()
        return True

    def fail(self, request: Request, error: PenstockError) -> None:
        """End the call with `error`: the engine has failed."""
        self._end(error)

    def half_close(self) -> None:
        """Do nothing: the stream ends with its items."""

    def beat(self, step: int) -> None:
        """Do nothing: only sessions have heartbeats."""

    def _finish(self, index: int, finished: FinishedOutput) -> None:
        if finished.error is not None:
            self._end(finished.error)
            return
        logprobs = self._logprobs.pop(index, ())
        if not logprobs and finished.embedding is None:
            self._end(Cancelled("the operator aborted the request", reason="ABORTED"))
            return
        self._results[index] = ItemResult(logprobs, finished)
        self._ready.extend(self._after.get(index, ()))
        if len(self._results) == len(self._requests) and not self._done.done():
            self._done.set_result([self._results[index] for index in range(len(self._requests))])

    def _submit_ready(self) -> None:
        while self._ready and self._in_flight < self._window and not self._done.done():
            index = self._ready.popleft()
            try:
                self._hub.submit(self._requests[index], self)
            except InvalidArgument as error:
                self._end(InvalidArgument(f"{self._field}[{index}]", error.description, reason=error.reason))
            except PenstockError as error:
                self._end(error)
            else:
                self._in_flight += 1

    def _end(self, error: PenstockError) -> None:
        if not self._done.done():
            self._done.set_exception(error)
