"""One bidirectional stream of gRPC on an HTTP/2 connection of its own, on asyncio.

For streams that live long and carry many small messages: grpc.aio pays system calls and thread switches for each.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from hpack import Decoder, HPACKError

from penstock.common.config import ChannelConfig
from penstock.common.errors import CODE_BY_NUMBER
from penstock.common.http2 import frames
from penstock.common.http2.keepalive import KeepAlive
from penstock.common.http2.metadata import Metadata, parse_metadata
from penstock.common.transport import MAX_METADATA_BYTES

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
END: object = cast("Any", grpc.aio).EOF
_STREAM = 1
_CODES = {str(number): code for number, code in CODE_BY_NUMBER.items()}
# Of both windows, the connection's as large as the stream's: what may be owed to the peer.
_OWED = frames.STREAM_WINDOW // 4
# Of messages that are parsed as one: bounds how long that takes.
_JOINED_BYTES = 64 << 10
# How an answer that is none of gRPC's reads (gRPC, "HTTP to gRPC Status Code Mapping"); all others are UNKNOWN.
_HTTP_ERRORS = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
# How the end of a stream without a status reads (gRPC over HTTP/2, "HTTP2 Transport Mapping").
_RESETS = {
    frames.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    frames.CANCEL: grpc.StatusCode.CANCELLED,
    frames.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class StreamCall(asyncio.Protocol, Generic[RequestT, ResponseT]):
    """What is used of a grpc.aio.StreamStreamCall. Used on one event loop; one task reads and one writes."""

    def __init__(
        self, head: bytes, parse: Callable[[bytes], ResponseT], config: ChannelConfig, *, joins: bool = False
    ) -> None:
        """`head`: the header block of the request. `joins`: messages that wait are read as one, merged as protobuf
        merges a message with the bytes of another one behind it."""
        self._head = head
        self._parse = parse
        self._config = config
        self._joins = joins
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder(max_header_list_size=MAX_METADATA_BYTES)
        self._received = b""
        self._body = bytearray()
        # A header block that CONTINUATION goes on with, and whether it ends the stream.
        self._header_block: bytes | None = None
        self._is_last = False
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Of both windows, the stream's and the connection's: not given back to the peer yet.
        self._owed = 0
        self._initial_window = self._window = self._connection_window = frames.DEFAULT_WINDOW
        self._is_paused = False
        # Set once the call is over: AioRpcError has the status, OK included.
        self._status: grpc.aio.AioRpcError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._has_waited = True
        wait, patience = config.keepalive_seconds, config.keepalive_timeout_seconds
        self._keepalive = KeepAlive(wait, patience, self._ping, self._give_up)

    # What callers use of it.

    async def read(self) -> object:
        """The next message (None: it could not be parsed), END after OK. Raises grpc.aio.AioRpcError."""
        if not self._has_waited:
            # Messages that come faster than they are taken must not hold up the rest of the loop.
            await asyncio.sleep(0)
        self._has_waited = False
        while not self._messages:
            if self._status is not None:
                if self._status.code() is grpc.StatusCode.OK:
                    return END
                raise self._status
            self._reader = self._loop.create_future()
            await self._reader
            self._has_waited = True
        data = self._next()
        self._waiting_bytes -= len(data)
        self._give_back()
        try:
            return self._parse(data)
        except DecodeError:
            return None

    async def write(self, request: RequestT) -> None:
        """Send a message; returns when it is on its way. Raises asyncio.InvalidStateError when the call is over.

        Cancelled amid a message it cancels the call: nothing could follow half of one.
        """
        data = request.SerializeToString()
        size = len(data) + frames.MESSAGE_HEAD
        if size <= frames.DEFAULT_FRAME_SIZE and self._room() >= size:
            self._spend(size)
            self._send(frames.message_frame(_STREAM, data))
            return
        data = bytes((0,)) + len(data).to_bytes(4, "big") + data
        at = 0
        while at < len(data):
            room = min(self._room(), frames.DEFAULT_FRAME_SIZE, len(data) - at)
            if room <= 0:
                self._writer = self._loop.create_future()
                try:
                    await self._writer
                except asyncio.CancelledError:
                    if at:
                        self.cancel()
                    raise
                continue
            self._spend(room)
            self._send(frames.frame(frames.DATA, 0, _STREAM, data[at : at + room]))
            at += room

    def cancel(self) -> None:
        """Give the call up, and its connection."""
        if self._status is None:
            self._send(frames.frame(frames.RST_STREAM, 0, _STREAM, frames.CANCEL.to_bytes(4, "big")))
            self._end(grpc.StatusCode.CANCELLED, "cancelled here")

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._end(grpc.StatusCode.UNAVAILABLE, "the peer does not speak HTTP/2")
            return
        settings = (
            (frames.INITIAL_WINDOW_SIZE, frames.STREAM_WINDOW),
            (frames.MAX_HEADER_LIST_SIZE, MAX_METADATA_BYTES),
        )
        more = frames.window_update(0, frames.STREAM_WINDOW - frames.DEFAULT_WINDOW)
        head = frames.header_frames(_STREAM, self._head, end=False, limit=frames.DEFAULT_FRAME_SIZE)
        transport.write(frames.PREFACE + frames.settings(settings) + more + head)
        self._keepalive.start()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end(grpc.StatusCode.UNAVAILABLE, f"the connection was lost: {error}" if error else "hung up on")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        _wake(self._writer)

    def data_received(self, data: bytes) -> None:
        if self._status is not None:
            return
        self._keepalive.heard()
        data = self._received + data if self._received else data
        at, size = 0, len(data)
        try:
            while at + frames.FRAME_HEAD <= size:
                length = int.from_bytes(data[at : at + 3], "big")
                if length > frames.DEFAULT_FRAME_SIZE:
                    raise frames.Violation(frames.PROTOCOL_ERROR, "a frame is too large")
                begin = at + frames.FRAME_HEAD
                if begin + length > size:
                    break
                stream = int.from_bytes(data[at + 5 : begin], "big") & frames.MAX_WINDOW
                self._take(data[at + 3], data[at + 4], stream, data[begin : begin + length])
                at = begin + length
        except frames.Violation as broken:
            self._end(grpc.StatusCode.INTERNAL, str(broken))
        self._received = data[at:]
        if self._messages:
            _wake(self._reader)

    # Frames.

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if (self._header_block is not None) != (kind == frames.CONTINUATION):
            raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
        if kind == frames.DATA and stream == _STREAM:
            self._take_data(flags, payload)
        elif kind == frames.HEADERS and stream == _STREAM:
            self._take_headers(flags, frames.content(flags, payload, prioritised=True))
        elif kind == frames.CONTINUATION:
            self._take_headers(flags, (self._header_block or b"") + payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(stream, payload)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self._send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM and stream == _STREAM:
            code = int.from_bytes(payload[:4], "big")
            self._end(_RESETS.get(code, grpc.StatusCode.INTERNAL), f"the stream was reset ({code})")
        elif kind == frames.GOAWAY and int.from_bytes(payload[:4], "big") & frames.MAX_WINDOW < _STREAM:
            # A later GOAWAY leaves this stream alone: it ends by itself or with the connection.
            self._end(grpc.StatusCode.UNAVAILABLE, "the peer takes no calls")
        elif kind == frames.PUSH_PROMISE:
            raise frames.Violation(frames.PROTOCOL_ERROR, "nothing may be pushed")

    def _take_data(self, flags: int, payload: bytes) -> None:
        self._owed += len(payload)
        if self._owed > frames.STREAM_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the window")
        body = self._body
        body += frames.content(flags, payload, prioritised=False)
        at = 0
        while at + frames.MESSAGE_HEAD <= len(body):
            length = int.from_bytes(body[at + 1 : at + frames.MESSAGE_HEAD], "big")
            if length > self._config.max_message_bytes:
                what = f"Received message larger than max ({length} vs. {self._config.max_message_bytes})"
                self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
                return
            if body[at]:
                raise frames.Violation(frames.PROTOCOL_ERROR, "a message is compressed, which nobody asked for")
            begin = at + frames.MESSAGE_HEAD
            if begin + length > len(body):
                break
            self._messages.append(bytes(body[begin : begin + length]))
            self._waiting_bytes += length
            at = begin + length
        if at:
            del body[:at]
        self._give_back()
        if flags & frames.END_STREAM:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a call ended without a status")

    def _take_headers(self, flags: int, block: bytes) -> None:
        if len(block) > 2 * MAX_METADATA_BYTES:
            raise frames.Violation(frames.PROTOCOL_ERROR, "headers are too large")
        if self._header_block is None:
            self._is_last = bool(flags & frames.END_STREAM)
        self._header_block = None
        if not flags & frames.END_HEADERS:
            self._header_block = block
            return
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
        except (HPACKError, UnicodeDecodeError):
            raise frames.Violation(frames.PROTOCOL_ERROR, "headers cannot be decoded") from None
        status = headers.get(":status", "200")
        if status != "200" and "grpc-status" not in headers:
            if self._is_last or not status.startswith("1"):
                self._end(_HTTP_ERRORS.get(status, grpc.StatusCode.UNKNOWN), f"HTTP status {status}")
        elif self._is_last:
            self._end_with(headers)

    def _end_with(self, trailers: dict[str, str]) -> None:
        code = _CODES.get(trailers.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
        try:
            metadata = tuple(parse_metadata(trailers.items()))
        except ValueError:
            metadata = ()
        self._end(code, unquote(trailers.get("grpc-message", "")), metadata)

    def _take_window(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if stream == 0:
            self._connection_window += more
        elif stream == _STREAM:
            self._window += more
        if max(self._connection_window, self._window) > frames.MAX_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
        _wake(self._writer)

    def _take_settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise frames.Violation(frames.PROTOCOL_ERROR, "settings have six bytes each")
        for key, value in struct.iter_unpack(">HI", payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                self._window += value - self._initial_window
                self._initial_window = value
        self._send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        _wake(self._writer)

    # The rest.

    def _next(self) -> bytes:
        messages = self._messages
        if not self._joins or len(messages) == 1:
            return messages.popleft()
        parts = [messages.popleft()]
        size = len(parts[0])
        while messages and size < _JOINED_BYTES:
            parts.append(messages.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    def _give_back(self) -> None:
        """Let the peer send on, unless the reader is behind: it is told of many messages at once."""
        if self._waiting_bytes > frames.STREAM_WINDOW // 2 or self._owed < _OWED or self._status is not None:
            return
        self._send(frames.window_update(0, self._owed) + frames.window_update(_STREAM, self._owed))
        self._owed = 0

    def _room(self) -> int:
        if self._status is not None:
            raise asyncio.InvalidStateError(self._status.details())
        return 0 if self._is_paused else min(self._window, self._connection_window)

    def _spend(self, size: int) -> None:
        self._window -= size
        self._connection_window -= size

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _end(self, code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> None:
        """The call is over, once; what came before can still be read."""
        if self._status is not None:
            return
        none = grpc.aio.Metadata()
        self._status = grpc.aio.AioRpcError(code, none, grpc.aio.Metadata(*trailers), details, None)
        self._keepalive.stop()
        if self._transport is not None and self._transport.get_write_buffer_size():
            # Of a peer that does not read: a close would wait for it, and nobody asks any more whether it lives.
            self._transport.abort()
        elif self._transport is not None:
            self._transport.close()
        _wake(self._reader)
        _wake(self._writer)

    def _ping(self) -> None:
        self._send(frames.frame(frames.PING, 0, 0, b"penstock"))

    def _give_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(grpc.StatusCode.UNAVAILABLE, "a ping was not answered")


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
