"""Calls with one request, many at a time on one HTTP/2 connection, on asyncio; an answer is one message or many.

grpc.aio takes one or two thread switches and several system calls for each call, besides the server's own work.
"""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import grpc

from penstock.http2 import frames
from penstock.http2.client_connection import ClientConnection, rpc_error, wake
from penstock.http2.limits import ChannelLimits

# Part of the connection's window that may be owed to the peer before it is given back.
_OWED = frames.STREAM_WINDOW // 4
# Overhead in bytes of a waiting message.
_MESSAGE_OVERHEAD = 48
# A message's flag and length.
_HEAD = struct.Struct(">BI")
_MAX_STREAM = frames.MAX_WINDOW - 2
# Calls at once before the server's settings have come; without a limit in them any number is allowed (RFC 9113, 6.5.2).
_MAX_CALLS = 100
_ALL_SENT = memoryview(b"")
_COMPRESSED = "a message is compressed, which was not asked for"


class _Call(ABC):
    """One call; subclasses handle the answer."""

    __slots__ = ("body", "owed", "unsent", "window")

    def __init__(self, window: int) -> None:
        self.body = bytearray()
        # Bytes of the stream's window not yet given back to the peer.
        self.owed = 0
        # Bytes that the peer allows on the stream, and the bytes that wait for that.
        self.window = window
        self.unsent = _ALL_SENT

    @property
    def may_go_on(self) -> bool:
        """True while the peer may send more of the answer."""
        return True

    @abstractmethod
    def take(self, data: bytes, limit: int) -> None:
        """Take more of the answer. Raises the AioRpcError that ends the call. `limit`: most bytes of a message."""

    @abstractmethod
    def end(self, error: grpc.aio.AioRpcError) -> None:
        """End the call with this status, which may be OK."""


class _Unary(_Call):
    """Call with one answer, which becomes the future's result."""

    __slots__ = ("answer",)

    def __init__(self, window: int, answer: asyncio.Future[bytes]) -> None:
        super().__init__(window)
        self.answer = answer

    def take(self, data: bytes, limit: int) -> None:
        """Check the size; `end` finds an answer of more than one message."""
        body = self.body
        body += data
        size = int.from_bytes(body[1:5], "big") if len(body) >= frames.MESSAGE_HEAD else 0
        _check_size(max(size, len(body) - frames.MESSAGE_HEAD), limit)

    def end(self, error: grpc.aio.AioRpcError) -> None:
        if self.answer.done():
            return
        body = self.body
        if error.code() is not grpc.StatusCode.OK:
            self.answer.set_exception(error)
        elif len(body) < frames.MESSAGE_HEAD or int.from_bytes(body[1:5], "big") != len(body) - frames.MESSAGE_HEAD:
            what = "the answer is not exactly one message"
            self.answer.set_exception(rpc_error(grpc.StatusCode.INTERNAL, what))
        elif body[0]:
            self.answer.set_exception(rpc_error(grpc.StatusCode.INTERNAL, _COMPRESSED))
        else:
            self.answer.set_result(bytes(body[frames.MESSAGE_HEAD :]))


