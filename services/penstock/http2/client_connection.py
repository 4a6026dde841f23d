"""HTTP/2 connection of a gRPC client, on asyncio: the common part of streams and unary calls."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from typing import cast
from urllib.parse import unquote

import grpc
from hpack import HPACKError

from penstock.http2 import frames
from penstock.http2.headers import HeaderDecoder, Headers, HeadersTooLarge
from penstock.http2.keepalive import KeepAlive
from penstock.http2.limits import ChannelLimits
from penstock.http2.metadata import MAX_METADATA_BYTES, parse_metadata

_CODES = {str(code.value[0]): code for code in grpc.StatusCode}
# Statuses for answers that are not gRPC's (gRPC, "HTTP to gRPC Status Code Mapping"); all others are UNKNOWN.
_HTTP_ERRORS = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
# Statuses for streams that end without one (gRPC over HTTP/2, "HTTP2 Transport Mapping").
_RESETS = {
    frames.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    frames.CANCEL: grpc.StatusCode.CANCELLED,
    frames.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# Most bytes kept of GOAWAY's text.
_MAX_GOODBYE_BYTES = 200


def rpc_error(
    code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    """Make the error that grpc.aio raises for a status."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details, None)


_OK = rpc_error(grpc.StatusCode.OK, "")


class ClientConnection(asyncio.Protocol, ABC):
    """Connection; subclasses handle the frames of streams. Belongs to one event loop."""

    def __init__(self, limits: ChannelLimits, *, stream_window: int = frames.STREAM_WINDOW) -> None:
        self._max_message_bytes = limits.max_message_bytes
        # Bytes that the peer may send on a stream before a window update.
        self._stream_window = stream_window
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = HeaderDecoder(MAX_METADATA_BYTES)
        self._received = b""
        self._needs_settings = True
        # A header block that CONTINUATION continues: its stream, a flag that it ends the stream, and its bytes.
        self._open_block: tuple[int, bool, bytes] | None = None
        self._initial_window = self._connection_window = frames.DEFAULT_WINDOW
        self._is_paused = False
        # The peer's reason to hang up, if it sent one.
        self._goodbye = ""
        # Set once nothing can be sent any more.
        self.is_over = False
        wait, patience = limits.keepalive_seconds, limits.keepalive_timeout_seconds
        self._keepalive = KeepAlive(wait, patience, self._ping, self._give_up)

    # Methods of subclasses.

    def _greeting(self) -> bytes:
        """Return bytes to send with the preface."""
        return b""

    @abstractmethod
    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        """Take a DATA frame."""

    @abstractmethod
    def _take_status(self, stream: int, error: grpc.aio.AioRpcError) -> None:
        """End the call on `stream` with the status in `error`."""

    @abstractmethod
    def _take_room(self, stream: int, more: int) -> None:
        """Let `stream` (0: any of them) send `more` bytes. Raises Violation."""

    @abstractmethod
    def _resize_windows(self, change: int) -> None:
        """Change every stream's window by `change` bytes."""

    @abstractmethod
    def _take_goaway(self, last_stream: int) -> None:
        """Take a GOAWAY: streams above `last_stream` were not served and will not be."""

    def _taken(self) -> None:
        """Continue after a batch of frames that came together."""

    @abstractmethod
    def _end_all(self, error: grpc.aio.AioRpcError) -> None:
        """End all calls with `error`, and `_hang_up`: the connection is unusable."""

    # Methods that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._fail(grpc.StatusCode.UNAVAILABLE, "the peer does not speak HTTP/2")
            return
        settings = (
            (frames.INITIAL_WINDOW_SIZE, self._stream_window),
            (frames.MAX_HEADER_LIST_SIZE, MAX_METADATA_BYTES),
        )
        more = frames.window_update(0, frames.STREAM_WINDOW - frames.DEFAULT_WINDOW)
        transport.write(frames.PREFACE + frames.settings(settings) + more + self._greeting())
        self._keepalive.start()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        what = f"the connection was lost: {error}" if error else "hung up on"
        self._fail(grpc.StatusCode.UNAVAILABLE, what + self._goodbye)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._take_room(0, 0)

    def data_received(self, data: bytes) -> None:
        if self.is_over:
            return
        self._keepalive.note_activity()
        data = self._received + data if self._received else data
        at, size = 0, len(data)
        try:
            if self._needs_settings and size >= frames.FRAME_HEAD:
                if data[3] != frames.SETTINGS or data[4] & frames.ACK:
                    raise frames.Violation(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
                self._needs_settings = False
            while at + frames.FRAME_HEAD <= size:
                high, low, kind, flags, stream = frames.HEAD.unpack_from(data, at)
                length = high << 16 | low
                if length > frames.DEFAULT_FRAME_SIZE:
                    raise frames.Violation(frames.PROTOCOL_ERROR, "a frame is too large")
                begin = at + frames.FRAME_HEAD
                if begin + length > size:
                    break
                self._take(kind, flags, stream & frames.MAX_WINDOW, data[begin : begin + length])
                at = begin + length
        except frames.Violation as broken:
            self._fail(grpc.StatusCode.INTERNAL, str(broken))
        self._received = data[at:]
        self._taken()

    # Frames.

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if (self._open_block is not None) != (kind == frames.CONTINUATION):
            raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
        frames.check(kind, flags, stream, len(payload))
        if kind == frames.DATA:
            self._take_data(stream, flags, payload)
        elif kind == frames.HEADERS:
            block = frames.content(flags, payload, prioritised=True)
            self._take_headers(stream, flags, bool(flags & frames.END_STREAM), block)
        elif kind == frames.CONTINUATION and self._open_block is not None:
            begun, is_last, block = self._open_block
            if begun != stream:
                raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
            self._take_headers(stream, flags, is_last, block + payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(stream, payload)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self._send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            code = int.from_bytes(payload[:4], "big")
            status = _RESETS.get(code, grpc.StatusCode.INTERNAL)
            self._take_status(stream, rpc_error(status, f"the stream was reset ({code})"))
        elif kind == frames.GOAWAY:
            self._goodbye = _goodbye(payload)
            self._take_goaway(int.from_bytes(payload[:4], "big") & frames.MAX_WINDOW)
        elif kind == frames.PUSH_PROMISE:
            raise frames.Violation(frames.PROTOCOL_ERROR, "nothing may be pushed")

    def _take_headers(self, stream: int, flags: int, is_last: bool, block: bytes) -> None:
        if len(block) > 2 * MAX_METADATA_BYTES:
            raise frames.Violation(frames.PROTOCOL_ERROR, "headers are too large")
        self._open_block = None
        if not flags & frames.END_HEADERS:
            self._open_block = (stream, is_last, block)
            return
        if block == frames.RESPONSE_HEADERS and not is_last:
            return  # headers of an answer by this transport
        try:
            fields = self._decoder.decode(block)
        except HeadersTooLarge:
            self._take_status(
                stream, rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer's metadata is too large")
            )
            return
        except HPACKError:
            raise frames.Violation(frames.PROTOCOL_ERROR, "headers cannot be decoded") from None
        headers = dict(fields)
        status = headers.get(":status", "200")
        if status != "200" and "grpc-status" not in headers:
            if is_last or not status.startswith("1"):
                code = _HTTP_ERRORS.get(status, grpc.StatusCode.UNKNOWN)
                self._take_status(stream, rpc_error(code, f"HTTP status {status}"))
        elif is_last:
            self._take_status(stream, _status(headers, fields))

    def _take_window(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if not more:
            raise frames.Violation(frames.PROTOCOL_ERROR, "no more window")
        if stream == 0:
            self._connection_window += more
            if self._connection_window > frames.MAX_WINDOW:
                raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
        self._take_room(stream, more)

    def _take_settings(self, payload: bytes) -> None:
        for key, value in frames.read_settings(payload):
            self._take_setting(key, value)
        self._send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._take_room(0, 0)

    def _take_setting(self, key: int, value: int) -> None:
        if key == frames.INITIAL_WINDOW_SIZE:
            self._resize_windows(value - self._initial_window)
            self._initial_window = value

    # Sending and the end.

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        if not self.is_over:
            self._end_all(rpc_error(code, details))

    def _hang_up(self) -> None:
        self.is_over = True
        self._keepalive.stop()
        if self._transport is not None and self._transport.get_write_buffer_size():
            # A peer that does not read: a close would wait for it, and no more pings would find it dead.
            self._transport.abort()
        elif self._transport is not None:
            self._transport.close()

    def _ping(self) -> None:
        self._send(frames.frame(frames.PING, 0, 0, b"penstock"))

    def _give_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail(grpc.StatusCode.UNAVAILABLE, "a ping was not answered")


def _goodbye(goaway: bytes) -> str:
    """Text after "hung up on"; empty without an error."""
    code, text = int.from_bytes(goaway[4:8], "big"), goaway[8 : 8 + _MAX_GOODBYE_BYTES].decode("ascii", "replace")
    if code == frames.NO_ERROR:
        return ""
    return f" (GOAWAY {code}: {''.join(one for one in text if one.isprintable())})"


def _status(trailers: dict[str, str], fields: Headers) -> grpc.aio.AioRpcError:
    if trailers.get("grpc-status") == "0":
        return _OK  # callers read no metadata of it
    code = _CODES.get(trailers.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
    try:
        metadata = tuple(parse_metadata(fields))
    except ValueError:
        metadata = ()
    return rpc_error(code, unquote(trailers.get("grpc-message", "")), metadata)


def wake(waiter: asyncio.Future[None] | None) -> None:
    """End a wait, unless it is over."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
