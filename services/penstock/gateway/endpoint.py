"""One HTTP request from its headers to its end: limits, body, answer or stream, errors, readers that leave or stop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import grpc
from penstock_client import AsyncClient, Delta

from penstock.common.acting_for import ACTING_FOR_KEY, acting_for
from penstock.common.credentials import bearer_token
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.common.idle_only import IDLE_ONLY_KEY, is_idle_only
from penstock.common.logging import bind_trace, get_logger
from penstock.common.needed_scope import NEEDED_SCOPE_KEY, needed_scope
from penstock.common.request_context import REQUEST_ID_KEY, accept_request_id, current_request_id, is_request_id
from penstock.common.tracing import (
    TRACEPARENT_KEY,
    TRACESTATE_KEY,
    Span,
    SpanKind,
    Tracer,
    current_span,
    exemplar,
    outgoing,
    parse_context,
)
from penstock.gateway.answers import merged
from penstock.gateway.background import Background
from penstock.gateway.callers import Caller, Callers
from penstock.gateway.config import GatewayConfig
from penstock.gateway.followed import Followed
from penstock.gateway.http_errors import (
    ANTHROPIC_ERRORS,
    OPENAI_ERRORS,
    ErrorShape,
    HttpError,
    error_headers,
    internal,
    known_errors,
    status_of,
)
from penstock.gateway.http_server import HttpConnection, connection_of
from penstock.gateway.jobs import Jobs
from penstock.gateway.json_body import BodyBounds, parse_object
from penstock.gateway.kept_stores import KeptStores
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.places import ANYBODY, Body, BodyBytes, Places
from penstock.gateway.request_head import TrustedHosts, foreign_host
from penstock.gateway.request_log import Tokens, log_request

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FileContent:
    """Answer that is a file: its length, and its bytes piece by piece."""

    num_bytes: int
    pieces: AsyncIterator[bytes]


# Complete answer as JSON, an answer in pieces, or a file.
Answer = bytes | Followed | AsyncIterator[bytes] | FileContent

_JSON = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would buffer the pieces.
    (b"x-accel-buffering", b"no"),
]
_FILE = [
    (b"content-type", b"application/octet-stream"),
    # A page must not show what a caller wrote as if it were this gateway's.
    (b"content-disposition", b"attachment"),
    (b"x-content-type-options", b"nosniff"),
]
# Header that every client of Anthropic's API sends, and no other's.
_ANTHROPIC_VERSION = b"anthropic-version"
_TRACE_KEYS = (TRACEPARENT_KEY, TRACESTATE_KEY)
_GONE = 499
# Looks at a reader that takes nothing in the time that it may take nothing.
_LOOKS = 4
# Bodies up to this size are parsed on the event loop: a thread would take longer.
_PARSED_AT_ONCE_BYTES = 64 << 10
# Values of Sec-Fetch-Site for requests that do not come from another site's page.
_OWN_SITES = (b"same-origin", b"none")
# Block of a request that holds nothing.
_NOTHING = nullcontext()
_log = get_logger("penstock.gateway")


@dataclass(slots=True)
class HttpCall:
    """Facts about a request for its handler, and about the answer from it."""

    body: dict[str, Any]
    client: AsyncClient
    config: GatewayConfig
    # Last part of a path such as /v1/models/NAME.
    tail: str = ""
    # Option -> its name in the request.
    names: dict[str, str] = field(default_factory=dict)
    # Fields that nothing reads and that the answer names. `ignore` adds to them.
    ignored: list[str] = field(default_factory=list)
    # The same, for lookup by name: a body may have thousands.
    _ignored: set[str] = field(default_factory=set)
    # The caller's id, or a new one; later the router's, if this one becomes several requests.
    request_id: str = ""
    # The first of these, for headers and the log if the body's own id is not fit for them.
    header_id: str = ""
    # Query of the URL.
    query: str = ""
    # The caller is a client of Anthropic's API, by its header.
    is_anthropic: bool = False
    # Digest of the bearer token, to which responses, files and batches belong; empty for callers without one.
    owner: str = ""
    # As Caller.tenant.
    tenant: str = ANYBODY
    # Count of the body's bytes until the request ends; None: it is not counted.
    counted: Body | None = None
    # Body of an upload, part by part as it arrives, and its Content-Type; else there is none.
    parts: AsyncIterator[bytes] | None = None
    content_type: bytes = b""
    # None: files and batches are off.
    jobs: Jobs | None = None
    # Id of an item within what `tail` names, as in /v1/conversations/ID/items/ITEM.
    item: str = ""
    # None: /v1/responses keeps none.
    kept: KeptStores | None = None
    # None: there are none, or not here, as in a batch.
    background: Background | None = None
    # Names of the chat's tools with a text as input.
    custom_tools: frozenset[str] = frozenset()
    # The chat has `functions`, and the call of its answer their form.
    has_functions: bool = False
    # Tokens counted for the log.
    tokens: Tokens = field(default_factory=Tokens)

    @property
    def shown_id(self) -> str:
        """Id for headers and the log."""
        # The router mostly keeps the first one.
        is_fit = self.request_id == self.header_id or is_request_id(self.request_id)
        return self.request_id if is_fit else self.header_id

    def ignore(self, *names: str) -> None:
        """List fields as ignored, each once: the first --max-ignored-fields that a header can name."""
        for name in names:
            if len(self.ignored) >= self.config.max_ignored_fields:
                return
            if name not in self._ignored and name.isascii() and name.isprintable():
                self._ignored.add(name)
                self.ignored.append(name)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""
        found = _id_header(self.shown_id)
        if self.ignored:
            listed = ", ".join(name[:64] for name in self.ignored)
            found.append((b"x-penstock-ignored-fields", listed.encode()))
        return found


Handler = Callable[[HttpCall], Awaitable[Answer]]


def _id_header(request_id: str) -> list[tuple[bytes, bytes]]:
    return [(REQUEST_ID_KEY.encode(), request_id.encode("ascii", "ignore"))] if request_id else []


def shown_authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the caller's bearer token with its scheme; Anthropic's clients send theirs as x-api-key."""
    shown = headers.get(b"authorization")
    if shown is None and b"x-api-key" in headers:
        return b"Bearer " + headers[b"x-api-key"]
    return shown


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata for a call to the router: the request's id, its trace, idle capacity only, a scope to ask for,
    the key that it counts for."""
    request_id = current_request_id.get()
    idle_only = ((IDLE_ONLY_KEY, "1"),) if is_idle_only.get() else ()
    scope = ((NEEDED_SCOPE_KEY, needed),) if (needed := needed_scope.get()) else ()
    key = ((ACTING_FOR_KEY, digest),) if (digest := acting_for.get()) else ()
    return (*(((REQUEST_ID_KEY, request_id),) if request_id else ()), *idle_only, *scope, *key, *outgoing())


def owner_of(authorization: bytes | None) -> str:
    """Return the scope of what a caller keeps: its token's digest, or one scope for all callers without a token."""
    if token := bearer_token(authorization):
        # However the header spells it: one token has one share of what is kept.
        authorization = b"Bearer " + token
    return hashlib.sha256(authorization).hexdigest() if authorization else ""


