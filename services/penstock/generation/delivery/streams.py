"""Streams that carry outputs to callers: one request alone, and a session of many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from penstock.common.errors import Internal, PenstockError, ResourceExhausted
from penstock.generation.core.request import Emission, FinishedOutput, Request, RequestOutput, StartedOutput
from penstock.generation.delivery.delta_sizes import MAX_DELTA_BYTES, num_bytes
from penstock.generation.delivery.deltas import DeltaMaker
from penstock.generation.wire import convert

# Estimated bytes of Started and of Finished.
_SMALL_EVENT_BYTES = 256
# Steps that wait for a session's reader share a message up to this size.
_MOST_JOINED_BYTES = 64 << 10


def _event_bytes(event: convert.Event) -> int:
    """Return the event's share of a message. Tensors, and a prompt's log-probabilities, fill one alone."""
    if isinstance(event, Emission):
        return MAX_DELTA_BYTES if event.tensors else num_bytes(event)
    is_large = isinstance(event, StartedOutput) and event.prompt_logprobs
    return MAX_DELTA_BYTES if is_large else _SMALL_EVENT_BYTES


class RequestStream:
    """OutputStream of `Generate`: ends with Finished and then its status, which is the request's own."""

    is_session = False
    takes_parts = True

    def __init__(self, maker: DeltaMaker, bound: int) -> None:
        """At most `bound` messages wait for the reader."""
        self.buffer: MessageBuffer[convert.GenerateResponse] = MessageBuffer(bound)
        self._maker = maker

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Send the request's events. The last event closes the stream."""
        for output in outputs:
            for event in self._maker.events(output):
                self.buffer.put(convert.to_response(output.request, self._maker.model, event))
            if output.finished is not None:
                self.buffer.close(output.finished.error)
        return not self.buffer.overflowed

    def fail(self, request: Request, error: PenstockError) -> None:
        """End with `error`."""
        self.buffer.close(error)

    def half_close(self) -> None:
        """Do nothing: the stream ends with its request."""

    def beat(self, step: int) -> None:
        """Do nothing: only sessions have heartbeats."""


