"""Call of a server: its handler uses it as a grpc.aio ServicerContext, and its connection feeds it."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, NoReturn, Protocol

import grpc

from penstock.http2 import frames
from penstock.http2.flow_control import FlowControl
from penstock.http2.headers import Headers, MalformedError, content_length
from penstock.http2.limits import Limits
from penstock.http2.metadata import Metadata, parse_metadata

# Messages that a handler takes in one turn of the event loop, unless it waits itself.
_MESSAGES_PER_TURN = 256
# A reset before this age counts against the client, however short the call's deadline.
_LEAST_SECONDS = 0.01
# zlib's wbits for each encoding.
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class Refused(Exception):
    """Raised to end the call with this status."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailers = trailers


class CallConnection(Protocol):
    """The part of a connection that a call needs."""

    # Windows of the connection.
    flow: FlowControl

    @property
    def is_stranger(self) -> bool:
        """True until a call of the connection was admitted by its credentials."""

    def send(self, data: bytes) -> None:
        """Queue bytes; see Connection.send."""

    def give_back(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes on `stream`."""

    def answered(self) -> None:
        """Note that a call was answered."""

    def trust(self) -> None:
        """Note that a call was admitted by its credentials."""

    def add_probe(self, seconds: float) -> None:
        """Count a call that needs no credentials, and its work. Raises Refused."""

    def forget(self, call: Call) -> None:
        """Forget a call that is over."""


class Call:
    """One call, on its connection's event loop. Writes wait while the client's window or the connection is full."""

    # True: `try_write` may succeed.
    writes_at_once: ClassVar[bool] = True

    # Python finds only thirty attributes of an object fast.
    __slots__ = (
        "_allowance",
        "_arrived",
        "_base",
        "_began",
        "_body",
        "_code",
        "_connection",
        "_credit",
        "_deadline",
        "_details",
        "_early_reset_seconds",
        "_encoding",
        "_flow",
        "_has_headers",
        "_length",
        "_max_message_bytes",
        "_metadata",
        "_on_vouched",
        "_over_callbacks",
        "_reserved",
        "_size",
        "_stream_window_bytes",
        "_timer",
        "_trailing",
        "_trusted_bytes",
        "_waiter",
        "_waits_for_bytes",
        "awaits_request",
        "handler",
        "is_over",
        "is_probe",
        "method",
        "request_ended",
        "serializer",
        "stream",
        "task",
        "wants",
        "window",
    )

    def __init__(
        self, connection: CallConnection, stream: int, headers: dict[str, str], fields: Headers, limits: Limits
    ) -> None:
        """Make it. `headers` are `fields` without repeated ones.

        Raises Refused for headers that do not make a call, MalformedError for an invalid content-length.
        """
        self.stream = stream
        self.method = headers.get(":path", "")
        # Bytes that the client lets us send on this stream.
        self.window = connection.flow.initial_window
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self.serializer: Callable[[Any], bytes] | None = None
        self.request_ended = False
        # The handler, and how the server counts the call: one that needs no credentials is a probe.
        self.handler: Any = None
        self.is_probe = False
        # True when its only request must be complete before its handler runs.
        self.awaits_request = True
        # Bytes of the message of a waiting write.
        self.wants = 0
        self._connection = connection
        self._flow = connection.flow
        self._began = time.monotonic()
        self._early_reset_seconds = limits.early_reset_seconds
        self._max_message_bytes = limits.max_message_bytes
        self._stream_window_bytes = limits.stream_window_bytes
        self._metadata: Metadata = _metadata(fields)
        self._encoding = headers.get("grpc-encoding", "identity")
        self._deadline = _deadline(headers.get("grpc-timeout"))
        # Bytes that the handler has not taken: complete messages, and perhaps the start of one. Kept as received, since
        # a small message may be large when unpacked, and many small objects larger than their bytes.
        self._body = bytearray()
        # Bytes of the first message according to its head, head included; 0 before the head has arrived.
        self._size = 0
        # Bytes that the client may still send, and bytes that may wait here: the first window, until a larger message
        # is let in or the handler turns out to take a stream.
        self._credit = self._allowance = self._base = frames.DEFAULT_WINDOW
        # Bytes counted in the connection's budget, and a flag that the first message waits for its part of it.
        self._reserved, self._waits_for_bytes = 0, False
        # Bytes of the body still to come according to content-length.
        self._length = content_length(fields)
        self._arrived = asyncio.Event()
        self._has_headers = False
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: Metadata = ()
        # Called once, when the call is over: its status is sent, or it was reset.
        self._over_callbacks: list[Callable[[], None]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if self._deadline is not None:
            left = max(0.0, self._deadline - self._began)
            # At its deadline a client also sends a reset, which may come before this side's timer. But no client
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

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the call is over; at once if it is."""
        if self.is_over:
            callback()
        else:
            self._over_callbacks.append(callback)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    async def write(self, message: Any) -> None:
        """Send a message; return when it is under way. Raises grpc.aio.InternalError when the call is over."""
        data = self.serializer(message) if self.serializer is not None else message
        connection = self._connection
        size = len(data) + frames.MESSAGE_HEAD
        if not self._has_headers and not self.is_over:
            self._has_headers = True
            connection.send(frames.header_frames(self.stream, frames.RESPONSE_HEADERS, end=False, limit=16384))
            # A client may cancel an answer that it gets; that reset does not count against it.
            connection.answered()
        if size <= frames.DEFAULT_FRAME_SIZE and self._room() >= size:
            self.window -= size
            self._flow.window -= size
            connection.send(frames.message_frame(self.stream, data))
            return
        await self._write_in_parts(bytes((0,)) + len(data).to_bytes(4, "big") + data)

    def try_write(self, message: Any) -> bool:
        """Send a message at once, from a callback of the loop; False when `write` would wait, or raise.

        The caller may reuse the message after this returns.
        """
        if self.is_over or not self._has_headers:
            return False
        data = self.serializer(message) if self.serializer is not None else message
        flow = self._flow
        size = len(data) + frames.MESSAGE_HEAD
        if size > frames.DEFAULT_FRAME_SIZE or flow.is_paused or size > self.window or size > flow.window:
            return False
        self.window -= size
        flow.window -= size
        self._connection.send(frames.message_frame(self.stream, data))
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

    @property
    def age_seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def trust(self) -> None:
        """Note that it was admitted by its credentials."""
        self._connection.trust()

    @property
    def is_of_a_stranger(self) -> bool:
        """True until a call of its connection was admitted by its credentials."""
        return self._connection.is_stranger

    def become_probe(self, most_bytes: int, seconds: float, on_vouched: Callable[[Call], None]) -> None:
        """Note that it needs no credentials: its request has at most `most_bytes`, its work takes about `seconds`.

        `on_vouched` is called with it when its handler vouches for it. Raises Refused when its connection has too many
        such calls.
        """
        self._connection.add_probe(seconds)
        self.is_probe = True
        # What it may be once its handler vouches for it.
        self._trusted_bytes, self._on_vouched = self._max_message_bytes, on_vouched
        # A stream's first message fits the window that every stream begins with.
        most = most_bytes if self.awaits_request else frames.DEFAULT_WINDOW
        self._max_message_bytes = min(most, self._max_message_bytes)

    def vouch(self) -> None:
        """Note that its handler has found its credentials good: it is a probe no more, and its connection trusted."""
        self._connection.trust()
        if self.is_probe:
            self.is_probe = False
            self._max_message_bytes = self._trusted_bytes
            self._on_vouched(self)

    def refuse(self, refused: Refused) -> None:
        """End it with a refusal."""
        if refused.trailers:
            self._trailing = refused.trailers
        self.finish(refused.code, refused.details)

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
        """Let a waiting write try again: there may be room now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self, data: bytes, *, size: int, ended: bool) -> None:
        """Take a part of the request that used `size` bytes of the stream's window, padding included.

        Raises Refused when the first waiting message is too large, MalformedError when the body does not fit its
        content-length, Violation when the client sent more than allowed.
        """
        self._credit -= size
        if self._credit < 0:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the stream's window")
        if self._length is not None:
            self._length -= len(data)
            if self._length < 0 or (ended and self._length):
                raise MalformedError("the body is not as long as its content-length")
        self._body += data
        if not self._size:
            self._measure()
        self._check_size()
        self._reserve(len(self._body))
        if ended:
            self.request_ended = True
        else:
            self._let_send()
        self._arrived.set()

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
        self._widen()
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
        """Remove and return the first waiting message; there is one. Raises Refused."""
        self._check_size()
        body, size = self._body, self._size
        is_compressed, message = body[0], bytes(body[frames.MESSAGE_HEAD : size])
        del body[:size]
        self._measure()
        self._allowance = self._base
        keeps = max(len(body), self._base if self._base > frames.DEFAULT_WINDOW else 0)
        if keeps < self._reserved:
            size, self._reserved = self._reserved - keeps, keeps
            self._flow.request_bytes.give_back(size)
        self._let_send()
        return self._unpack(message) if is_compressed else message

    def _measure(self) -> None:
        body = self._body
        self._size = frames.MESSAGE_HEAD + int.from_bytes(body[1:5], "big") if len(body) >= frames.MESSAGE_HEAD else 0

    def _check_size(self) -> None:
        """Check the size of the first message. Raises Refused."""
        size = self._size - frames.MESSAGE_HEAD
        if size > self._max_message_bytes:
            raise _too_large(size, self._max_message_bytes)
        if self._body and self._body[0] > 1:
            raise Refused(grpc.StatusCode.INTERNAL, "a message's first byte is neither 0 nor 1")

    def _widen(self) -> None:
        """Let in more than the first window: messages of a stream are taken as they come."""
        size = self._stream_window_bytes
        if size > self._base and self._flow.request_bytes.take(size - self._reserved):
            self._reserved = self._base = self._allowance = size
            self._let_send()

    def _let_send(self) -> None:
        """Let the client send more, unless the handler is behind; one frame serves many messages."""
        if self.is_over or self.request_ended or self._waits_for_bytes:
            return
        if self._size > self._allowance and not self._reserve_message():
            # It continues when other requests of the connection are complete.
            self._waits_for_bytes = True
            self._flow.request_bytes.wait(self._try_again)
            return
        more = self._allowance - len(self._body) - self._credit
        if more >= self._allowance // 4 or (more > 0 and self._size > len(self._body) + self._credit):
            self._credit += more
            self._connection.give_back(self.stream, more)

    def _reserve_message(self) -> bool:
        """Count all bytes of the first message; False while others of the connection leave no room for them."""
        budget, more = self._flow.request_bytes, self._size - self._reserved
        if more > 0 and not budget.take(more):
            if budget.is_parent_full(more):
                raise _crowded()
            return False
        self._reserved, self._allowance = max(self._reserved, self._size), self._size
        return True

    def _try_again(self) -> bool:
        self._waits_for_bytes = False
        if self.is_over or self._size <= self._allowance:
            return True
        try:
            if not self._reserve_message():
                self._waits_for_bytes = True
                return False
        except Refused as refused:
            self.refuse(refused)
            self.gone()
            return True
        self._let_send()
        return True

    def _reserve(self, size: int) -> None:
        """Count received bytes. Raises Refused when the connection or the process holds too many."""
        if size > self._reserved:
            if not self._flow.request_bytes.take(size - self._reserved):
                raise _crowded()
            self._reserved = size

    def _release(self) -> None:
        if self._reserved:
            size, self._reserved = self._reserved, 0
            self._flow.request_bytes.give_back(size)

    def _room(self) -> int:
        """Number of bytes that may be sent now."""
        if self.is_over:
            raise grpc.aio.InternalError("the call is over")
        flow = self._flow
        return 0 if flow.is_paused else min(self.window, flow.window)

    async def _write_in_parts(self, data: bytes) -> None:
        at, has_waited = 0, False
        try:
            while at < len(data):
                room = min(self._room(), frames.DEFAULT_FRAME_SIZE, len(data) - at)
                if room <= 0:
                    self.wants, has_waited = len(data) - at, True
                    await self._wait_for_room()
                    continue
                self.window -= room
                self._flow.window -= room
                self._connection.send(frames.frame(frames.DATA, 0, self.stream, data[at : at + room]))
                at += room
        finally:
            if has_waited:
                # It was woken in place of others.
                self._flow.pass_on()

    async def _wait_for_room(self) -> None:
        flow = self._flow
        self._waiter = asyncio.get_running_loop().create_future()
        if self.window > 0:
            flow.blocked[self.stream] = self
        else:
            flow.pass_on()
        try:
            await self._waiter
        finally:
            self._waiter = None
            flow.blocked.pop(self.stream, None)

    def _unpack(self, message: bytes) -> bytes:
        """Decompress a message. Raises Refused."""
        if self._encoding == "identity":
            raise Refused(grpc.StatusCode.INTERNAL, "a message is compressed, and no grpc-encoding says how")
        if self._encoding not in _ENCODINGS:
            self._trailing = (*self._trailing, ("grpc-accept-encoding", ", ".join(("identity", *_ENCODINGS))))
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "this grpc-encoding is not known")
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
        if self._waits_for_bytes:
            self._waits_for_bytes = False
            self._flow.request_bytes.stop_waiting(self._try_again)
        self._release()
        self._body.clear()
        self._connection.forget(self)
        callbacks, self._over_callbacks = self._over_callbacks, []
        for callback in callbacks:
            callback()


def _too_large(size: int, limit: int) -> Refused:
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {limit})")


def _crowded() -> Refused:
    what = "too many bytes of requests are on their way (connection_window_bytes, request_buffer_bytes)"
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, what)


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
        raise Refused(grpc.StatusCode.INTERNAL, "grpc-timeout is not a duration")
    return time.monotonic() + int(digits) * _UNITS[unit]
