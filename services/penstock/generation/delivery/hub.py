"""Live requests of the process, and the streams that get their outputs. All of it runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.common.errors import Aborted, Cancelled, InvalidArgument, PenstockError, Unavailable
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.request import Request, RequestOutput
from penstock.generation.delivery.request_spans import end_finished, end_refused
from penstock.generation.metrics import GenerationMetrics

T = TypeVar("T")


class Submitter(Protocol):
    """Interface of the engine's loop to the hub. Both calls return at once and are made from the event loop."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises a PenstockError when it cannot be taken."""

    def abort(self, request_ids: list[str], error: PenstockError | None = None, /) -> None:
        """End requests before the next step, with `error` or as ABORTED. Unknown ids are ignored."""


class AdapterUsers(Protocol):
    """Interface of the adapters' store to the hub: used adapters stay in memory."""

    def acquire(self, adapter: Adapter) -> None:
        """Count one more request that uses `adapter`."""

    def release(self, adapter: Adapter) -> None:
        """Count one request less."""


class OutputStream(Protocol):
    """Stream that takes the outputs of its requests."""

    # True: its reader moves its requests to another backend when the stream breaks.
    is_session: bool
    # True: a request that is cut off ends well for its reader, with a part of its answer.
    takes_parts: bool

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Take one engine step's outputs of this stream's requests. False: its reader is cut off."""

    def fail(self, request: Request, error: PenstockError) -> None:
        """End `request` with `error`: the engine has failed and gives no more outputs."""

    def half_close(self) -> None:
        """End once no request of the stream is live."""

    def beat(self, step: int) -> None:
        """Tell a waiting reader that the engine makes progress, unless it got a message since the last beat."""


@dataclass(slots=True)
class RequestRecord:
    """One accepted request; `stream` is None once its stream is detached."""

    request: Request
    stream: OutputStream | None
    last_token_at: float | None = None


class OutputHub:
    """Hub that routes each step's outputs to their streams and knows the live requests."""

    def __init__(
        self,
        submitter: Submitter,
        metrics: GenerationMetrics,
        step: Callable[[], int],
        adapters: AdapterUsers | None = None,
    ) -> None:
        """`step` returns the number of engine steps so far. `adapters` None: no request has one."""
        self._submitter = submitter
        self._metrics = metrics
        self._step = step
        self._adapters = adapters
        self._live: dict[str, RequestRecord] = {}
        # Request id -> work for a request that is not submitted yet.
        self._preparing: dict[str, asyncio.Task[Any]] = {}
        # Errors of aborted ones among them: work that has just ended cannot be cancelled any more.
        self._aborted: dict[str, PenstockError] = {}
        self._watchers: set[asyncio.Event] = set()
        self._open: set[OutputStream] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        # True: the process is stopping, and no stream or watch waits for work any more.
        self.closing = False
        self._closed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        # The opposite.
        self._busy = asyncio.Event()

    @property
    def num_live(self) -> int:
        """Number of accepted requests that have not ended."""
        return len(self._live)

    @property
    def num_prepared(self) -> int:
        """Number of requests in preparation, not submitted yet."""
        return len(self._preparing)

    @property
    def embeds_bytes(self) -> int:
        """Bytes of the embeddings that accepted requests hold. O(live requests)."""
        held = (live.request.embeds for live in self._live.values())
        return sum(len(embeds.data) for embeds in held if embeds is not None)

    @property
    def step(self) -> int:
        """Number of engine steps so far."""
        return self._step()

    def submit(self, request: Request, stream: OutputStream) -> None:
        """Hand a request to the engine. Raises InvalidArgument for a live id, and the errors of `Submitter.submit`."""
        if self.is_taken(request.request_id):
            raise _taken()
        self._submitter.submit(request)
        self._live[request.request_id] = RequestRecord(request, stream)
        if request.adapter is not None and self._adapters is not None:
            self._adapters.acquire(request.adapter)
        self._set_busy()
        self.notify()

    async def prepare(self, request_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` for a request before it is submitted. Its id is reserved meanwhile, and `abort` ends the work.

        Raises the errors of `work`, Cancelled when it was aborted, and InvalidArgument for an id in use.
        """
        if self.is_taken(request_id):
            work.close()
            raise _taken()
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._preparing[request_id] = task
        self._set_busy()
        self.notify()
        try:
            made = await task
            if request_id in self._aborted:
                raise self._aborted[request_id]
            return made
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise self._aborted.get(request_id) or _aborted() from None
        finally:
            del self._preparing[request_id]
            self._aborted.pop(request_id, None)
            self._settle()

    def is_taken(self, request_id: str) -> bool:
        """True when a request of this id is live or prepared."""
        return request_id in self._live or request_id in self._preparing

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Abort the live or prepared ones of the requests, and return their ids. Their streams still get the end."""
        ids = list(request_ids)
        live = [request_id for request_id in ids if request_id in self._live]
        if live:
            self._submitter.abort(live)
        if not self._preparing:
            return live
        prepared = [request_id for request_id in ids if request_id in self._preparing]
        self._end_prepared(prepared, _aborted())
        return live + prepared

    def _end_prepared(self, request_ids: Iterable[str], error: PenstockError) -> None:
        for request_id in request_ids:
            self._preparing[request_id].cancel()
            self._aborted[request_id] = error

    def end_drained(self) -> int:
        """End all requests, since a drain's grace is over, and return their number.

        A reader that cannot use a part of an answer gets UNAVAILABLE DRAIN_GRACE_OVER. That does not count as a fault
        of this process: routers ask elsewhere. Others get the answer so far, as ABORTED.
        """
        error = Unavailable("the process drains and its grace is over", reason="DRAIN_GRACE_OVER")
        told = [name for name, one in self._live.items() if one.stream is not None and not one.stream.takes_parts]
        self._submitter.abort(told, error)
        self._submitter.abort([name for name in self._live if name not in set(told)])
        self._end_prepared(list(self._preparing), error)
        return len(self._live) + len(self._preparing)

    def end_streams_for_good(self) -> None:
        """End requests when the process stops now, except those of sessions: the session breaks and they move."""
        for live in self._live.values():
            if live.stream is None or live.stream.is_session:
                continue
            kind = Unavailable if live.last_token_at is None else Aborted
            error = kind("the process stops and its grace is over", reason="DRAIN_GRACE_OVER")
            self._submitter.abort([live.request.request_id], error)

    def live_ids(self) -> list[str]:
        """Return the ids of all live or prepared requests."""
        return [*self._live, *self._preparing]

    def attach(self, stream: OutputStream) -> None:
        """Register a stream."""
        self._open.add(stream)
        self._all_closed.clear()
        if self.closing:
            stream.half_close()

    def detach(self, stream: OutputStream) -> None:
        """Forget a stream that is over. Its live requests have no reader, and are aborted."""
        self._release(stream)
        self._open.discard(stream)
        if not self._open:
            self._all_closed.set()

    def close_streams(self) -> None:
        """End load watches, and streams once they have no live request: the process is stopping, or the model is
        unloaded."""
        self.closing = True
        self._closed.set()
        for stream in self._open:
            stream.half_close()
        self.notify()

    async def wait_streams_closed(self) -> None:
        """Return when no stream is open."""
        await self._all_closed.wait()

    def deliver(self, step: int, outputs: list[RequestOutput]) -> None:
        """Deliver one engine step's outputs, each stream's share in one call."""
        now = time.monotonic()
        shares: dict[OutputStream, list[RequestOutput]] = {}
        # Time of a sequence's previous token -> number of tokens now: usually one entry, observed once a step.
        earlier: Counter[float] = Counter()
        for output in outputs:
            live = self._live.get(output.request.request_id)
            if live is None or live.request is not output.request:
                continue
            self._observe(live, output, now, earlier)
            if output.finished is not None:
                del self._live[output.request.request_id]
                self._release_adapter(live.request)
            if live.stream is not None:
                shares.setdefault(live.stream, []).append(output)
        for token_at, count in earlier.items():
            self._metrics.next_tokens(now - token_at, count)
        for stream, share in shares.items():
            if not stream.deliver(step, share):
                self._metrics.slow_reader()
                self._release(stream)
        self._settle()

    def fail_all(self, error: PenstockError) -> None:
        """End every live request with `error`: the engine is broken."""
        stranded = list(self._live.values())
        self._live.clear()
        for live in stranded:
            self._metrics.request_failed()
            self._release_adapter(live.request)
            end_refused(live.request.span, error)
            if live.stream is not None:
                live.stream.fail(live.request, error)
        self._settle()

    async def wait_idle(self) -> None:
        """Return when no request is live or prepared."""
        await self._idle.wait()

    async def wait_busy(self) -> None:
        """Return when some request is live or prepared."""
        await self._busy.wait()

    def beat(self) -> None:
        """Tell every stream that the engine makes progress."""
        for stream in self._open:
            stream.beat(self.step)

    def watch(self) -> asyncio.Event:
        """Return an event that is set whenever the load may have changed. The watcher clears it; `unwatch` ends it."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    async def pause(self, seconds: float) -> None:
        """Wait for this time, or until the streams are closed: a watcher that waits keeps the hub alive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def unwatch(self, event: asyncio.Event) -> None:
        """Forget a watcher."""
        self._watchers.discard(event)

    def notify(self) -> None:
        """Wake the watchers: the load may have changed."""
        for event in self._watchers:
            event.set()

    def _release(self, stream: OutputStream) -> None:
        orphans = [live for live in self._live.values() if live.stream is stream]
        for live in orphans:
            live.stream = None
        self.abort([live.request.request_id for live in orphans])

    def _release_adapter(self, request: Request) -> None:
        if request.adapter is not None and self._adapters is not None:
            self._adapters.release(request.adapter)

    def _set_busy(self) -> None:
        self._idle.clear()
        self._busy.set()

    def _settle(self) -> None:
        if not self._live and not self._preparing:
            self._idle.set()
            self._busy.clear()
        self.notify()

    def _observe(self, live: RequestRecord, output: RequestOutput, now: float, earlier: Counter[float]) -> None:
        if output.deltas:
            if live.last_token_at is None:
                self._metrics.first_token(now - live.request.arrival_time)
            else:
                earlier[live.last_token_at] += len(output.deltas)
            live.last_token_at = now
        if output.finished is not None:
            self._metrics.request_finished(live.request, output.finished)
            end_finished(live.request, self._metrics.model_name, output.finished)


def _aborted() -> Cancelled:
    return Cancelled("aborted before it was submitted", reason="ABORTED")


def _taken() -> InvalidArgument:
    return InvalidArgument("request_id", "is already live", reason="DUPLICATE_REQUEST_ID")