class AnswerStream(_Call):
    """Messages of an answer, for one task."""

    __slots__ = (
        "_connection",
        "_failure",
        "_has_refused",
        "_messages",
        "_most_waiting",
        "_reader",
        "_status",
        "_take",
        "_timer",
        "_waiting_bytes",
        "stream",
    )

    def __init__(
        self, connection: CallsConnection, stream: int, window: int, most_waiting: int, deadline: float | None
    ) -> None:
        """Make it. The peer must wait while more than `most_waiting` bytes wait for the reader.

        `deadline` is a time of the event loop.
        """
        super().__init__(window)
        self.stream = stream
        self._connection = connection
        self._messages: list[bytes] = []
        self._most_waiting = most_waiting
        self._waiting_bytes = 0
        self._status: grpc.aio.AioRpcError | None = None
        self._reader: asyncio.Future[None] | None = None
        # While `run` waits: the receiver of messages; a flag that it wants no more; and its error.
        self._take: Callable[[list[bytes]], bool] | None = None
        self._has_refused = False
        self._failure: Exception | None = None
        # One timer for the call: a limit on each wait would cost more than the wait.
        self._timer = connection.loop.call_at(deadline, self._expire) if deadline is not None else None

    def waiting(self) -> list[bytes] | None:
        """Remove and return the waiting messages: none after OK; None until `more` is done. Raises AioRpcError."""
        messages = self._messages
        if messages:
            self._messages = []
            self._waiting_bytes = 0
            self._connection.give_back(self)
            return messages
        if self._status is None:
            return None
        if self._status.code() is grpc.StatusCode.OK:
            return messages
        raise self._status

    def more(self) -> asyncio.Future[None]:
        """Return a future that is done once there is more for `waiting`."""
        self._reader = self._connection.loop.create_future()
        return self._reader

    async def run(self, take: Callable[[list[bytes]], bool]) -> bool:
        """Hand the waiting messages to `take` in the turn of the event loop in which they arrive: no task is woken.

        Returns True after OK, and False after `take` returned it: it may be run again. Raises grpc.aio.AioRpcError, and
        the errors of `take`. Cancelling it cancels the call.
        """
        while (messages := self.waiting()) is None or messages:
            if messages is not None:
                if not take(messages):
                    return False
                continue
            self._take, self._has_refused, self._failure = take, False, None
            try:
                await self.more()
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._take = None
            if self._failure is not None:
                raise self._failure
            if self._has_refused:
                return False
        return True

    def deliver(self) -> None:
        """Hand on received messages to the receiver of `run`."""
        if self._take is None or not (messages := self.waiting()):
            return
        try:
            self._has_refused = not self._take(messages)
        except Exception as error:
            # `run` raises it, as a task would have.
            self._failure = error
        if self._has_refused or self._failure is not None:
            self._take = None
            wake(self._reader)

    def _arrived(self) -> None:
        if self._take is None:
            wake(self._reader)
        else:
            # After all that came together has been parsed: several messages are handed on as one list.
            self._connection.touched.append(self)

    def cancel(self) -> None:
        """Cancel the call, unless it is over."""
        self._connection.give_up(self, rpc_error(grpc.StatusCode.CANCELLED, "cancelled here"))

    def _expire(self) -> None:
        self._connection.give_up(self, late())

    @property
    def may_go_on(self) -> bool:
        return self._waiting_bytes <= self._most_waiting

    def take(self, data: bytes, limit: int) -> None:
        body, at = self.body, 0
        size = len(data) - frames.MESSAGE_HEAD
        if not body and 0 <= size <= limit and data[: frames.MESSAGE_HEAD] == _HEAD.pack(0, size):
            # One complete message, the common case.
            self._messages.append(data[frames.MESSAGE_HEAD :])
            self._waiting_bytes += size + _MESSAGE_OVERHEAD
            self._arrived()
            return
        body += data
        while at + frames.MESSAGE_HEAD <= len(body):
            if body[at]:
                raise rpc_error(grpc.StatusCode.INTERNAL, _COMPRESSED)
            begin = at + frames.MESSAGE_HEAD
            end = begin + int.from_bytes(body[at + 1 : begin], "big")
            _check_size(end - begin, limit)
            if end > len(body):
                break
            self._messages.append(bytes(body[begin:end]))
            self._waiting_bytes += end - begin + _MESSAGE_OVERHEAD
            at = end
        if at:
            del body[:at]
            self._arrived()

    def end(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.OK and self.body:
            error = rpc_error(grpc.StatusCode.INTERNAL, "a message was cut short")
        self._status = error
        if self._timer is not None:
            self._timer.cancel()
        wake(self._reader)


class CallsConnection(ClientConnection):
    """Connection for many calls. Belongs to one event loop."""

    def __init__(self, limits: ChannelLimits, *, stream_window: int = frames.STREAM_WINDOW) -> None:
        """Make it. The peer may send `stream_window` bytes of an answer beyond those taken."""
        super().__init__(limits, stream_window=stream_window)
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._max_calls = _MAX_CALLS
        self._has_settings = False
        # Further callers wait for their turn.
        self._turns: deque[asyncio.Future[None]] = deque()
        self._owed = 0
        self._out: list[bytes] = []
        # Streams with new messages for `run`.
        self.touched: list[AnswerStream] = []
        # True once the peer takes no new calls; its present calls continue.
        self._is_leaving = False
        self._error = rpc_error(grpc.StatusCode.UNAVAILABLE, "the connection is closed")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it belongs to."""
        return self._loop

    @property
    def is_usable(self) -> bool:
        """True while a new call may be tried."""
        return not self.is_over and not self._is_leaving and self._next_stream < _MAX_STREAM

    async def call(self, head: bytes, request: bytes) -> bytes:
        """Send a request (`head`: its header block) and return the answer. Raises grpc.aio.AioRpcError.

        Cancelling it cancels the call at the peer.
        """
        stream = await self._next()
        call = _Unary(self._initial_window, self._loop.create_future())
        self._begin(stream, call, head, request)
        try:
            return await call.answer
        finally:
            if self._calls.pop(stream, None) is not None:
                self._reset(stream)
            self._gone()

    async def stream(self, head: bytes, request: bytes, deadline: float | None = None) -> AnswerStream:
        """Send a request with an answer of many messages. Raises grpc.aio.AioRpcError when it cannot be sent.

        At `deadline`, a time of the event loop, the call ends with DEADLINE_EXCEEDED.
        """
        return self._open_stream(await self._next(), head, request, deadline)

    @property
    def has_room(self) -> bool:
        """True while a new call need not wait for its turn."""
        return len(self._calls) < self._max_calls and self.is_usable

    def begin(self, head: bytes, request: bytes, deadline: float | None = None) -> AnswerStream:
        """Do what `stream` does at once. For a connection that has room."""
        return self._open_stream(self._take_number(), head, request, deadline)

    def _open_stream(self, stream: int, head: bytes, request: bytes, deadline: float | None) -> AnswerStream:
        call = AnswerStream(self, stream, self._initial_window, self._stream_window // 2, deadline)
        self._begin(stream, call, head, request)
        return call

    def give_up(self, call: AnswerStream, error: grpc.aio.AioRpcError) -> None:
        """Cancel a call, unless it is over; its reader gets `error`."""
        if self._calls.pop(call.stream, None) is not None:
            self._reset(call.stream)
            call.end(error)
            self._gone()

    def give_back(self, call: AnswerStream) -> None:
        """Let the peer send more: some of the answer was taken."""
        if call.stream in self._calls:
            self._let_send(call.stream, call)

    def drain(self) -> None:
        """Take no new calls; hang up once the last one is over."""
        self._is_leaving = True
        if not self._calls:
            self.close()

    def close(self) -> None:
        """End live calls with UNAVAILABLE and hang up."""
        self._fail(grpc.StatusCode.UNAVAILABLE, "the channel is closed")

    async def _next(self) -> int:
        """Wait for a turn, and return the number of a new stream. Raises grpc.aio.AioRpcError."""
        while len(self._calls) >= self._max_calls and self.is_usable:
            await self._take_turn()
        if not self.is_usable:
            raise self._error
        return self._take_number()

    def _take_number(self) -> int:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        return stream

    def _begin(self, stream: int, call: _Call, head: bytes, request: bytes) -> None:
        self._calls[stream] = call
        self._send(frames.header_frames(stream, head, end=False, limit=frames.DEFAULT_FRAME_SIZE))
        call.unsent = memoryview(b"\0" + len(request).to_bytes(4, "big") + request)
        self._send_more(stream, call)

    def _gone(self) -> None:
        """Forget a call that is over."""
        self._next_turn()
        if self._is_leaving and not self._calls and not self.is_over:
            self.close()

    async def _take_turn(self) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next_turn()
            raise

    def _next_turn(self) -> None:
        while self._turns and len(self._calls) < self._max_calls:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    # Methods of ClientConnection.

    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        self._owed += len(payload)
        if self._owed > frames.STREAM_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the window")
        if self._owed >= _OWED:
            self._send(frames.window_update(0, self._owed))
            self._owed = 0
        call = self._calls.get(stream)
        if call is None:
            return
        if flags & frames.END_STREAM:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a call ended without a status")
        call.owed += len(payload)
        if call.owed > self._stream_window:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the window")
        try:
            call.take(frames.content(flags, payload, prioritised=False) if flags else payload, self._max_message_bytes)
        except grpc.aio.AioRpcError as error:
            self._end_call(stream, error)
            self._reset(stream)
        else:
            self._let_send(stream, call)

    def _let_send(self, stream: int, call: _Call) -> None:
        """Let the peer send more; one frame serves many messages."""
        if call.owed >= self._stream_window // 4 and call.may_go_on:
            self._send(frames.window_update(stream, call.owed))
            call.owed = 0

    def _taken(self) -> None:
        touched, self.touched = self.touched, []
        for call in touched:
            call.deliver()

    def _take_status(self, stream: int, error: grpc.aio.AioRpcError) -> None:
        call = self._calls.get(stream)
        if call is not None:
            if call.unsent:
                # Half of a request that is not wanted any more.
                self._reset(stream)
            self._end_call(stream, error)

    def _take_room(self, stream: int, more: int) -> None:
        call = self._calls.get(stream)
        if call is not None:
            call.window += more
            if call.window > frames.MAX_WINDOW:
                raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
            self._send_more(stream, call)
        elif stream == 0:
            for one, waiting in list(self._calls.items()):
                self._send_more(one, waiting)

    def _resize_windows(self, change: int) -> None:
        for call in self._calls.values():
            call.window += change

    def _take_settings(self, payload: bytes) -> None:
        if not self._has_settings:
            self._has_settings, self._max_calls = True, frames.MAX_WINDOW
        super()._take_settings(payload)
        for _ in range(min(len(self._turns), self._max_calls - len(self._calls))):
            self._next_turn()

    def _take_setting(self, key: int, value: int) -> None:
        super()._take_setting(key, value)
        if key == frames.MAX_CONCURRENT_STREAMS:
            self._max_calls = value

    def _take_goaway(self, last_stream: int) -> None:
        self._is_leaving = True
        for stream in [stream for stream in self._calls if stream > last_stream]:
            self._end_call(stream, rpc_error(grpc.StatusCode.UNAVAILABLE, "the peer takes no calls"))
        self._wake_turns()

    def _end_all(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error
        self._flush()
        self._hang_up()
        for stream in list(self._calls):
            self._end_call(stream, error)
        self._wake_turns()

    # Sending.

    def _end_call(self, stream: int, error: grpc.aio.AioRpcError) -> None:
        call = self._calls.pop(stream)
        call.end(error)
        if isinstance(call, AnswerStream):
            # No caller waits for its end, unlike a unary call's.
            self._gone()

    def _wake_turns(self) -> None:
        for turn in self._turns:
            wake(turn)
        self._turns.clear()

    def _reset(self, stream: int) -> None:
        self._send(frames.reset(stream, frames.CANCEL))

    def _send_more(self, stream: int, call: _Call) -> None:
        """Send the part of a request that there is room for."""
        while call.unsent and not self._is_paused:
            room = min(call.window, self._connection_window, frames.DEFAULT_FRAME_SIZE)
            if room <= 0:
                return
            # A view: otherwise every frame of a large request would copy the rest of it.
            part, rest = bytes(call.unsent[:room]), call.unsent[room:]
            call.unsent = rest or _ALL_SENT
            call.window -= len(part)
            self._connection_window -= len(part)
            flags = 0 if call.unsent else frames.END_STREAM
            self._send(frames.frame(frames.DATA, flags, stream, part))

    def _send(self, data: bytes) -> None:
        """Queue bytes; all bytes queued in one turn of the event loop are sent together."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            super()._send(b"".join(out))


def late() -> grpc.aio.AioRpcError:
    """Make the error of a call after its deadline."""
    return rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        what = f"Received message larger than max ({size} vs. {limit})"
        raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
