"""uvicorn's HTTP/1.1 with the limits that it lacks: on connections, on their buffers, and on readers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.common.addresses import join_address, require_free_port
from penstock.common.credentials import tls_context
from penstock.common.errors import StartupError
from penstock.gateway.config import GatewayConfig
from penstock.gateway.connections import Connections, Turns
from penstock.gateway.http_errors import OPENAI_ERRORS, HttpError
from penstock.gateway.request_head import check_head, has_body, is_chunked, without_upgrade
from penstock.gateway.time_limit import Awaited, TimeLimit
from penstock.gateway.unsent_watch import UnsentWatch
from penstock.http2.handshake_pace import HandshakePace
from penstock.http2.listener import Listener, let_go
from penstock.http2.metered_tls import handshake_seconds, meter, stop_metering
from penstock.http2.strangers import SLICE_SECONDS, Strangers, network_of
from penstock.http2.tls_arrivals import OPENING_SECONDS

# Key of a request's scope by which `connection_of` finds its connection.
_CONNECTION = "penstock.connection"
# Bytes that the parser gets at a time: of a body, and of the rest, which may hold a request in every 20 bytes. Its
# output and its time are checked before it gets more. A chunked body may have a chunk in every six bytes.
_BODY_SLICE_BYTES, _CHUNKED_SLICE_BYTES, _SLICE_BYTES = 16 << 10, 2 << 10, 512
# Bytes around a body (the sizes of its chunks) for each byte of it: six for the shortest chunk.
_FRAMING_PER_BYTE = 8
# Requests waiting behind the one in progress. No current client sends any.
_MOST_WAITING_REQUESTS = 64
# Bytes read at once from a stranger and from others, and the most that wait for their turn: asyncio reads 256 KiB,
# which takes a quarter of a millisecond for each of ten senders. uvloop cannot be told, and reads 256,000 at most.
_STRANGERS_READ_BYTES, _READ_BYTES, _MOST_HELD_BYTES = 16 << 10, 64 << 10, 256 << 10
# Seconds of work for an answer to a stranger, besides reading its request, and the most that may be saved up.
_ANSWER_SECONDS, _SAVED_SECONDS = 0.0015, 0.05
# The same for a connection's first request that goes first, and the multiple of --anonymous-cpu-share for these.
_FIRST_SECONDS, _FIRSTS = 0.001, 3.0
# Share of one network's TLS handshakes, as a part of the strangers' share.
_HANDSHAKES = 0.5
# Multiple of --stalled-reader-seconds in which a connection must take some of what waits, whatever its request.
_STALL_FACTOR = 1.5
# Seconds for which the rest of a refused request is read and dropped: cutting it off at once would lose the answer.
_LINGER_SECONDS = 2.0


class _Transport:
    """A connection's transport for uvicorn, which closes it through `HttpConnection.close`."""

    def __init__(self, own: asyncio.Transport, connection: HttpConnection) -> None:
        self._connection = connection
        self.write: Callable[[bytes], None] = own.write
        self.abort, self.get_extra_info = connection.abort, own.get_extra_info
        self.pause_reading = own.pause_reading
        self._own = own
        # An answer's head that waits for the begin of its body.
        self._head = b""

    def resume_reading(self) -> None:
        """Go on reading, but for a connection that has bytes from before: it goes on by itself, behind them."""
        if not self._connection.has_held_bytes:
            self._own.resume_reading()

    def hold_head(self) -> None:
        """Send the next write with the one behind it, in one system call. `release` sends it in any case."""
        self.write = self._hold

    def release(self) -> None:
        """Send what is held."""
        self.write = self._own.write
        if self._head and not self._connection.is_lost:
            self.write(self._take_head())

    def _hold(self, head: bytes) -> None:
        self._head, self.write = head, self._write_behind

    def _write_behind(self, data: bytes) -> None:
        self.write = self._own.write
        self.write(self._take_head() + data)

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def close(self) -> None:
        """Close the connection (HttpConnection.close)."""
        self.release()
        self._connection.close()

    def is_closing(self) -> bool:
        """True once its end has begun."""
        return self._connection.is_closing or self._own.is_closing()


