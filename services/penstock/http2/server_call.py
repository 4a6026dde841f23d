"""One call: its handler takes it for a grpc.aio ServicerContext, its connection feeds it."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, NoReturn, Protocol

import grpc

from penstock.http2 import frames
from penstock.http2.headers import Headers
from penstock.http2.limits import Limits
from penstock.http2.metadata import Metadata, parse_metadata

# Messages that a handler takes in one turn of the event loop, if it does not wait by itself.
_MESSAGES_PER_TURN = 256
# A call may not be reset unsuspected before, however little time it has.
_LEAST_SECONDS = 0.01
# How zlib is told of them.
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class Refused(Exception):
    """The call ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class CallConnection(Protocol):
    """The part of a connection that a call needs."""

    # What the client lets us send on the connection, and on a new stream.
    window: int
    initial_window: int
    # Whether the connection is not read fast enough.
    is_paused: bool
    # Calls that wait for room, by stream.
    blocked: dict[int, Call]

    def send(self, data: bytes) -> None:
        """Queue bytes; what is queued in one turn of the event loop leaves together."""

    def give_back(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes on `stream`."""

    def answered(self) -> None:
        """A call was answered."""

    def forget(self, call: Call) -> None:
        """A call is over."""


class Call:
    """Used on the event loop of its connection. Writes wait while the client's window or the connection is full."""

    # Whether `try_write` may ever succeed.
    writes_at_once: ClassVar[bool] = True

    def __init__(
        self, connection: CallConnection, stream: int, headers: dict[str, str], fields: Headers, limits: Limits
    ) -> None:
        """`headers` are `fields` without the repeated ones. Raises Refused for headers that make no call."""
        self.stream = stream
        self.method = headers.get(":path", "")
        # What the client lets us send on this stream.
        self.window = connection.initial_window
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self.serializer: Callable[[Any], bytes] | None = None
        self.request_ended = False
        self._connection = connection
        self._began = time.monotonic()
        self._early_reset_seconds = limits.early_reset_seconds
        self._max_message_bytes = limits.max_message_bytes
        self._window_bytes = limits.stream_window_bytes
        self._metadata: Metadata = _metadata(fields)
        self._encoding = headers.get("grpc-encoding", "identity")
        self._deadline = _deadline(headers.get("grpc-timeout"))
        # What no handler has taken: whole messages as they came, since a small one may be a large one once it is
        # unpacked, and many small ones more than their bytes; at its end the beginning of one.
        self._body = bytearray()
        # Of the first of them, head included, as it says itself; 0 before that has arrived.
        self._size = 0
        # Of the stream's window: not given back to the client yet.
        self._owed = 0
        self._arrived = asyncio.Event()
        self._has_headers = False
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: Metadata = ()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if self._deadline is not None:
            left = max(0.0, self._deadline - self._began)
            # Whose time is over gives up by a reset, too, which may be here before our own timer. But nobody can mean
            # to have an answer in no time at all.
            self._early_reset_seconds = min(self._early_reset_seconds, max(left / 2, _LEAST_SECONDS))
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    # What handlers use of grpc.aio.ServicerContext.

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        self._trailing = tuple(trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    async def write(self, message: Any) -> None:
        """Send a message; returns when it is on its way. Raises grpc.aio.InternalError when the call is over."""
        data = self.serializer(message) if self.serializer is not None else message
        connection = self._connection
        size = len(data) + frames.MESSAGE_HEAD
        if not self._has_headers and not self.is_over:
            self._has_headers = True
            connection.send(frames.header_frames(self.stream, frames.RESPONSE_HEADERS, end=False, limit=16384))
            # Whoever gets an answer may cancel it without being suspected.
            connection.answered()
        if size <= frames.DEFAULT_FRAME_SIZE and self._room() >= size:
            self.window -= size
            connection.window -= size
            connection.send(frames.message_frame(self.stream, data))
            return
        await self._write_in_parts(bytes((0,)) + len(data).to_bytes(4, "big") + data)

    def try_write(self, message: Any) -> bool:
        """Send a message at once, from a callback of the loop; False when `write` would wait, or raise.

        The message is the caller's again when this returns.
        """
        if self.is_over or not self._has_headers:
            return False
        data = self.serializer(message) if self.serializer is not None else message
        connection = self._connection
        size = len(data) + frames.MESSAGE_HEAD
        if size > frames.DEFAULT_FRAME_SIZE or connection.is_paused or size > self.window or size > connection.window:
            return False
        self.window -= size
        connection.window -= size
        connection.send(frames.message_frame(self.stream, data))
        return True

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call. Always raises grpc.aio.AbortError."""
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        self.finish(code, details)
        raise grpc.aio.AbortError

    # What the connection and the server use.

    @property
    def may_be_reset(self) -> bool:
        """True when its client may give it up unsuspected: an answer has begun, or it has held its place for long."""
        return self._has_headers or time.monotonic() - self._began >= self._early_reset_seconds

    def finish(self, code: grpc.StatusCode, details: str = "") -> None:
        """Send the status, once. Later writes fail."""
        if self.is_over:
            return
        block = frames.trailers(code.value[0], details, self._trailing)
        if not self._has_headers:
            block = frames.RESPONSE_HEADERS + block
        out = frames.header_frames(self.stream, block, end=True, limit=frames.DEFAULT_FRAME_SIZE)
        if not self.request_ended:
            out += frames.reset(self.stream, frames.NO_ERROR)
        self._connection.send(out)
        self._connection.answered()
        self._end()

    def gone(self) -> None:
        """The client gave up, or the connection is lost: the handler is cancelled."""
        if not self.is_over:
            self._end()
        if self.task is not None:
            self.task.cancel()

    def wake(self) -> None:
        """Try again: perhaps there is room now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self, data: bytes, *, ended: bool) -> None:
        """Part of the request. Raises Refused when the first message that waits is too large."""
        self._body += data
        if not self._size:
            self._measure()
        self._check_size()
        if ended:
            self.request_ended = True
        self._arrived.set()

    def received(self, size: int) -> int:
        """`size` bytes of the stream's window are used up; returns how many have not been given back."""
        self._owed += size
        self._give_back()
        return self._owed

    async def request(self) -> bytes:
        """The only message of a unary request. Raises Refused when there is not exactly one."""
        while not self.request_ended and not 0 < self._size < len(self._body):
            self._arrived.clear()
            await self._arrived.wait()
        if not 0 < self._size == len(self._body):
            raise Refused(grpc.StatusCode.INTERNAL, "a unary request is exactly one message")
        return self._next()

    async def requests(self, deserializer: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
        """The messages of a streaming request."""
        taken = 0
        while True:
            try:
                while 0 < self._size <= len(self._body):
                    message = self._next()
                    yield deserializer(message) if deserializer is not None else message
                    taken += 1
                    if not taken % _MESSAGES_PER_TURN:
                        # They may come faster than they are taken, and other calls have their turn.
                        await asyncio.sleep(0)
                self._check_size()
                if self.request_ended and self._body:
                    raise Refused(grpc.StatusCode.INTERNAL, "a message was cut short")
            except Refused as refused:
                await self.abort(refused.code, refused.details)
            if self.request_ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def _next(self) -> bytes:
        """The first message that waits, which is there. Raises Refused."""
        self._check_size()
        body, size = self._body, self._size
        is_compressed, message = body[0], bytes(body[frames.MESSAGE_HEAD : size])
        del body[:size]
        self._measure()
        self._give_back()
        return self._unpack(message) if is_compressed else message

    def _measure(self) -> None:
        body = self._body
        self._size = frames.MESSAGE_HEAD + int.from_bytes(body[1:5], "big") if len(body) >= frames.MESSAGE_HEAD else 0

    def _check_size(self) -> None:
        """Raises Refused."""
        size = self._size - frames.MESSAGE_HEAD
        if size > self._max_message_bytes:
            raise _too_large(size, self._max_message_bytes)

    def _give_back(self) -> None:
        """Let the client send on, unless the handler is behind: it is told of many messages at once."""
        if self._owed < self._window_bytes // 4 or self.is_over:
            return
        # One that is larger than the window has to arrive before anybody can take it.
        if len(self._body) <= self._window_bytes or self._size > len(self._body):
            self._connection.give_back(self.stream, self._owed)
            self._owed = 0

    def _room(self) -> int:
        """Bytes that may be sent now."""
        if self.is_over:
            raise grpc.aio.InternalError("the call is over")
        connection = self._connection
        return 0 if connection.is_paused else min(self.window, connection.window)

    async def _write_in_parts(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            room = min(self._room(), frames.DEFAULT_FRAME_SIZE, len(data) - at)
            if room <= 0:
                await self._wait_for_room()
                continue
            self.window -= room
            self._connection.window -= room
            self._connection.send(frames.frame(frames.DATA, 0, self.stream, data[at : at + room]))
            at += room

    async def _wait_for_room(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self._connection.blocked[self.stream] = self
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._connection.blocked.pop(self.stream, None)

    def _unpack(self, message: bytes) -> bytes:
        """A compressed message."""
        if self._encoding == "identity":
            raise Refused(grpc.StatusCode.INTERNAL, "a message is compressed, and no grpc-encoding says how")
        if self._encoding not in _ENCODINGS:
            self._trailing = (*self._trailing, ("grpc-accept-encoding", ", ".join(("identity", *_ENCODINGS))))
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"grpc-encoding {self._encoding!r} is not known")
        unpacker = zlib.decompressobj(_ENCODINGS[self._encoding])
        try:
            whole = unpacker.decompress(message, self._max_message_bytes + 1)
        except zlib.error:
            raise Refused(grpc.StatusCode.INTERNAL, "a message cannot be decompressed") from None
        if len(whole) > self._max_message_bytes:
            raise _too_large(len(whole), self._max_message_bytes)
        if not unpacker.eof:
            raise Refused(grpc.StatusCode.INTERNAL, "a compressed message was cut short")
        return whole

    def _expire(self) -> None:
        self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if self.task is not None:
            self.task.cancel()

    def _end(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self.wake()
        self._connection.forget(self)


def _too_large(size: int, limit: int) -> Refused:
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {limit})")


def _metadata(headers: Headers) -> Metadata:
    try:
        return tuple(parse_metadata(headers))
    except ValueError:
        raise Refused(grpc.StatusCode.INTERNAL, "metadata is not base64, or too large") from None


def _deadline(timeout: str | None) -> float | None:
    """Deadline as a time.monotonic(). Raises Refused."""
    if timeout is None:
        return None
    digits, unit = timeout[:-1], timeout[-1:]
    if unit not in _UNITS or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        raise Refused(grpc.StatusCode.INTERNAL, "grpc-timeout is no duration")
    return time.monotonic() + int(digits) * _UNITS[unit]
