"""HTTP/2 connection of a client, on the server's side."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

import grpc

from penstock.common.logging import get_logger
from penstock.http2 import frames
from penstock.http2.flow_control import FlowControl
from penstock.http2.header_block import HeaderBlock
from penstock.http2.headers import (
    Headers,
    MalformedError,
    OddCredentialsError,
    OddFieldError,
    OddPathError,
    check_request,
    check_trailers,
    content_length,
)
from penstock.http2.keepalive import KeepAlive
from penstock.http2.limits import IdleFrames, Limits, Pings
from penstock.http2.listener import let_go
from penstock.http2.metered_tls import meter, stop_metering
from penstock.http2.one_write import waiting
from penstock.http2.request_bytes import RequestBytes
from penstock.http2.server_call import Call, Refused
from penstock.http2.stranger_turns import StrangerTurns
from penstock.http2.strangers import Strangers
from penstock.http2.stream_numbers import StreamNumbers
from penstock.http2.unfinished_requests import UnfinishedRequests

_CONTENT_TYPE = "application/grpc"
# Most bytes of answers that wait for a stranger. Seconds that it waits for the end after it broke the protocol, and
# that it has to read the last bytes where others need its place.
_STRANGERS_WRITE_BYTES, _STRANGERS_LINGER_SECONDS = 16 << 10, 1.0
# Seconds after bytes that left early in which others wait for the end of the turn.
_SAME_TURN_SECONDS = 100e-6
# States of TCP: reset, and closed by the other end.
_HUNG_UP = (7, 8)
# Calls that a change of the initial window may reach for the price of one frame.
_RESIZES_A_FRAME = 64
# Statuses of requests with a field that no request may have, where it is not INTERNAL.
_ODD_CODES = {
    OddPathError: grpc.StatusCode.UNIMPLEMENTED,
    OddCredentialsError: grpc.StatusCode.UNAUTHENTICATED,
}
_log = get_logger("penstock.http2")


class Connection(asyncio.Protocol):
    """One client's connection. `on_call` starts the handler of a new call. Belongs to one event loop."""

    # As of Call.
    __slots__ = (
        "_block",
        "_has_sent",
        "_idle_frames",
        "_is_agreed",
        "_is_closing",
        "_is_draining",
        "_keepalive",
        "_late",
        "_left_early",
        "_limits",
        "_loop",
        "_most_unread",
        "_needs_preface",
        "_needs_settings",
        "_numbers",
        "_on_call",
        "_on_lost",
        "_on_open",
        "_out",
        "_out_bytes",
        "_pings",
        "_received",
        "_transport",
        "_unfinished",
        "calls",
        "flow",
        "turns",
    )

    def __init__(
        self,
        limits: Limits,
        on_call: Callable[[Call], None],
        on_open: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
        *,
        request_bytes: RequestBytes | None = None,
        strangers: Strangers | None = None,
    ) -> None:
        """Make it. `request_bytes`: the process's budget. `strangers`: those of the server; it begins as one."""
        self.calls: dict[int, Call] = {}
        self.flow = FlowControl(limits, request_bytes, self.send)
        # None once a call was admitted by its credentials, or where nobody needs any.
        self.turns = None if strangers is None else StrangerTurns(self, strangers, limits.max_probes)
        # Most bytes of answers that wait: above them writes wait, and above four times as many nothing is read.
        self._most_unread = limits.write_buffer_bytes if strangers is None else _STRANGERS_WRITE_BYTES
        self._limits = limits
        self._on_call, self._on_open, self._on_lost = on_call, on_open, on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = b""
        # The first bytes are the preface, the first frame is SETTINGS.
        self._needs_preface = self._needs_settings = True
        # False by TLS without the protocol's name: HTTP/2 has to be agreed on there (RFC 9113, 3.2).
        self._is_agreed = True
        self._late: asyncio.TimerHandle | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._left_early = 0.0
        self._is_draining = False
        self._is_closing = False
        self._block = HeaderBlock(limits.max_header_list_bytes)
        self._numbers = StreamNumbers()
        self._unfinished = UnfinishedRequests(limits)
        self._idle_frames = IdleFrames(limits)
        self._pings = Pings(limits.min_ping_interval_seconds)
        self._has_sent = False
        wait, patience = limits.keepalive_seconds, limits.keepalive_timeout_seconds
        self._keepalive = KeepAlive(wait, patience, self._ping, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self._is_agreed = tls is None or tls.selected_alpn_protocol() == "h2"
        transport.set_write_buffer_limits(high=self._most_unread)
        self._keepalive.start()
        self._late = self._loop.call_later(self._limits.handshake_seconds, self.abort)
        self._on_open(self)
        if self.turns is not None:
            self.turns.begin()
            meter(transport, self.turns.count_reading)

    def _greet(self) -> None:
        limits = self._limits
        settings = (
            (frames.MAX_CONCURRENT_STREAMS, limits.max_streams),
            (frames.MAX_HEADER_LIST_SIZE, limits.max_header_list_bytes),
        )
        more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
        self.send(frames.settings(settings) + frames.window_update(0, more))

    def connection_lost(self, error: Exception | None) -> None:
        let_go(self._transport)
        stop_metering(self._transport)
        self._transport = None
        self._keepalive.stop()
        self._unfinished.stop()
        if self._late is not None:
            self._late.cancel()
        if self.turns is not None:
            self.turns.end()
        for call in list(self.calls.values()):
            call.gone()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self.flow.is_paused = True

    def resume_writing(self) -> None:
        self.flow.is_paused = False
        if self.turns is not None:
            self.turns.resume()
        else:
            self.set_reading(True)
        self.flow.pass_on()

    def send(self, data: bytes) -> None:
        """Queue bytes; what is queued in one turn of the event loop leaves together.

        What is queued in a call of `flushed_together` leaves at its end, but for what follows within a moment: where
        many peers' messages are read in one turn, that has all of them but the first.
        """
        if not self._out:
            flushes = waiting.flushes
            if flushes is None or time.monotonic() - self._left_early < _SAME_TURN_SECONDS:
                self._loop.call_soon(self._flush)
            else:
                flushes.append(self._flush_early)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= self._limits.write_buffer_bytes:
            self._flush()  # so that `flow.is_paused` is known within the turn, too

    def give_back(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes on `stream`."""
        self.send(frames.window_update(stream, size))

    def forget(self, call: Call) -> None:
        """Forget a call that is over."""
        self.calls.pop(call.stream, None)
        if call.is_probe and self.turns is not None:
            self.turns.probes -= 1
        if not call.request_ended:
            self._unfinished.discard(call)
            self._numbers.cut_off(call.stream)

    def answered(self) -> None:
        """Note that a call was answered: its client may have reason to reset and to ping."""
        self._idle_frames.refund(4)

    def drain(self) -> None:
        """Take no further calls."""
        if not self._is_draining:
            self._is_draining = True
            self.send(frames.goaway(self._numbers.last, frames.NO_ERROR))

    def close(self) -> None:
        """Send the queued bytes and hang up."""
        self._is_closing = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush_early(self) -> None:
        self._left_early = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if out and self._transport is not None:
            self._has_sent = True
            self._transport.write(b"".join(out))

    # Methods for the turns of a stranger: a connection without a call that was admitted by its credentials.

    @property
    def is_stranger(self) -> bool:
        """True until a call was admitted by its credentials."""
        return self.turns is not None

    @property
    def is_busy(self) -> bool:
        """True while it has calls."""
        return bool(self.calls)

    @property
    def is_open(self) -> bool:
        """True until it is closed, or lost."""
        return not self._is_closing and self._transport is not None

    @property
    def is_unread(self) -> bool:
        """True while too many answers wait: nothing more is read."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 4 * self._most_unread

    @property
    def has_hung_up(self) -> bool:
        """True when the other end has closed or reset it, whatever it sent before. Only Linux tells."""
        return self._transport is not None and _has_hung_up(self._transport)

    def set_reading(self, is_reading: bool) -> None:
        """Go on, or stop, reading bytes."""
        if self._transport is not None:
            self._transport.resume_reading() if is_reading else self._transport.pause_reading()

    def trust(self) -> None:
        """Note that a call was admitted by its credentials: it waits no longer for others."""
        if self.turns is not None:
            self.turns.end()
            self.turns = None
            stop_metering(self._transport)
            self._most_unread = self._limits.write_buffer_bytes
            if self._transport is not None:
                self._transport.set_write_buffer_limits(high=self._most_unread)

    def add_probe(self, seconds: float) -> None:
        """Count a call that needs no credentials, and its work. Raises Refused when there are too many."""
        if self.turns is not None:
            self.turns.add_probe(seconds)

    def evict(self) -> None:
        """Hang up: others need the place."""
        why = "too many connections without credentials"
        self.send(frames.goaway(self._numbers.last, frames.ENHANCE_YOUR_CALM, why))
        self._end(is_patient=False)
        # One that does not read would stay until its keepalive ends.
        self._loop.call_later(_STRANGERS_LINGER_SECONDS, self.abort)

    def abort(self) -> None:
        """Hang up without waiting for a client that does not read."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._keepalive.note_activity()
        self._received = self._received + data if self._received else data
        if self.turns is None:
            self.work()
        else:
            self.turns.take_bytes()

    def work(self) -> None:
        """Handle the frames that have come: of a stranger until its turn is over."""
        data = self._received
        try:
            self._received = data[self._take_frames(data) :]
        except frames.Violation as violation:
            if violation.code == frames.ENHANCE_YOUR_CALM:
                _log.warning("connection cut off", cause=str(violation), calls=len(self.calls))
            self.send(frames.goaway(self._numbers.last, violation.code, str(violation)))
            self._end(is_patient=self.turns is not None and self.turns.are_many)
            return
        if self.flow.has_new_room:
            self.flow.pass_on_new_room()
        if self._unfinished.calls:
            self._unfinished.watch()
        if self.is_unread:
            # The bytes that wait are answers to frames: a client that sends and does not read is not read either.
            self.set_reading(False)

    def _end(self, *, is_patient: bool) -> None:
        """End all calls and hang up; where strangers are many `is_patient` lets this one wait for its next try."""
        self._received = b""
        if self.turns is not None:
            self.turns.has_more = False
        if is_patient and self._transport is not None:
            self._is_closing = True
            self._flush()
            self._transport.pause_reading()
            self._loop.call_later(_STRANGERS_LINGER_SECONDS, self.close)
        else:
            self.close()
        for call in list(self.calls.values()):
            call.gone()

    def _take_frames(self, data: bytes) -> int:
        """Handle whole frames; return their number of bytes."""
        at, size = 0, len(data)
        if self.turns is not None:
            self.turns.has_more = False
        if self._needs_settings:
            if self._needs_preface:
                if data[: len(frames.PREFACE)] != frames.PREFACE[:size] or not self._is_agreed:
                    self._turn_away()
                    return size
                if size < len(frames.PREFACE):
                    return 0
                self._needs_preface, at = False, len(frames.PREFACE)
                # Not earlier: a client of HTTP/1 would take it for an answer.
                self._greet()
            if at + frames.FRAME_HEAD > size:
                return at
            if data[at + 3] != frames.SETTINGS or data[at + 4] & frames.ACK:
                raise frames.Violation(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._needs_settings = False
            if self._late is not None:
                self._late.cancel()
        while at + frames.FRAME_HEAD <= size:
            length = int.from_bytes(data[at : at + 3], "big")
            if length > frames.DEFAULT_FRAME_SIZE:
                raise frames.Violation(frames.FRAME_SIZE_ERROR, "a frame is too large")
            end = at + frames.FRAME_HEAD + length
            if end > size:
                break
            if self.turns is not None and time.perf_counter() > self.turns.until:
                self.turns.has_more = True
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
        if self._block.is_open != (kind == frames.CONTINUATION):
            raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
        frames.check(kind, flags, stream, len(payload))
        if kind == frames.DATA:
            self._take_data(flags, stream, payload)
        elif kind == frames.HEADERS:
            self._block.begin(stream, flags)
            self._take_headers(flags, stream, frames.content(flags, payload, prioritised=True))
        elif kind == frames.CONTINUATION:
            if self._block.stream != stream:
                raise frames.Violation(frames.PROTOCOL_ERROR, "a header block was not continued")
            self._take_headers(flags, stream, payload)
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
                self._numbers.end(stream)
        elif kind == frames.PUSH_PROMISE:
            raise frames.Violation(frames.PROTOCOL_ERROR, "clients do not push")
        else:
            # Priorities, which do nothing here, and frames of later versions of HTTP/2.
            self._idle_frames.spend()

    def _known(self, stream: int) -> Call | None:
        """Return the call of a stream; None when it is over. Raises Violation when it never began."""
        call = self.calls.get(stream)
        if call is None:
            self._numbers.require_begun(stream)
        return call

    def _take_headers(self, flags: int, stream: int, part: bytes) -> None:
        """Take a part of a header block; `flags` are those of its frame."""
        block = self._block
        if not block.add(flags, part):
            self._idle_frames.spend()
            return
        fields = block.decode()
        known = self.calls.get(stream)
        if known is not None:
            self._take_trailers(known, fields, ended=block.ends_stream)
        elif self._numbers.begin(stream):
            self._open(stream, fields, ended=block.ends_stream)
        else:
            self._idle_frames.spend()
            self._take_late(stream)

    def _take_trailers(self, call: Call, fields: Headers | None, *, ended: bool) -> None:
        """Take the fields behind a request: only its end matters."""
        if call.request_ended:
            self._break_off(call, frames.STREAM_CLOSED)
            return
        try:
            check_trailers(fields or [])
        except MalformedError:
            ended = False
        if ended:
            self._give(call, b"", 0, ended=True)
        else:
            self._break_off(call, frames.PROTOCOL_ERROR)

    def _take_late(self, stream: int) -> None:
        """Take a frame of a stream that is over; of one that ended here first it may have been on its way."""
        if not self._numbers.is_cut_off(stream):
            self.send(frames.reset(stream, frames.STREAM_CLOSED))

    def _open(self, stream: int, fields: Headers | None, *, ended: bool) -> None:
        """Begin a call. `fields` None: they were too large."""
        if self._is_draining or len(self.calls) >= self._limits.max_streams:
            self._reset(stream, frames.REFUSED_STREAM)
            return
        headers = dict(fields or ())
        try:
            if fields is None:
                most = self._limits.max_header_list_bytes
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"metadata of more than {most} bytes")
            check_request(fields)
            if http_status := _refusal(headers):
                self._answer(stream, frames.refusal(http_status), ended=ended)
                return
            if ended and content_length(fields):
                raise OddFieldError("the body is not as long as its content-length")
            call = Call(self, stream, headers, fields, self._limits)
            call.request_ended = ended
        except OddFieldError as error:
            self._take_odd(stream, headers, error, ended=ended)
            return
        except MalformedError:
            self._reset(stream, frames.PROTOCOL_ERROR)
            return
        except Refused as refused:
            self._answer(stream, _refused(refused.code, refused.details), ended=ended)
            return
        self.calls[stream] = call
        self._on_call(call)
        if call.awaits_request and not ended and not call.is_over:
            self._unfinished.add(call)

    def _take_odd(self, stream: int, headers: dict[str, str], error: OddFieldError, *, ended: bool) -> None:
        """Tell a client of gRPC what is wrong with its request; others are reset (RFC 9113, 8.1.1, allows both)."""
        if _refusal(headers):
            self._reset(stream, frames.PROTOCOL_ERROR)
            return
        code = _ODD_CODES.get(type(error), grpc.StatusCode.INTERNAL)
        self._answer(stream, _refused(code, str(error)), ended=ended, then=frames.PROTOCOL_ERROR)

    def _answer(self, stream: int, block: bytes, *, ended: bool, then: int = frames.NO_ERROR) -> None:
        """Answer a request that makes no call; `then` is the code of the reset of one that goes on."""
        self._idle_frames.spend()
        self.send(frames.header_frames(stream, block, end=True, limit=frames.DEFAULT_FRAME_SIZE))
        if not ended:
            self._numbers.cut_off(stream)
            self.send(frames.reset(stream, then))

    def _reset(self, stream: int, code: int) -> None:
        """Reset a stream that makes no call."""
        self._idle_frames.spend()
        self._numbers.cut_off(stream)
        self.send(frames.reset(stream, code))

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self.flow.take_data(size)
        call = self._known(stream)
        ended = bool(flags & frames.END_STREAM)
        content = frames.content(flags, payload, prioritised=False) if flags & frames.PADDED else payload
        if not content and not ended:
            self._idle_frames.spend()
        if call is None:
            if not self._numbers.is_cut_off(stream):
                self._idle_frames.spend()
            self._take_late(stream)
        elif call.request_ended:
            self._break_off(call, frames.STREAM_CLOSED)
        else:
            self._give(call, content, size, ended=ended)

    def _give(self, call: Call, data: bytes, size: int, *, ended: bool) -> None:
        """Give a call a part of its request that used `size` bytes of its window."""
        try:
            call.take(data, size=size, ended=ended)
        except Refused as refused:
            call.refuse(refused)
            call.gone()
        except MalformedError:
            self._break_off(call, frames.PROTOCOL_ERROR)
        if call.request_ended:
            self._unfinished.discard(call)

    def _take_window(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if stream == 0:
            self.flow.take_update(more)
            return
        call = self._known(stream)
        if call is not None:
            call.window += more
            if not more:
                self._break_off(call, frames.PROTOCOL_ERROR)
            elif call.window > frames.MAX_WINDOW:
                self._break_off(call, frames.FLOW_CONTROL_ERROR)
            elif 0 < call.window <= more:
                call.wake()

    def _break_off(self, call: Call, code: int) -> None:
        """Reset a call with frames that break the protocol. It counts against the client like a reset of its own."""
        self._idle_frames.spend()
        self.send(frames.reset(call.stream, code))
        call.gone()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        self._idle_frames.spend()
        if flags & frames.ACK:
            return
        windows = [value for key, value in frames.read_settings(payload) if key == frames.INITIAL_WINDOW_SIZE]
        if windows:
            # Applied once for every call, however many there are in the frame, and paid for by calls.
            self._idle_frames.spend(count=len(self.calls) // _RESIZES_A_FRAME)
            self.flow.resize(windows, self.calls.values())
        self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _take_ping(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            self._idle_frames.spend()
            return
        self._pings.take(is_idle=not self._has_sent)
        self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        self._flush()
        self._has_sent = False

    def _ping(self) -> None:
        if self._needs_settings:
            self.abort()
            return
        self.send(frames.frame(frames.PING, 0, 0, b"penstock"))


def _refused(code: grpc.StatusCode, details: str) -> bytes:
    """Block of headers that is the whole answer to a call."""
    return frames.RESPONSE_HEADERS + frames.trailers(code.value[0], details, ())


def _has_hung_up(transport: asyncio.Transport) -> bool:
    """True when the other end has closed or reset its connection, whatever it sent before. Only Linux tells."""
    end = transport.get_extra_info("socket")
    if end is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state: int = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        # Not TCP.
        return False
    return state in _HUNG_UP


def _refusal(headers: dict[str, str]) -> int:
    """Return the HTTP status for a request that is not gRPC; 0 for one that is. gRPC-Web has other bodies."""
    if headers.get(":method") != "POST":
        return 405
    content_type = headers.get("content-type", "")
    kind, rest = content_type[: len(_CONTENT_TYPE)], content_type[len(_CONTENT_TYPE) :]
    return 0 if kind == _CONTENT_TYPE and rest[:1] in ("", "+", ";") else 415