class WatchedReader(Protocol):
    """Whoever an answer in progress is for, as its connection sees it."""

    def leave(self) -> None:
        """Note that the connection is lost."""

    def pause(self) -> None:
        """Note that the other end takes nothing for now."""


class HttpConnection(HttpToolsProtocol):
    """One connection: a `Stranger` until one of its requests is admitted."""

    bounds: GatewayConfig
    # All connections of the server.
    everyone: Connections
    # Separate turns for some requests of strangers: for probes, and for those with a known token.
    goes_first: Callable[[Mapping[str, Any]], Turns | None]
    # Status and JSON of a request that is answered without the application, else None.
    answer_at_once: Callable[[Mapping[str, Any]], tuple[int, bytes] | None]
    # Called with the status of a request that reaches no handler.
    on_turned_away: Callable[[int], None]
    # None until the connection is made.
    _own: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._own is not None:
            # asyncio, a turn after the listener.
            return
        self._own = transport
        self.is_closing = False
        # See Stranger.
        self.is_stranger = True
        self.work = self.worked_at = 0.0
        self.network = network_of(transport)
        # Bytes that wait for their turn; and True while its TLS waits for one.
        self._held, self._waits = b"", False
        # Of the message being read: its bytes without the body's, the body's bytes, and its state.
        self._framing_bytes = self._body_bytes = 0
        self._has_head = self._is_within = False
        # Bytes of its body that the parser gets at a time.
        self._body_slice_bytes = _BODY_SLICE_BYTES
        # It has sent a request.
        self._has_asked = False
        # Error of the head being read.
        self._fault: HttpError | None = None
        # Bytes dropped after an answer that did not wait for the whole request.
        self._lingered_bytes = 0
        self._limit = TimeLimit(self.loop)
        # Request in progress, or the last one; `cycle` is the newest one.
        self._running: RequestResponseCycle | None = None
        # What waits for its reader: while nothing more is written, and at its end.
        self._unsent, self._last_unsent = UnsentWatch(self.loop), UnsentWatch(self.loop)
        # Reader of the answer in progress.
        self._reader: WatchedReader | None = None
        self.is_lost = False
        # Request of a stranger that waits for its turn.
        self._delayed: tuple[RequestResponseCycle, Any] | None = None
        # Answer for the end of the message being read.
        self._ready: tuple[int, bytes] | None = None
        # Those that its last request took its turn from.
        self._turns = self.everyone.answers
        super().connection_made(cast("asyncio.Transport", _Transport(transport, self)))
        if not self.everyone.add(self):
            self.abort()
            return
        # Else the kernel takes megabytes for a reader that has stopped, at the full speed of the stream.
        own = transport.get_extra_info("socket")
        if own is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.bounds.max_unsent_bytes)
        if hasattr(transport, "max_size"):
            transport.max_size = _STRANGERS_READ_BYTES
        meter(transport, self._count_reading)
        self._watch()
        if own is not None and transport.get_extra_info("sslcontext") is None:
            self._take_first(own)

    def _take_first(self, own: Any) -> None:
        """Take what came with the connection, as most requests do: asyncio would read it a turn of the loop later."""
        try:
            data = os.read(own.fileno(), _STRANGERS_READ_BYTES)
        except OSError:
            # Nothing has come yet; or the other end has cut it off, and asyncio is told so.
            return
        if data:
            self.data_received(data)
        # Else it has hung up. asyncio reads that once more.

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closing = self.is_lost = True
        if (reader := self._reader) is not None:
            self._reader = None
            reader.leave()
        if (running := self._running) is not None and running is not self.cycle:
            # uvicorn tells only the newest request; this one would keep writing, and keep its memory.
            running.disconnected = True
            running.message_event.set()
        for cycle in (running, self.cycle):
            if cycle is not None:
                cycle.body = bytearray()
        self._limit.stop()
        self._last_unsent.end()
        self.resume_writing()
        self.everyone.discard(self)
        # Its traceback has this connection.
        self._fault = None
        super().connection_lost(exc)
        # Free all that it holds at once, not at the next garbage collection. uvicorn uses none of it again.
        self.pipeline.clear()
        self._held, self.url, self.headers = b"", b"", []
        nothing: Any = None
        self.scope, self.cycle, self.flow = nothing, nothing, nothing
        if self._delayed is not None:
            self._turns.give_back()
        self._running = self._delayed = None
        stop_metering(self._own)
        # uvicorn's reference, which leads back here.
        self.transport = self._own
        let_go(self._own)

    # Reading.

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > self.bounds.max_body_bytes:
                self.abort()
        elif self._held or self._waits or (self.is_stranger and not self.everyone.strangers.may_go_on(self)):
            self._held += data
            self._own.pause_reading()
            if len(self._held) > _MOST_HELD_BYTES:
                self.abort()
        else:
            self._take(data)

    def _count_reading(self, seconds: float) -> None:
        """Count the reading of a stranger's TLS; beyond the share nothing more is read until its turn comes."""
        strangers = self.everyone.strangers
        strangers.spend(self, seconds)
        if self.is_closing:
            # The rest of a refused request is read for the sake of its answer, while that costs others nothing.
            if strangers.are_many:
                self.loop.call_soon(self.abort)
        elif not self._waits and not strangers.may_go_on(self):
            self._waits = True
            self._own.pause_reading()

    def go_on(self) -> None:
        self._waits = False
        if self.is_closing:
            return
        data, self._held = self._held, b""
        self._take(data)
        if not self._held and not self.is_closing and not self.flow.read_paused:
            self._own.resume_reading()

    def _take(self, data: bytes) -> None:
        """Parse received bytes for a slice of time: the loop's other connections have their turns between slices."""
        begin = time.thread_time() if self.is_stranger else 0.0
        rest = self._parse(data, time.perf_counter() + SLICE_SECONDS)
        self._watch()
        if begin:
            self.everyone.strangers.spend(self, time.thread_time() - begin)
        if rest and not self.is_closing:
            self._held = rest
            self._own.pause_reading()
            if not self.is_stranger or self.everyone.strangers.may_go_on(self):
                self.loop.call_soon(self.go_on)

    def _parse(self, data: bytes, until: float) -> bytes:
        """Parse bytes until a time of time.perf_counter(); return the rest."""
        at = 0
        while at < len(data):
            if at and time.perf_counter() > until:
                return data[at:]
            is_body = self._has_head and self._is_within
            part = data[at : at + (self._body_slice_bytes if is_body else _SLICE_BYTES)]
            at += len(part)
            self._framing_bytes += len(part)
            self._feed(part)
            if self._framing_bytes > self.bounds.max_header_bytes + _FRAMING_PER_BYTE * self._body_bytes:
                most = self.bounds.max_header_bytes
                self._turn_away(
                    HttpError(
                        431, f"more than {most} bytes of headers (--max-header-bytes)", reason="HEADERS_TOO_LARGE"
                    )
                )
            if self.is_closing:
                break
        return b""

    def _feed(self, data: bytes) -> None:
        try:
            while data:
                part, data = (data, b"") if self._has_head and self._is_within else without_upgrade(data)
                try:
                    self.parser.feed_data(part)
                except httptools.HttpParserUpgrade as asked:
                    # Its name came in two parts. httptools does not treat the rest as a body.
                    if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
                        self._fault = HttpError(400, "Upgrade is not supported", reason="MALFORMED_REQUEST")
                        raise httptools.HttpParserError from None
                    data = part[asked.args[0] :] + data
        except httptools.HttpParserError:
            if self.is_closing:
                # `on_message_begin` ended it.
                return
            fault = self._fault or HttpError(400, "this is not an HTTP/1.1 request", reason="MALFORMED_REQUEST")
            self._turn_away(fault)

    def on_message_begin(self) -> None:
        if self.is_closing:
            # Else the rest of a part is parsed, request after request, for nobody.
            raise ConnectionAbortedError
        super().on_message_begin()
        self._framing_bytes = self._body_bytes = 0
        self._has_head, self._is_within = False, True
        self.scope["extensions"] = {_CONNECTION: {"is": self}}

    def on_url(self, url: bytes) -> None:
        most = self.bounds.max_target_bytes
        if len(self.url) + len(url) > most:
            # uvicorn takes over a microsecond for each byte that is spelled as %41.
            self._fault = HttpError(
                414, f"more than {most} bytes of path and query (--max-target-bytes)", reason="TARGET_TOO_LONG"
            )
            raise self._fault
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:
            # A trailer: nothing reads it.
            return
        if len(self.headers) >= self.bounds.max_headers:
            most = self.bounds.max_headers
            self._fault = HttpError(431, f"more than {most} headers (--max-headers)", reason="HEADERS_TOO_LARGE")
            raise self._fault
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._fault = check_head(self.parser.get_http_version(), self.headers)
        if self._fault is not None:
            raise self._fault
        self._body_slice_bytes = _CHUNKED_SLICE_BYTES if is_chunked(self.headers) else _BODY_SLICE_BYTES
        if len(self.pipeline) >= _MOST_WAITING_REQUESTS:
            self.abort()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._framing_bytes -= len(body)
        if self._body_bytes > self.bounds.max_body_bytes and self.cycle.response_complete:
            # Of all others a handler counts the bytes.
            self.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_within = False
        super().on_message_complete()
        if self._ready is not None and self._running is self.cycle:
            self._answer_ready()

    def _watch(self) -> None:
        """Limit the time of what the other end owes. It owes nothing while an answer is under way.

        Called behind whatever may change that: received bytes, and the end of an answer.
        """
        if self.transport.is_closing():
            return
        if not self._is_idle:
            self._limit.stop()
        elif not self._is_within and self.cycle is not None:
            self._limit.wait(Awaited.REQUEST, self.bounds.idle_seconds, self.close)
        elif not self._has_head:
            self._limit.wait(Awaited.HEAD, self.bounds.header_seconds, self.abort)
        else:
            self._limit.wait(Awaited.BODY, self.bounds.body_seconds, self.abort)

    # Answering.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if not self.is_stranger:
            super()._start_asgi_task(cycle, app)
            return
        self._delayed = (cycle, app)
        separate = self.goes_first(cycle.scope)
        self._turns = self._turns_of(separate)
        start = functools.partial(self.everyone.starts.call, self._start_delayed, separate is not None)
        if delay := self._turns.delay():
            self.loop.call_later(delay, start)
        else:
            start()

    def _turns_of(self, separate: Turns | None) -> Turns:
        """Return the turns that a stranger's request waits for; `separate`: its own ones if it goes first."""
        is_first, self._has_asked = not self._has_asked, True
        if separate is not None:
            # A flood of probes on a few connections does not hold up those that ask once.
            if separate.is_free():
                return separate
            if is_first and self.everyone.firsts.is_free():
                return self.everyone.firsts
        return self.everyone.answers

    def _start_delayed(self) -> None:
        delayed, self._delayed = self._delayed, None
        if delayed is None:
            return
        cycle, app = delayed
        # A reader that has stopped makes the application wait.
        is_plain = not self.flow.write_paused and not has_body(cycle.scope["headers"])
        self._ready = self.answer_at_once(cycle.scope) if is_plain else None
        if self._ready is None:
            super()._start_asgi_task(cycle, app)
        elif not cycle.more_body:
            self._answer_ready()

    def _answer_ready(self) -> None:
        """Answer the request in progress, which has come whole, as uvicorn would for the application."""
        ready, self._ready, cycle = self._ready, None, self._running
        if ready is None or cycle is None:
            return
        status, body = ready
        fields = b"content-length: %d\r\ncontent-type: application/json\r\n" % len(body)
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        self._own.write(b"".join((STATUS_LINE[status], fields, end, body)))
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    @property
    def _is_idle(self) -> bool:
        """True while no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_busy(self) -> bool:
        # Not a connection with a stopped reader, or with a request that waits for its turn.
        return not self._is_idle and not self.flow.write_paused and self._delayed is None

    @property
    def is_receiving(self) -> bool:
        """True while a request is incomplete."""
        return self._is_within

    def admit(self) -> None:
        """Note that a request of this connection was admitted: it is not a stranger any more."""
        if self.is_stranger:
            self.is_stranger = False
            stop_metering(self._own)
            if seconds := handshake_seconds(self._own):
                self.everyone.handshakes.forgive(self.network, OPENING_SECONDS + seconds)
            if hasattr(self._own, "max_size"):
                self._own.max_size = _READ_BYTES
            if self._held or self._waits:
                # The rest of it no longer waits among strangers.
                self.loop.call_soon(self.go_on)
        self.everyone.admit(self)

    def begin_work(self) -> None:
        """Note that a request is in progress: its connection does not make room for others."""
        self.everyone.begin_work(self)

    def follow(self, reader: WatchedReader) -> None:
        """Tell `reader` when this connection is lost or takes nothing. For a request with a complete body."""
        if self.is_lost:
            self.loop.call_soon(reader.leave)
            return
        # Its body may have paused it, and a connection that is not read does not learn of its end.
        self.flow.resume_reading()
        self._reader = reader
        if self.flow.write_paused:
            reader.pause()

    def unfollow(self, reader: WatchedReader) -> None:
        """Tell `reader` nothing more."""
        if self._reader is reader:
            self._reader = None

    @property
    def has_held_bytes(self) -> bool:
        """True while bytes that were read wait for their turn to be parsed."""
        return bool(self._held)

    @property
    def is_full(self) -> bool:
        """True while the other end does not take what is sent."""
        return not self.is_lost and self.flow.write_paused

    def hold_head(self) -> None:
        """Send the head of the next answer with the begin of its body: a system call less for each answer."""
        if isinstance(self.transport, _Transport):
            self.transport.hold_head()

    def write_piece(self, piece: bytes) -> bool:
        """Send a piece of a chunked answer after its head, in one system call and without a coroutine.

        False: it must wait, or nobody reads any more; ASGI's `send` handles both. The per-token path.
        """
        if self.is_closing or self.flow.write_paused or self._own.is_closing():
            return False
        if not piece:
            # An empty chunk would end the answer.
            return True
        self._own.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        # Longer than the limit on a stream's reader, which tells the engine: this one is for all other writes.
        seconds = _STALL_FACTOR * self.bounds.stalled_reader_seconds
        self._unsent.begin(seconds, self._own.get_write_buffer_size, self.abort)
        if self._reader is not None:
            self._reader.pause()

    def resume_writing(self) -> None:
        self._unsent.end()
        super().resume_writing()

    def on_response_complete(self) -> None:
        if isinstance(self.transport, _Transport):
            # The answer to a HEAD has no body.
            self.transport.release()
        super().on_response_complete()
        # uvicorn's limit for the next request: any byte would end it.
        self._unset_keepalive_if_required()
        self._watch()
        if not self.is_stranger and not self.pipeline:
            self.everyone.end_work(self)

    def _turn_away(self, error: HttpError) -> None:
        """Answer a request that reaches no handler, and hang up."""
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is under way: a second one would become a part of it.
            self.abort()
            return
        body = OPENAI_ERRORS.body(error, {})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._own.write(STATUS_LINE[error.status] + head + body)
        self.on_turned_away(error.status)
        self._is_within = True
        self.close()

    # Ending.

    def close(self) -> None:
        """Hang up once all is sent. The rest of an incoming request is read and dropped for a moment."""
        if self.is_closing:
            return
        self.is_closing = True
        if not self._is_within:
            self._await_end()
            self._own.close()
            return
        if self._own.can_write_eof():
            try:
                self._own.write_eof()
            except OSError:
                # The other end has cut it off, and asyncio has not read that yet.
                self._own.abort()
                return
        self.flow.resume_reading()
        self._own.resume_reading()
        self._limit.wait(Awaited.END, _LINGER_SECONDS, self._own.abort)

    def eof_received(self) -> None:
        # asyncio closes it once all is sent.
        if not self.is_closing:
            self._await_end()

    def _await_end(self) -> None:
        """Cut it off later: what is left to send may be too little for `pause_writing`, and nobody may take it."""
        self._limit.stop()
        seconds = _STALL_FACTOR * self.bounds.stalled_reader_seconds
        self._last_unsent.begin(seconds, self._own.get_write_buffer_size, self._own.abort)

    def abort(self) -> None:
        """Cut it off, with all unsent bytes."""
        self.is_closing = True
        self._own.abort()

    def evict(self) -> None:
        self.abort()


def connection_of(scope: Mapping[str, Any]) -> HttpConnection:
    """Return the connection of a request's scope."""
    return cast("HttpConnection", scope["extensions"][_CONNECTION]["is"])


