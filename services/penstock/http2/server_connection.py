"""HTTP/2 connection of a client, on the server's side."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import grpc
from hpack import HPACKError

from penstock.common.logging import get_logger
from penstock.http2 import frames
from penstock.http2.headers import HeaderDecoder, Headers, HeadersTooLarge
from penstock.http2.keepalive import KeepAlive
from penstock.http2.limits import IdleFrames, Limits, Pings
from penstock.http2.server_call import Call, Refused

# Most bytes of a request's compressed headers, CONTINUATION included.
MAX_HEADER_BYTES = 64 << 10
_CONTENT_TYPE = "application/grpc"
_log = get_logger("penstock.http2")


class Connection(asyncio.Protocol):
    """One client's connection. `on_call` starts the handler of a new call. Belongs to one event loop."""

    def __init__(
        self,
        limits: Limits,
        on_call: Callable[[Call], None],
        on_open: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.calls: dict[int, Call] = {}
        # Calls that wait for room.
        self.blocked: dict[int, Call] = {}
        self.window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self.is_paused = False
        # Bytes of the connection's window that were not given back to the client yet.
        self._owed = 0
        self._limits = limits
        self._on_call, self._on_open, self._on_lost = on_call, on_open, on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = HeaderDecoder(limits.max_header_list_bytes)
        self._received = b""
        self._needs_preface = True
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_draining = False
        self._is_closing = False
        self._last_stream = 0
        # A header block that CONTINUATION goes on with: its stream, flags and bytes.
        self._open_block: tuple[int, int, bytes] | None = None
        # True when a frame made room for calls that wait: they are woken once, however many frames come together.
        self._has_room = False
        self._idle_frames = IdleFrames(limits)
        self._pings = Pings(limits.min_ping_interval_seconds)
        self._has_sent = False
        wait, patience = limits.keepalive_seconds, limits.keepalive_timeout_seconds
        self._keepalive = KeepAlive(wait, patience, self._ping, self._give_up)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._keepalive.start()
        self._on_open(self)

    def _greet(self) -> None:
        limits = self._limits
        settings = (
            (frames.MAX_CONCURRENT_STREAMS, limits.max_streams),
            (frames.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
            (frames.MAX_HEADER_LIST_SIZE, limits.max_header_list_bytes),
        )
        more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
        self.send(frames.settings(settings) + frames.window_update(0, more))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._keepalive.stop()
        for call in list(self.calls.values()):
            call.gone()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._wake_all()

    def send(self, data: bytes) -> None:
        """Queue bytes; what is queued in one turn of the event loop leaves together."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= self._limits.write_buffer_bytes:
            self._flush()  # so that `is_paused` is known within the turn, too

    def give_back(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes on `stream`."""
        self.send(frames.window_update(stream, size))

    def forget(self, call: Call) -> None:
        """Forget a call that is over."""
        self.calls.pop(call.stream, None)

    def answered(self) -> None:
        """Note that a call was answered: its client may have reason to reset and to ping."""
        self._idle_frames.refund(4)

    def drain(self) -> None:
        """Take no further calls; close once the last one is over."""
        if not self._is_draining:
            self._is_draining = True
            self.send(frames.goaway(self._last_stream, frames.NO_ERROR))

    def close(self) -> None:
        """Send the queued bytes and hang up."""
        self._is_closing = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if out and self._transport is not None:
            self._has_sent = True
            self._transport.write(b"".join(out))

    def _wake_all(self) -> None:
        for call in list(self.blocked.values()):
            call.wake()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._keepalive.note_activity()
        data = self._received + data if self._received else data
        try:
            self._received = data[self._take_frames(data) :]
        except frames.Violation as violation:
            self._received = b""
            if violation.code == frames.ENHANCE_YOUR_CALM:
                _log.warning("connection cut off", cause=str(violation), calls=len(self.calls))
            self.send(frames.goaway(self._last_stream, violation.code, str(violation)))
            self.close()
            for call in list(self.calls.values()):
                call.gone()
            return
        if self._has_room:
            self._has_room = False
            self._wake_all()
        if (
            self._transport is not None
            and self._transport.get_write_buffer_size() > 4 * self._limits.write_buffer_bytes
        ):
            # The bytes that wait are answers to frames: a client that sends and does not read is not read either.
            self._transport.pause_reading()

    def _take_frames(self, data: bytes) -> int:
        """Handle whole frames; return their number of bytes."""
        at, size = 0, len(data)
        if self._needs_preface:
            if data[: len(frames.PREFACE)] != frames.PREFACE[:size]:
                self._turn_away()
                return size
            if size < len(frames.PREFACE):
                return 0
            self._needs_preface, at = False, len(frames.PREFACE)
            # Not earlier: a client of HTTP/1 would take it for an answer.
            self._greet()
        while at + frames.FRAME_HEAD <= size:
            length = int.from_bytes(data[at : at + 3], "big")
            if length > frames.DEFAULT_FRAME_SIZE:
                raise frames.Violation(frames.FRAME_SIZE_ERROR, "a frame is too large")
            end = at + frames.FRAME_HEAD + length
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & frames.MAX_WINDOW
            self._take(kind, flags, stream, data[at + frames.FRAME_HEAD : end])
            at = end
        return at

    def _turn_away(self) -> None:
        """Answer a client that does not speak HTTP/2."""
        self.send(frames.NOT_HTTP_1)
        self.close()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if (self._open_block is not None) != (kind == frames.CONTINUATION):
            raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
        frames.check(kind, flags, stream, len(payload))
        if kind == frames.DATA:
            self._take_data(flags, stream, payload)
        elif kind == frames.HEADERS:
            self._take_headers(flags, stream, frames.content(flags, payload, prioritised=True))
        elif kind == frames.CONTINUATION and self._open_block is not None:
            begun, first_flags, block = self._open_block
            if begun != stream:
                raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
            self._take_headers(first_flags | flags & frames.END_HEADERS, stream, block + payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(stream, payload)
        elif kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PING:
            self._take_ping(flags, payload)
        elif kind == frames.RST_STREAM:
            call = self._known(stream)
            if call is None or not call.may_be_reset:
                self._idle_frames.spend("early resets of calls without an answer")
            if call is not None:
                call.gone()
        elif kind == frames.PUSH_PROMISE:
            raise frames.Violation(frames.PROTOCOL_ERROR, "clients do not push")
        else:
            # Priorities, which do nothing here, and frames of later versions of HTTP/2.
            self._idle_frames.spend()

    def _known(self, stream: int) -> Call | None:
        """Return the call of a stream; None when it is over. Raises Violation when it never began."""
        if stream > self._last_stream:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a frame of no stream")
        return self.calls.get(stream)

    def _take_headers(self, flags: int, stream: int, block: bytes) -> None:
        if len(block) > MAX_HEADER_BYTES:
            raise frames.Violation(frames.ENHANCE_YOUR_CALM, "headers are too large")
        if not flags & frames.END_HEADERS:
            self._idle_frames.spend()
            self._open_block = (stream, flags, block)
            return
        self._open_block = None
        try:
            fields: Headers | None = self._decoder.decode(block)
        except HeadersTooLarge:
            fields = None
        except HPACKError:
            raise frames.Violation(frames.COMPRESSION_ERROR, "headers cannot be decoded") from None
        known = self.calls.get(stream)
        if known is not None:
            # Trailers of a request: only its end matters.
            if not flags & frames.END_STREAM:
                raise frames.Violation(frames.PROTOCOL_ERROR, "a request has headers twice")
            if known.request_ended:
                self._break_off(known, frames.STREAM_CLOSED)
            else:
                self._give(known, b"", ended=True)
            return
        if stream <= self._last_stream or not stream & 1:
            if stream & 1:
                self._idle_frames.spend()
                return  # trailers of a call that is over
            raise frames.Violation(frames.PROTOCOL_ERROR, "a stream's number is wrong")
        self._last_stream = stream
        self._open(stream, fields, ended=bool(flags & frames.END_STREAM))

    def _open(self, stream: int, fields: Headers | None, *, ended: bool) -> None:
        """Begin a call. `fields` None: they were too large."""
        if self._is_draining or len(self.calls) >= self._limits.max_streams:
            self._idle_frames.spend()
            self.send(frames.reset(stream, frames.REFUSED_STREAM))
            return
        headers = dict(fields or ())
        if fields is not None and not _is_call(headers):
            self._idle_frames.spend()
            self.send(frames.header_frames(stream, frames.refusal(415), end=True, limit=frames.DEFAULT_FRAME_SIZE))
            return
        try:
            if fields is None:
                most = self._limits.max_header_list_bytes
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"metadata of more than {most} bytes")
            call = Call(self, stream, headers, fields, self._limits)
        except Refused as refused:
            self._idle_frames.spend()
            block = frames.RESPONSE_HEADERS + frames.trailers(refused.code.value[0], refused.details, ())
            self.send(frames.header_frames(stream, block, end=True, limit=frames.DEFAULT_FRAME_SIZE))
            return
        self.calls[stream] = call
        call.request_ended = ended
        self._on_call(call)

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        # Given back whatever happens to the call, for many frames at once: a call that is behind holds back its own
        # stream's window.
        self._owed += len(payload)
        if self._owed >= self._limits.connection_window_bytes // 4:
            self.send(frames.window_update(0, self._owed))
            self._owed = 0
        call = self._known(stream)
        content, ended = frames.content(flags, payload, prioritised=False), bool(flags & frames.END_STREAM)
        if not content and not ended:
            self._idle_frames.spend()
        if call is None:
            return
        if call.request_ended:
            self._break_off(call, frames.STREAM_CLOSED)
            return
        self._give(call, content, ended=ended)
        if (
            payload
            and not ended
            and not call.is_over
            and call.received(len(payload)) > self._limits.stream_window_bytes
        ):
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the stream's window")

    def _give(self, call: Call, data: bytes, *, ended: bool) -> None:
        try:
            call.take(data, ended=ended)
        except Refused as refused:
            call.finish(refused.code, refused.details)
            call.gone()

    def _take_window(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if stream == 0:
            self.window += more
            if not more or self.window > frames.MAX_WINDOW:
                raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
            self._has_room = True
            return
        call = self._known(stream)
        if call is not None:
            call.window += more
            if not more or call.window > frames.MAX_WINDOW:
                self._break_off(call, frames.FLOW_CONTROL_ERROR)
            call.wake()

    def _break_off(self, call: Call, code: int) -> None:
        """Reset a call whose frames break the protocol. It counts against the client like a reset of its own."""
        self._idle_frames.spend()
        self.send(frames.reset(call.stream, code))
        call.gone()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        self._idle_frames.spend()
        windows = [value for key, value in struct.iter_unpack(">HI", payload) if key == frames.INITIAL_WINDOW_SIZE]
        if windows:
            # Only the last one is applied, once for every call: a frame has room for thousands.
            self._resize_windows(windows[-1])
        self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._has_room = True

    def _resize_windows(self, initial: int) -> None:
        change, self.initial_window = initial - self.initial_window, initial
        for call in self.calls.values():
            call.window += change
        if initial > frames.MAX_WINDOW or any(call.window > frames.MAX_WINDOW for call in self.calls.values()):
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")

    def _take_ping(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        self._pings.take(is_idle=not self._has_sent)
        self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        self._flush()
        self._has_sent = False

    def _ping(self) -> None:
        if self._needs_preface:
            self._give_up()
            return
        self.send(frames.frame(frames.PING, 0, 0, b"penstock"))

    def _give_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _is_call(headers: dict[str, str]) -> bool:
    """True for gRPC; False for gRPC-Web, which has other bodies."""
    content_type = headers.get("content-type", "")
    kind, rest = content_type[: len(_CONTENT_TYPE)], content_type[len(_CONTENT_TYPE) :]
    return headers.get(":method") == "POST" and kind == _CONTENT_TYPE and rest[:1] in ("", "+", ";")