class LocalStream:
    """OutputStream of one request of a caller in this process: it hands events on as they are.

    It has no buffer and no bound: a request has no more events than tokens.
    """

    is_session = False
    takes_parts = True

    def __init__(self, maker: DeltaMaker, receive: Callable[[Request, convert.Event], None]) -> None:
        """`receive` is called on the event loop with each event, in order; it must not wait."""
        self._maker = maker
        self._receive = receive
        # Done after the last event; its exception is the request's.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Hand on the request's events."""
        for output in outputs:
            for event in self._maker.events(output):
                self._receive(output.request, event)
            if output.finished is not None:
                self._end(output.finished.error)
        return True

    def fail(self, request: Request, error: PenstockError) -> None:
        """End with `error`."""
        self._end(error)

    def half_close(self) -> None:
        """Do nothing: the stream ends with its request."""

    def beat(self, step: int) -> None:
        """Do nothing: only sessions have heartbeats."""

    def _end(self, error: PenstockError | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class SessionStream:
    """OutputStream of `Session`: one message per engine step, or per several that waited for the reader.

    A request of it ends with `finished` or with `error`.
    """

    is_session = True
    takes_parts = False

    def __init__(self, bound: int) -> None:
        """At most `bound` messages wait for the reader; beyond that the session ends RESOURCE_EXHAUSTED."""
        self.buffer: MessageBuffer[convert.SessionResponse] = MessageBuffer(bound, _join_waiting)
        self._makers: dict[str, DeltaMaker] = {}
        # Work that prepares a request for the engine -> the request's deltas.
        self._preparing: dict[asyncio.Task[None], DeltaMaker] = {}
        self._half_closed = False
        # Bytes of the message being made.
        self._num_bytes = 0
        # False: a message went out since the last beat.
        self._is_quiet = True

    def add(self, maker: DeltaMaker) -> None:
        """Register a request of this session that was accepted."""
        self._makers[maker.request.request_id] = maker

    def later(self, maker: DeltaMaker, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`; it ends with the request added or refused. The session lives at least as long."""
        task = asyncio.create_task(work)
        self._preparing[task] = maker
        task.add_done_callback(self._prepared)

    def give_up(self) -> None:
        """End all work for requests in preparation: the session is over."""
        for task in self._preparing:
            task.cancel()

    def owns(self, request_id: str, attempt_epoch: int) -> bool:
        """True when this attempt of a request is live or prepared in this session."""
        maker = self._makers.get(request_id)
        if maker is not None:
            return maker.request.attempt_epoch == attempt_epoch
        requests = (maker.request for maker in self._preparing.values())
        return any(one.request_id == request_id and one.attempt_epoch == attempt_epoch for one in requests)

    def half_close(self) -> None:
        """End the stream once its live requests have ended: no more commands will come."""
        self._half_closed = True
        self._settle()

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Send one message with every event, or several where one would exceed 4 MiB."""
        message = convert.SessionResponse(step=step)
        tokens: list[tuple[int, Emission]] = []
        for output in outputs:
            maker = self._makers[output.request.request_id]
            delta = maker.plain_token(output) if maker.handle else None
            if delta is None:
                message = self._append(message, maker, output)
            else:
                tokens.append((maker.handle, delta))
        # They take a few bytes each: there is always room for one of every request that may run at once.
        convert.add_tokens(message, tokens)
        self._send(message)
        self._num_bytes = 0
        self._settle()
        return not self.buffer.overflowed

    def refuse(self, step: int, request_id: str, attempt_epoch: int, error: PenstockError) -> None:
        """Refuse a command with `error`. The session goes on."""
        message = convert.SessionResponse(step=step)
        convert.add_error(message, request_id, attempt_epoch, error)
        self._send(message)

    def beat(self, step: int) -> None:
        """Send a message without events when requests wait and nothing went out since the last call."""
        # A reader that is behind still has messages to read: they show life.
        if self._is_quiet and (self._makers or self._preparing) and not self.buffer.has_messages:
            self.buffer.put(convert.SessionResponse(step=step, heartbeat=True))
        self._is_quiet = True

    def fail(self, request: Request, error: PenstockError) -> None:
        """End the session with `error`: the engine has failed."""
        self._makers.pop(request.request_id, None)
        self.buffer.close(error)

    def _send(self, message: convert.SessionResponse) -> None:
        if message.events:
            self._is_quiet = False
            self.buffer.put(message)

    def _append(
        self, message: convert.SessionResponse, maker: DeltaMaker, output: RequestOutput
    ) -> convert.SessionResponse:
        """Append a request's events. Return the message for further events: a new one if `message` is full."""
        request, finished = maker.request, output.finished
        error = finished.error if finished is not None else None
        for event in maker.events(output):
            # A failed request ends with its error alone, as its last message to the reader.
            if error is None or not isinstance(event, FinishedOutput):
                message = self._with_room(message, event)
                convert.add_event(message, request, maker.model, event)
        if error is not None:
            convert.add_error(message, request.request_id, request.attempt_epoch, error)
        if finished is not None:
            del self._makers[request.request_id]
        return message

    def _with_room(self, message: convert.SessionResponse, event: convert.Event) -> convert.SessionResponse:
        """Return `message`, or a new one when it has no room for the event."""
        more = _event_bytes(event)
        if message.events and self._num_bytes + more > MAX_DELTA_BYTES:
            self._send(message)
            message, self._num_bytes = convert.SessionResponse(step=message.step), 0
        self._num_bytes += more
        return message

    def _settle(self) -> None:
        if self._half_closed and not self._makers and not self._preparing:
            self.buffer.close()

    def _prepared(self, task: asyncio.Task[None]) -> None:
        del self._preparing[task]
        if not task.cancelled() and task.exception() is not None:
            # Such an error is not the request's fault. It ends the session, as a reader's failure does.
            self.buffer.close(Internal("a request could not be prepared", reason="INTERNAL"))
        self._settle()


def _join_waiting(first: convert.SessionResponse, waiting: deque[convert.SessionResponse]) -> None:
    """Take messages that wait behind `first` into it, as far as one message has room."""
    room = _MOST_JOINED_BYTES - first.ByteSize()
    while waiting and (room := room - waiting[0].ByteSize()) >= 0:
        step = waiting.popleft()
        first.events.MergeFrom(step.events)
        first.step, first.heartbeat = step.step, False


M = TypeVar("M")


class MessageBuffer(Generic[M]):
    """Messages that wait for a stream's reader. Beyond `bound` the reader is cut off and the buffer cleared."""

    def __init__(self, bound: int, join_waiting: Callable[[M, deque[M]], None] | None = None) -> None:
        """Make it. `join_waiting` takes messages that wait behind one into it: a reader that is behind has fewer to
        read.
        """
        self._bound = bound
        self._join_waiting = join_waiting
        self._messages: deque[M] = deque()
        self._wakeup = asyncio.Event()
        self._closed = False
        self._overflowed = False
        self._error: PenstockError | None = None

    @property
    def closed(self) -> bool:
        """True when no more messages are taken."""
        return self._closed

    @property
    def has_messages(self) -> bool:
        """True while messages wait for the reader."""
        return bool(self._messages)

    @property
    def overflowed(self) -> bool:
        """True when the reader was cut off."""
        return self._overflowed

    def put(self, message: M) -> bool:
        """Queue a message. False: the stream is closed, perhaps because this message is one too many."""
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
        """End the stream after the queued messages, with OK or with `error`. The first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wakeup.set()

    async def __aiter__(self) -> AsyncIterator[M]:
        """Yield queued messages as they come. Raises the closing error after the last one."""
        while True:
            while self._messages:
                yield self._next()
            if self._closed:
                break
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._error is not None:
            raise self._error

    def _next(self) -> M:
        message = self._messages.popleft()
        if self._messages and self._join_waiting is not None:
            self._join_waiting(message, self._messages)
        return message