def _is_fault(record: logging.LogRecord) -> bool:
    """False for a request that `HttpServer.close` ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class HttpServer:
    """Server of one ASGI application. Belongs to one event loop."""

    def __init__(
        self,
        app: Any,
        config: GatewayConfig,
        goes_first: Callable[[Mapping[str, Any]], Turns | None],
        *,
        answer_at_once: Callable[[Mapping[str, Any]], tuple[int, bytes] | None],
        on_turned_away: Callable[[int], None],
        on_evicted: Callable[[], None],
    ) -> None:
        """Make it. `goes_first`, `answer_at_once`: see HttpConnection; they get a request's scope.

        `on_turned_away` is called with the status of a request that does not reach the application, `on_evicted` when a
        connection has made room for others.
        """
        log = logging.getLogger("uvicorn.error")
        # It warns about every connection that a scanner spoils; its errors are faults of Penstock.
        log.setLevel(logging.ERROR)
        log.addFilter(_is_fault)
        self._bounds = config
        self._config = Config(
            app,
            interface="asgi3",
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._config.load()
        self._state = ServerState()
        strangers = Strangers(
            config.anonymous_connections,
            config.anonymous_cpu_share,
            most_of_network=config.anonymous_connections_each,
            on_evicted=on_evicted,
        )
        answers = Turns(config.anonymous_cpu_share, _ANSWER_SECONDS, _SAVED_SECONDS)
        firsts = Turns(min(1.0, _FIRSTS * config.anonymous_cpu_share), _FIRST_SECONDS, _SAVED_SECONDS)
        handshakes = HandshakePace(_HANDSHAKES * config.anonymous_cpu_share)
        self._everyone = Connections(config.max_connections, strangers, answers, firsts, handshakes, on_evicted)
        parts = {
            "bounds": config,
            "everyone": self._everyone,
            "goes_first": staticmethod(goes_first),
            "answer_at_once": staticmethod(answer_at_once),
            "on_turned_away": staticmethod(on_turned_away),
        }
        self._protocol = type("_Protocol", (HttpConnection,), parts)
        self._listeners: list[Listener] = []

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._state.connections)

    @property
    def strangers(self) -> int:
        """Number of open connections without an admitted request."""
        return len(self._everyone.strangers)

    async def listen(self) -> str:
        """Open the port; return its address, host:port. Raises StartupError naming --port, --host or a TLS flag."""
        config = self._bounds
        context = tls_context(config, alpn=()) if config.is_tls else None
        require_free_port(config.host, config.port, "--port")
        try:
            self._listeners, port = await Listener.bind(
                config.host,
                config.port,
                lambda: self._protocol(config=self._config, server_state=self._state, app_state={}),
                context,
                config.header_seconds,
                config.anonymous_connections,
                most_handshakes_each=config.anonymous_connections_each,
                begins_at_once=True,
                on_work=self._everyone.strangers.charge,
                pace=self._everyone.handshakes,
            )
        except OSError as error:
            raise StartupError(f"cannot listen on {join_address(config.host, config.port)}", flag="--port") from error
        for listener in self._listeners:
            listener.start()
        return join_address(config.host, port)

    def stop_listening(self) -> None:
        """Take no further connection; those without a request are closed at once, others after their answer."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def close(self, seconds: float) -> None:
        """End the remaining connections: after `seconds` they are cut off."""
        self.stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if tasks := set(self._state.tasks):
                    await asyncio.wait(tasks)
        # Handshakes may end after this.
        self._everyone.is_closed = True
        for connection in list(self._state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        for task in set(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