@dataclass(frozen=True, slots=True)
class Door:
    """Parts between a connection and a handler, one of each for all routes."""

    config: GatewayConfig
    callers: Callers
    hosts: TrustedHosts
    places: Places
    bodies: BodyBytes
    body_bounds: BodyBounds
    parsing: asyncio.Semaphore
    metrics: GatewayMetrics
    log: FilteringBoundLogger
    kept: KeptStores | None
    background: Background | None
    jobs: Jobs | None


class Endpoint:
    """ASGI application of one route: JSON in, JSON or server-sent events out."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        door: Door,
        *,
        tracer: Tracer | None = None,
        has_body: bool = True,
        may_be_empty: bool = False,
        is_upload: bool = False,
        is_public: bool = False,
        is_of_both: bool = False,
        makes_jobs: bool = False,
        errors: ErrorShape = OPENAI_ERRORS,
    ) -> None:
        """Make it. Without `has_body` it is a GET or DELETE, which has no span and which any page may send.

        `may_be_empty`: no body is one without fields. `is_upload`: the handler reads the body itself, part by part.
        `is_public`: it needs neither a token nor a place. `is_of_both`: Anthropic's API has the path, too, and its
        clients get its form. `makes_jobs`: whoever calls it does not wait for an answer of a model.
        """
        self._may_be_empty, self._is_upload = may_be_empty, is_upload
        # While somebody waits for an answer, few lines of batches start.
        self._has_waiter = has_body and not makes_jobs
        self._route, self._handler, self._has_body, self._is_public = route, handler, has_body, is_public
        self._door, self._errors, self._tracer, self._is_of_both = door, errors, tracer, is_of_both

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises only when its task is cancelled from outside."""
        begin = time.monotonic()
        headers = dict(scope["headers"])
        request_id = accept_request_id(headers.get(REQUEST_ID_KEY.encode(), b"").decode("latin-1"))
        current_request_id.set(request_id)
        # Warnings of the previous request on the connection, if this one was read ahead.
        current_span.set(None)
        span = self._begin_span(headers, scope) if self._tracer is not None and self._has_body else None
        is_anthropic = self._is_of_both and _ANTHROPIC_VERSION in headers
        errors = ANTHROPIC_ERRORS if is_anthropic else self._errors
        exchange = _Exchange(scope, receive, send, self._door, begin, errors)
        exchange.is_anthropic = is_anthropic
        exchange.request_id = request_id
        try:
            await self._answer(exchange, scope, headers)
        except asyncio.CancelledError:
            exchange.status, exchange.reason = 503, "DRAIN_GRACE_OVER"
            raise
        except Exception:
            # It is unknown what was sent: uvicorn answers 500, or hangs up.
            exchange.status, exchange.reason = 500, "INTERNAL"
            raise
        finally:
            trace_id = "" if span is None else _end_span(span, exchange)
            self._door.metrics.requests(self._route, str(exchange.status)).inc()
            seconds = time.monotonic() - begin
            self._door.metrics.duration.observe_traced(seconds, trace_id)
            exchange.log(self._route, seconds)

    async def _answer(self, exchange: _Exchange, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        call: HttpCall | None = None
        door = self._door
        try:
            door.places.check_draining()
            shown = shown_authorization(headers)
            caller = (
                Caller(door.callers.anybody, ANYBODY)
                if self._is_public
                else await self._admit(exchange.connection, headers, shown)
            )
            if self._is_upload:
                with door.places.admitted(), door.places.entered(caller.tenant):
                    call = self._call(exchange, scope, caller, shown, {})
                    call.parts, call.content_type = exchange.parts(), headers.get(b"content-type", b"")
                    exchange.call = call
                    exchange.connection.begin_work()
                    await exchange.take(self._handler, call)
                return
            # A GET seldom has a body; it is read from the connection and dropped.
            with (
                door.places.admitted(),
                exchange.counted_body(caller.tenant) if self._has_body else _NOTHING as counted,
            ):
                sent = await exchange.read_body(headers, counted)
                has_fields = self._has_body and (sent or not self._may_be_empty)
                call = self._call(exchange, scope, caller, shown, await self._parsed(sent) if has_fields else {})
                del sent
                call.counted = counted
                exchange.call = call
                with (
                    _NOTHING if self._is_public else door.places.entered(caller.tenant),
                    door.jobs.pace.caller() if self._has_waiter and door.jobs is not None else _NOTHING,
                ):
                    if not self._is_public:
                        exchange.connection.begin_work()
                    await exchange.run(self._handler, call)
        except PenstockError as error:
            await exchange.refuse(error, call)

    def _call(
        self, exchange: _Exchange, scope: Scope, caller: Caller, shown: bytes | None, body: dict[str, Any]
    ) -> HttpCall:
        placed = scope.get("path_params", {})
        return HttpCall(
            body,
            caller.client,
            self._door.config,
            str(placed.get("name", "")),
            request_id=exchange.request_id,
            header_id=exchange.request_id,
            query=scope.get("query_string", b"").decode("latin-1"),
            is_anthropic=exchange.is_anthropic,
            owner=owner_of(shown),
            tenant=caller.tenant,
            item=str(placed.get("item", "")),
            kept=self._door.kept,
            background=self._door.background,
            jobs=self._door.jobs,
        )

    async def _admit(self, connection: HttpConnection, headers: Mapping[bytes, bytes], shown: bytes | None) -> Caller:
        """Decide from a request's head alone whether the rest is read. Raises PenstockError."""
        door = self._door
        caller = await door.callers.admit(shown)
        if caller.tenant == ANYBODY and not door.hosts.accepts(headers.get(b"host")):
            raise foreign_host()
        if self._has_body:
            _refuse_other_sites(headers, door.config.allowed_origin)
        # No place yet: the request takes one once its body is complete, so a partial body holds none.
        door.places.check(caller.tenant)
        connection.admit()
        return caller

    async def _parsed(self, body: bytes) -> dict[str, Any]:
        """Return a body's JSON object. Raises InvalidArgument."""
        bounds = self._door.body_bounds
        if len(body) <= _PARSED_AT_ONCE_BYTES:
            return parse_object(body, bounds)
        # One at a time: parsing holds the interpreter lock, and the loop has a turn between two bodies.
        async with self._door.parsing:
            return await asyncio.to_thread(parse_object, body, bounds)

    def _begin_span(self, headers: Mapping[bytes, bytes], scope: Scope) -> Span:
        """Begin the request's span, in the caller's trace if it names one."""
        assert self._tracer is not None
        parent = parse_context(*(headers.get(key.encode(), b"").decode("latin-1") for key in _TRACE_KEYS))
        method = str(scope["method"])
        attributes = {
            "http.request.method": method,
            "http.route": self._route,
            "url.path": self._route,
            "url.scheme": str(scope["scheme"]),
        }
        span = self._tracer.start(f"{method} {self._route}", SpanKind.SERVER, parent, attributes)
        current_span.set(span)
        bind_trace(span.context.trace_id)
        return span


def _end_span(span: Span, exchange: _Exchange) -> str:
    """End the span of a request; return its exemplar."""
    span.set({"http.response.status_code": exchange.status})
    if exchange.reason:
        span.fail(exchange.reason, is_fault=exchange.status >= 500)
    span.end()
    return span.exemplar


def _refuse_other_sites(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> None:
    """Raise HttpError for a page of another origin: a browser sends its text without asking first, and only withholds
    the answer from it.

    Decided by Sec-Fetch-Site (https://www.w3.org/TR/fetch-metadata/), else by Origin and Host. Callers other than
    browsers send neither Sec-Fetch-Site nor Origin.
    """
    origin = headers.get(b"origin")
    if origin is None or "*" in allowed or origin.decode("latin-1") in allowed:
        return
    site = headers.get(b"sec-fetch-site")
    is_own = site in _OWN_SITES if site is not None else origin.partition(b"://")[2] == headers.get(b"host")
    if not is_own:
        raise HttpError(403, "a page of another origin (--allowed-origin allows it)", reason="ORIGIN_NOT_ALLOWED")


class _Exchange:
    """The reader's side of one request."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        door: Door,
        begin: float,
        errors: ErrorShape,
    ) -> None:
        self.connection = connection_of(scope)
        self.status = 0
        # Reason of the error that ended it, for the span.
        self.reason = ""
        self.request_id = ""
        self.is_anthropic = False
        # Field of that error, and the call once the body was read, for the log.
        self.field: str | None = None
        self.call: HttpCall | None = None
        self._scope, self._receive, self._send = scope, receive, send
        self._config, self._metrics, self._begin, self._errors = door.config, door.metrics, begin, errors
        self._task = asyncio.current_task()
        self._bodies, self._log = door.bodies, door.log
        # True once the body is complete.
        self._has_read = False
        self._is_given_up = self._is_gone = False
        self._has_stalled = False
        # The next look at a reader that takes nothing.
        self._look: asyncio.TimerHandle | None = None
        # Start time of the send in progress.
        self._sending_since: float | None = None

    def log(self, route: str, seconds: float) -> None:
        """Write the request's line into the log."""
        call = self.call
        log_request(
            route,
            self.status,
            seconds,
            request_id=self.request_id if call is None else call.shown_id,
            reason=self.reason,
            field=self.field,
            tokens=None if call is None else call.tokens,
            log=self._log,
        )

    def counted_body(self, tenant: str) -> Body:
        """Count the bytes of a tenant's body during the block."""
        return self._bodies.open(self._give_up, tenant)

    def _give_up(self) -> None:
        """Stop reading a body: others need its room."""
        self._is_given_up = True
        if self._task is not None:
            self._task.cancel()

    async def read_body(self, headers: Mapping[bytes, bytes], counted: Body | None) -> bytes:
        """Return the body of an admitted request; with `counted` None it is dropped. Raises HttpError."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._config.max_body_bytes):
            raise self._too_large()
        try:
            if self.connection.is_receiving:
                async with asyncio.timeout(self._config.body_seconds):
                    body = await self._received(counted)
            else:
                # It has come with its head, and there is nothing to wait for.
                body = await self._received(counted)
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {self._config.body_seconds:g} s", reason="BODY_TIMEOUT"
            ) from None
        except asyncio.CancelledError:
            if not self._is_given_up or self._task is None or self._task.uncancel():
                raise
            raise HttpError(
                429,
                "the body came too slowly while others needed its room (--max-bodies-bytes)",
                reason="MAX_REQUESTS",
                retry_after_seconds=1.0,
            ) from None
        self._has_read = True
        if counted is not None:
            counted.whole()
        return body

    async def _received(self, counted: Body | None) -> bytes:
        """Read a body to its end. Raises HttpError."""
        most, size, body = self._config.max_body_bytes, 0, bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                raise HttpError(_GONE, "the caller left", reason="CLIENT_GONE")
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise self._too_large()
            is_last = not message.get("more_body", False)
            if counted is not None:
                counted.take(len(part))
                if is_last and not body:
                    return bytes(part)
                body += part
            if is_last:
                return bytes(body)

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body has more than {self._config.max_body_bytes} bytes (--max-body-bytes)",
            reason="BODY_TOO_LARGE",
        )

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of an upload as they arrive; the next is read when this one is done. Raises HttpError."""
        seconds = self._config.upload_seconds
        end = asyncio.get_running_loop().time() + seconds
        while not self._has_read:
            try:
                async with asyncio.timeout_at(end):
                    message = await self._receive()
            except TimeoutError:
                raise HttpError(
                    408, f"the file did not arrive within {seconds:g} s (--upload-seconds)", reason="BODY_TIMEOUT"
                ) from None
            if message["type"] == "http.disconnect":
                self._is_gone = True
                raise HttpError(_GONE, "the caller left", reason="CLIENT_GONE")
            self._has_read = not message.get("more_body", False)
            yield message.get("body", b"")

    async def take(self, handler: Handler, call: HttpCall) -> None:
        """Let the handler read an upload, and send its answer. Raises PenstockError."""
        answer = await known_errors(handler(call))
        assert isinstance(answer, bytes)
        await self._send_whole(200, answer, call.headers())

    async def run(self, handler: Handler, call: HttpCall) -> None:
        """Let the handler answer while there is a reader. Raises PenstockError while nothing is sent."""
        self.connection.follow(self)
        try:
            answer = await known_errors(handler(call))
            if isinstance(answer, bytes):
                await self._send_whole(200, answer, call.headers())
            elif isinstance(answer, FileContent):
                await self._send_file(answer, call)
            else:
                await self._stream(answer, call)
        except asyncio.CancelledError:
            if not self._is_gone or self._task is None or self._task.uncancel():
                raise
            self.status, self.reason = _GONE, "CLIENT_GONE"
            (self._metrics.stalled if self._has_stalled else self._metrics.left).inc()
        finally:
            self.connection.unfollow(self)
            if self._look is not None:
                self._look.cancel()

    def leave(self) -> None:
        """Cancel the request: its reader has gone."""
        self._is_gone = True
        if self._task is not None:
            self._task.cancel()

    def pause(self) -> None:
        """Look from time to time whether the reader takes anything again."""
        if self._look is None:
            seconds = self._config.stalled_reader_seconds / _LOOKS
            self._look = asyncio.get_running_loop().call_later(seconds, self._look_at_reader)

    def _look_at_reader(self) -> None:
        """Cancel the request if its reader has taken nothing for too long."""
        self._look = None
        since = self._sending_since
        stalled = self._config.stalled_reader_seconds
        if since is not None and asyncio.get_running_loop().time() - since > stalled:
            self._has_stalled = True
            self.connection.unfollow(self)
            self.connection.abort()
            self.leave()
        elif self.connection.is_full:
            self.pause()

    async def _send_file(self, file: FileContent, call: HttpCall) -> None:
        """Send a file. One that is removed meanwhile ends the connection: its reader sees that it is cut short."""
        length = (b"content-length", str(file.num_bytes).encode())
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_FILE, length, *call.headers()]})
        async with contextlib.aclosing(cast("AsyncGenerator[bytes]", file.pieces)) as pieces:
            async for piece in pieces:
                await self._send_piece(piece)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, answer: Followed | AsyncIterator[bytes], call: HttpCall) -> None:
        """Send pieces as they come. The status follows the first piece: until then an error can have its own status."""
        try:
            first = await known_errors(answer.first() if isinstance(answer, Followed) else anext(answer))
            self._metrics.first_token.observe_traced(time.monotonic() - self._begin, exemplar())
            self.status = 200
            self.connection.hold_head()
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *call.headers()]})
            await self._send({"type": "http.response.body", "body": first, "more_body": True})
            last = b""
            try:
                if isinstance(answer, Followed):
                    last = await self._follow(answer)
                else:
                    await self._send_pieces(answer)
            except (PenstockError, grpc.RpcError) as error:
                # The status was sent: the error is an event, and no [DONE] follows it.
                known = error if isinstance(error, PenstockError) else from_rpc_error(error)
                self.status, self.reason, self.field = status_of(known), known.reason, known.field
                last = self._errors.last_event(known, call.names)
            except Exception:
                _log.exception("a stream failed", route=self._scope.get("path"))
                self.status, self.reason = 500, "INTERNAL"
                last = self._errors.last_event(internal(), call.names)
            await self._send_piece(last, is_last=True)
        finally:
            if isinstance(answer, Followed):
                answer.stream.close()
            elif (close := getattr(answer, "aclose", None)) is not None:
                await close()

    async def _follow(self, answer: Followed) -> bytes:
        """Write events in the turn in which their deltas come, while the connection takes them. Return the last one."""
        write, left = self.connection.write_piece, b""

        def take(deltas: list[Delta]) -> bool:
            nonlocal left
            piece = answer.of(merged(deltas))
            if not piece or write(piece):
                return True
            left = piece
            return False

        while not await answer.stream.run(take):
            await self._send_piece(left)
        return await answer.end()

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            await self._send_piece(piece)

    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        self._begin_send()
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        self._sending_since = None

    def _begin_send(self) -> None:
        """Note the time of a send that has to wait."""
        if self.connection.is_full:
            self._sending_since = asyncio.get_running_loop().time()

    async def refuse(self, error: PenstockError, call: HttpCall | None) -> None:
        """Answer with an error."""
        self.status, self.reason, self.field = status_of(error), error.reason, error.field
        if self._is_gone:
            return
        headers = [*error_headers(error), *(call.headers() if call is not None else _id_header(self.request_id))]
        if not self._has_read and self.connection.is_receiving:
            # The rest of the body is not read.
            headers.append((b"connection", b"close"))
        names = call.names if call is not None else {}
        await self._send_whole(self.status, self._errors.body(error, names), headers)

    async def _send_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        length = (b"content-length", str(len(body)).encode())
        self.connection.hold_head()
        await self._send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
        self._begin_send()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._sending_since = None
