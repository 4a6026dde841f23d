"""Live requests of the process, and who hears about them. All of it runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.common.errors import Aborted, Cancelled, InvalidArgument, PenstockError, Unavailable
from penstock.generation.core.request import Request, RequestOutput
from penstock.generation.metrics import GenerationMetrics

T = TypeVar("T")


class Submitter(Protocol):
    """What the hub needs of the engine's loop; both calls return at once and are made from the event loop."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises a PenstockError when it cannot be taken."""

    def abort(self, request_ids: list[str], error: PenstockError | None = None, /) -> None:
        """End requests on the next step, with `error` or as ABORTED; unknown ids are ignored."""


class Sink(Protocol):
    """A stream that wants the outputs of its requests."""

    # Its reader takes requests elsewhere when the stream breaks.
    is_session: bool

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Take what one engine step produced for this stream's requests; False when its reader is cut off."""

    def fail(self, request: Request, error: PenstockError) -> None:
        """The engine is gone and will say nothing more about `request`."""

    def half_close(self) -> None:
        """End once nothing of it is live."""


@dataclass(slots=True)
class LiveRequest:
    """One accepted request; `sink` is None once its stream went away."""

    request: Request
    sink: Sink | None
    last_token_at: float | None = None


class OutputHub:
    """Routes each step's outputs to the streams they belong to and keeps count of what is live."""

    def __init__(self, submitter: Submitter, metrics: GenerationMetrics, step: Callable[[], int]) -> None:
        """`step` tells the number of engine steps so far."""
        self._submitter = submitter
        self._metrics = metrics
        self._step = step
        self._live: dict[str, LiveRequest] = {}
        # Work for requests that are not submitted yet.
        self._preparing: dict[str, asyncio.Task[Any]] = {}
        self._watchers: set[asyncio.Event] = set()
        self._open: set[Sink] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        # The process is going: nothing waits for work any more.
        self.closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Accepted requests without their last word."""
        return len(self._live)

    @property
    def step(self) -> int:
        """Engine steps so far."""
        return self._step()

    def submit(self, request: Request, sink: Sink) -> None:
        """Hand a request to the engine. Raises InvalidArgument for a live id, or what the engine's queue says."""
        if self.is_taken(request.request_id):
            raise _taken()
        self._submitter.submit(request)
        self._live[request.request_id] = LiveRequest(request, sink)
        self._idle.clear()
        self.notify()

    async def prepare(self, request_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` for a request before it is submitted: the id is taken meanwhile, and `abort` ends the work.

        Raises what `work` raises, Cancelled when it was aborted, InvalidArgument for an id that is taken.
        """
        if self.is_taken(request_id):
            work.close()
            raise _taken()
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._preparing[request_id] = task
        self._idle.clear()
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise Cancelled("aborted before it was submitted", reason="ABORTED") from None
        finally:
            del self._preparing[request_id]
            self._settle()

    def is_taken(self, request_id: str) -> bool:
        """Whether a request of this id is live or prepared."""
        return request_id in self._live or request_id in self._preparing

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Abort those that are live or prepared and return their ids. Their streams still get the last word."""
        ids = list(request_ids)
        live = [request_id for request_id in ids if request_id in self._live]
        if live:
            self._submitter.abort(live)
        if not self._preparing:
            return live
        prepared = [request_id for request_id in ids if request_id in self._preparing]
        for request_id in prepared:
            self._preparing[request_id].cancel()
        return live + prepared

    def end_streams_for_good(self) -> None:
        """The process stops now. Sessions break and their requests move; who reads a stream of his own is told."""
        for live in self._live.values():
            if live.sink is None or live.sink.is_session:
                continue
            kind = Unavailable if live.last_token_at is None else Aborted
            error = kind("the process stops and its grace is over", reason="DRAIN_GRACE_OVER")
            self._submitter.abort([live.request.request_id], error)

    def live_ids(self) -> list[str]:
        """Ids of every request that is live or prepared."""
        return [*self._live, *self._preparing]

    def attach(self, sink: Sink) -> None:
        """A stream begins."""
        self._open.add(sink)
        self._all_closed.clear()
        if self.closing:
            sink.half_close()

    def detach(self, sink: Sink) -> None:
        """A stream is over: whatever of it is still live has nobody to go to, and is aborted."""
        self._release(sink)
        self._open.discard(sink)
        if not self._open:
            self._all_closed.set()

    def close_streams(self) -> None:
        """The process is going: end streams once they have nothing live, and load watches."""
        self.closing = True
        for sink in self._open:
            sink.half_close()
        self.notify()

    async def wait_streams_closed(self) -> None:
        """Return when no stream is open."""
        await self._all_closed.wait()

    def deliver(self, step: int, outputs: list[RequestOutput]) -> None:
        """One engine step's number and outputs, each stream's share in one call."""
        now = time.monotonic()
        shares: dict[Sink, list[RequestOutput]] = {}
        # When the step before these tokens was -> tokens: in steady state one entry, observed once a step.
        earlier: Counter[float] = Counter()
        for output in outputs:
            live = self._live.get(output.request.request_id)
            if live is None or live.request is not output.request:
                continue
            self._observe(live, output, now, earlier)
            if output.finished is not None:
                del self._live[output.request.request_id]
            if live.sink is not None:
                shares.setdefault(live.sink, []).append(output)
        for token_at, count in earlier.items():
            self._metrics.next_tokens(now - token_at, count)
        for sink, share in shares.items():
            if not sink.deliver(step, share):
                self._metrics.slow_reader()
                self._release(sink)
        self._settle()

    def fail_all(self, error: PenstockError) -> None:
        """The engine broke: every live request ends with `error`."""
        stranded = list(self._live.values())
        self._live.clear()
        for live in stranded:
            self._metrics.request_failed()
            if live.sink is not None:
                live.sink.fail(live.request, error)
        self._settle()

    async def wait_idle(self) -> None:
        """Return when nothing is live or prepared."""
        await self._idle.wait()

    def watch(self) -> asyncio.Event:
        """An event that is set whenever the load may have changed; the watcher clears it. Give it back to `unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Forget a watcher."""
        self._watchers.discard(event)

    def notify(self) -> None:
        """Wake the watchers: the load may have changed."""
        for event in self._watchers:
            event.set()

    def _release(self, sink: Sink) -> None:
        orphans = [live for live in self._live.values() if live.sink is sink]
        for live in orphans:
            live.sink = None
        self.abort([live.request.request_id for live in orphans])

    def _settle(self) -> None:
        if not self._live and not self._preparing:
            self._idle.set()
        self.notify()

    def _observe(self, live: LiveRequest, output: RequestOutput, now: float, earlier: Counter[float]) -> None:
        if output.deltas:
            if live.last_token_at is None:
                self._metrics.first_token(now - live.request.arrival_time)
            else:
                earlier[live.last_token_at] += len(output.deltas)
            live.last_token_at = now
        if output.finished is not None:
            self._metrics.request_finished(live.request, output.finished)


def _taken() -> InvalidArgument:
    return InvalidArgument("request_id", "is already live", reason="DUPLICATE_REQUEST_ID")
