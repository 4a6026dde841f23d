"""The two kinds of stream that requests answer on: one request alone, and a session of many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

from penstock.common.errors import Internal, PenstockError, ResourceExhausted
from penstock.generation.core.request import Emission, FinishedOutput, Request, RequestOutput, StartedOutput
from penstock.generation.delivery.delta_sizes import MAX_DELTA_BYTES, num_bytes
from penstock.generation.delivery.deltas import Emitter
from penstock.generation.wire import convert

# Started and Finished, about.
_SMALL_EVENT_BYTES = 256


def _event_bytes(event: convert.Event) -> int:
    """What it takes of a message; tensors, and a prompt's log-probabilities, have theirs to themselves."""
    if isinstance(event, Emission):
        return MAX_DELTA_BYTES if event.tensors else num_bytes(event)
    is_large = isinstance(event, StartedOutput) and event.prompt_logprobs
    return MAX_DELTA_BYTES if is_large else _SMALL_EVENT_BYTES


class RequestStream:
    """Sink of `Generate`: ends with Finished and then its status, which is the request's own."""

    is_session = False

    def __init__(self, emitter: Emitter, bound: int) -> None:
        """At most `bound` messages wait for the reader."""
        self.outbox: Outbox[convert.GenerateResponse] = Outbox(bound)
        self._emitter = emitter

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Send the request's events; the last word closes the stream."""
        for output in outputs:
            for event in self._emitter.events(output):
                self.outbox.put(convert.to_response(output.request, self._emitter.model, event))
            if output.finished is not None:
                self.outbox.close(output.finished.error)
        return not self.outbox.overflowed

    def fail(self, request: Request, error: PenstockError) -> None:
        """End with `error`."""
        self.outbox.close(error)

    def half_close(self) -> None:
        """Nothing to do: it ends with its request."""


class SessionStream:
    """Sink of `Session`: one message per engine step. A request of it ends with `finished` or with `error`."""

    is_session = True

    def __init__(self, bound: int) -> None:
        """At most `bound` messages wait for the reader; past that the session ends RESOURCE_EXHAUSTED."""
        self.outbox: Outbox[convert.SessionResponse] = Outbox(bound)
        self._emitters: dict[str, Emitter] = {}
        # Requests on their way to the engine, by the work that takes them there.
        self._preparing: dict[asyncio.Task[None], Emitter] = {}
        self._half_closed = False
        # Of the message being made.
        self._num_bytes = 0

    def add(self, emitter: Emitter) -> None:
        """A request of this session was accepted."""
        self._emitters[emitter.request.request_id] = emitter

    def later(self, emitter: Emitter, work: Coroutine[Any, Any, None]) -> None:
        """`work` ends with the request added or refused; the session lives at least as long."""
        task = asyncio.create_task(work)
        self._preparing[task] = emitter
        task.add_done_callback(self._prepared)

    def give_up(self) -> None:
        """The session is over: nothing is prepared for it any more."""
        for task in self._preparing:
            task.cancel()

    def owns(self, request_id: str, attempt_epoch: int) -> bool:
        """Whether this try of a request is live or prepared in this session."""
        emitter = self._emitters.get(request_id)
        if emitter is not None:
            return emitter.request.attempt_epoch == attempt_epoch
        requests = (emitter.request for emitter in self._preparing.values())
        return any(one.request_id == request_id and one.attempt_epoch == attempt_epoch for one in requests)

    def half_close(self) -> None:
        """No more commands will come: the stream ends once its live requests have."""
        self._half_closed = True
        self._settle()

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """One message with every event, or more where they are more than 4 MiB hold."""
        message = convert.SessionResponse(step=step)
        tokens: list[tuple[int, Emission]] = []
        for output in outputs:
            emitter = self._emitters[output.request.request_id]
            delta = emitter.plain_token(output) if emitter.handle else None
            if delta is None:
                message = self._append(message, emitter, output)
            else:
                tokens.append((emitter.handle, delta))
        # A few bytes each: there is always room for those of every request that may run at once.
        convert.add_tokens(message, tokens)
        self._send(message)
        self._num_bytes = 0
        self._settle()
        return not self.outbox.overflowed

    def refuse(self, step: int, request_id: str, attempt_epoch: int, error: PenstockError) -> None:
        """A command could not be taken; the session goes on."""
        message = convert.SessionResponse(step=step)
        convert.add_error(message, request_id, attempt_epoch, error)
        self._send(message)

    def fail(self, request: Request, error: PenstockError) -> None:
        """The engine is gone: so is the session."""
        self._emitters.pop(request.request_id, None)
        self.outbox.close(error)

    def _send(self, message: convert.SessionResponse) -> None:
        if message.events:
            self.outbox.put(message)

    def _append(
        self, message: convert.SessionResponse, emitter: Emitter, output: RequestOutput
    ) -> convert.SessionResponse:
        """The message that what follows goes into: another one where `message` is full."""
        request, finished = emitter.request, output.finished
        error = finished.error if finished is not None else None
        for event in emitter.events(output):
            # A failed request ends with its error alone, which the reader takes for the last word.
            if error is None or not isinstance(event, FinishedOutput):
                message = self._with_room(message, event)
                convert.add_event(message, request, emitter.model, event)
        if error is not None:
            convert.add_error(message, request.request_id, request.attempt_epoch, error)
        if finished is not None:
            del self._emitters[request.request_id]
        return message

    def _with_room(self, message: convert.SessionResponse, event: convert.Event) -> convert.SessionResponse:
        """`message`, or a new one for an event that it has no room for."""
        more = _event_bytes(event)
        if message.events and self._num_bytes + more > MAX_DELTA_BYTES:
            self._send(message)
            message, self._num_bytes = convert.SessionResponse(step=message.step), 0
        self._num_bytes += more
        return message

    def _settle(self) -> None:
        if self._half_closed and not self._emitters and not self._preparing:
            self.outbox.close()

    def _prepared(self, task: asyncio.Task[None]) -> None:
        del self._preparing[task]
        if not task.cancelled() and task.exception() is not None:
            # Not this request's doing: whatever it is ends the session, as a reader's failure does.
            self.outbox.close(Internal("a request could not be prepared", reason="INTERNAL"))
        self._settle()


M = TypeVar("M")


class Outbox(Generic[M]):
    """Messages that wait for a stream's reader. Past `bound` the reader is cut off and nothing more is kept."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._messages: deque[M] = deque()
        self._wakeup = asyncio.Event()
        self._closed = False
        self._overflowed = False
        self._error: PenstockError | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    @property
    def overflowed(self) -> bool:
        """Whether the reader was cut off."""
        return self._overflowed

    def put(self, message: M) -> bool:
        """Queue a message; False when the stream is closed, also by this very message being one too many."""
        if self._closed:
            return False
        if len(self._messages) >= self._bound:
            self._messages.clear()
            self._overflowed = True
            self.close(
                ResourceExhausted(f"the reader is more than {self._bound} messages behind", reason="SLOW_READER")
            )
            return False
        self._messages.append(message)
        self._wakeup.set()
        return True

    def close(self, error: PenstockError | None = None) -> None:
        """End the stream after what is queued: with OK, or with `error`. The first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wakeup.set()

    async def __aiter__(self) -> AsyncIterator[M]:
        """Yield queued messages as they come. Raises the closing error after the last one."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._closed:
                break
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._error is not None:
            raise self._error
