"""Call of a server: its handler uses it as a grpc.aio ServicerContext, and its connection feeds it."""

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

# Messages that a handler takes in one turn of the event loop, unless it waits itself.
_MESSAGES_PER_TURN = 256
# A reset before this age counts against the client, however short the call's deadline is.
_LEAST_SECONDS = 0.01
# zlib's wbits for each encoding.
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class Refused(Exception):
    """Raised to end the call with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class CallConnection(Protocol):
    """The part of a connection that a call needs."""

    # Bytes that the client lets us send on the connection, and on a new stream.
    window: int
    initial_window: int
    # True while the client does not read the connection fast enough.
    is_paused: bool
    # Calls that wait for room, by stream.
    blocked: dict[int, Call]

    def send(self, data: bytes) -> None:
        """Queue bytes; what is queued in one turn of the event loop leaves together."""

    def give_back(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes on `stream`."""

    def answered(self) -> None:
        """Note that a call was answered."""

    def forget(self, call: Call) -> None:
        """Forget a call that is over."""


class Call:
    """One call, on its connection's event loop. Writes wait while the client's window or the connection is full."""

    # True: `try_write` may succeed.
    writes_at_once: ClassVar[bool] = True

    def __init__(
        self, connection: CallConnection, stream: int, headers: dict[str, str], fields: Headers, limits: Limits
    ) -> None:
        """Make it. `headers` are `fields` without repeated ones. Raises Refused for headers that make no call."""
        self.stream = stream
        self.method = headers.get(":path", "")
        # Bytes that the client lets us send on this stream.
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
        # Bytes that the handler has not taken: whole messages, and perhaps the beginning of one. Kept as they came,
        # since a small message may be large once it is unpacked, and many small objects larger than their bytes.
        self._body = bytearray()
        # Bytes of the first message by its own head, head included; 0 before the head has arrived.
        self._size = 0
        # Bytes of the stream's window that were not given back to the client yet.
        self._owed = 0
        self._arrived = asyncio.Event()
        self._has_headers = False
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: Metadata = ()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if self._deadline is not None:
            left = max(0.0, self._deadline - self._began)
            # A client whose time is over gives up by a reset, too, which may come before our own timer. But no client
            # expects an answer in no time at all.
            self._early_reset_seconds = min(self._early_reset_seconds, max(left / 2, _LEAST_SECONDS))
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    # Methods of grpc.aio.ServicerContext that handlers use.

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
            # A client that gets an answer may cancel it, and the reset does not count against it.
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

    # Methods for the connection and the server.

    @property
    def may_be_reset(self) -> bool:
        """True when a reset does not count against the client: an answer has begun, or the call has lasted long."""
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
        """Cancel the handler: the client gave up, or the connection is lost."""
        if not self.is_over:
            self._end()
        if self.task is not None:
            self.task.cancel()

    def wake(self) -> None:
        """Let a write that waits try again: there may be room now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self, data: bytes, *, ended: bool) -> None:
        """Take a part of the request. Raises Refused when the first message that waits is too large."""
        self._body += data
        if not self._size:
            self._measure()
        self._check_size()
        if ended:
            self.request_ended = True
        self._arrived.set()

    def received(self, size: int) -> int:
        """Note that `size` bytes of the stream's window are used; return the bytes that were not given back."""
        self._owed += size
        self._give_back()
        return self._owed

    async def request(self) -> bytes:
        """Return the only message of a unary request. Raises Refused when there is not exactly one."""
        while not self.request_ended and not 0 < self._size < len(self._body):
            self._arrived.clear()
            await self._arrived.wait()
        if not 0 < self._size == len(self._body):
            raise Refused(grpc.StatusCode.INTERNAL, "a unary request is exactly one message")
        return self._next()

    async def requests(self, deserializer: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
        """Yield the messages of a streaming request."""
        taken = 0
        while True:
            try:
                while 0 < self._size <= len(self._body):
                    message = self._next()
                    yield deserializer(message) if deserializer is not None else message
                    taken += 1
                    if not taken % _MESSAGES_PER_TURN:
                        # Messages may come faster than they are taken, and other calls need their turn.
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
        """Remove and return the first message that waits; there is one. Raises Refused."""
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
        """Check the size of the first message. Raises Refused."""
        size = self._size - frames.MESSAGE_HEAD
        if size > self._max_message_bytes:
            raise _too_large(size, self._max_message_bytes)

    def _give_back(self) -> None:
        """Let the client send on, unless the handler is behind; one frame is sent for many messages."""
        if self._owed < self._window_bytes // 4 or self.is_over:
            return
        # A message that is larger than the window has to arrive before the handler can take it.
        if len(self._body) <= self._window_bytes or self._size > len(self._body):
            self._connection.give_back(self.stream, self._owed)
            self._owed = 0

    def _room(self) -> int:
        """Number of bytes that may be sent now."""
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
        """Decompress a message. Raises Refused."""
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
    """Return the deadline as a time of time.monotonic(). Raises Refused."""
    if timeout is None:
        return None
    digits, unit = timeout[:-1], timeout[-1:]
    if unit not in _UNITS or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        raise Refused(grpc.StatusCode.INTERNAL, "grpc-timeout is no duration")
    return time.monotonic() + int(digits) * _UNITS[unit]
