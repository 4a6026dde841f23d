"""One HTTP request from its headers to its end: bounds, body, answer or stream, errors, readers that leave or stop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from penstock_client import AsyncClient, Delta

from penstock.common.credentials import bearer_token
from penstock.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PenstockError,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from penstock.common.logging import bind_trace, get_logger
from penstock.common.request_context import REQUEST_ID_KEY, accept_request_id, current_request_id
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
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import OPENAI_ERRORS, ErrorShape, HttpError, error_headers, internal, status_of
from penstock.gateway.followed import Followed
from penstock.gateway.http_server import ABORT, WRITE
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.response_store import ResponseStore

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
# Whole answer as JSON, or an answer in pieces.
Answer = bytes | Followed | AsyncIterator[bytes]

_JSON = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the pieces.
    (b"x-accel-buffering", b"no"),
]
_TRACE_KEYS = (TRACEPARENT_KEY, TRACESTATE_KEY)
_GONE = 499
# Values of Sec-Fetch-Site for requests that no other site's page has sent.
_OWN_SITES = (b"same-origin", b"none")
_log = get_logger("penstock.gateway")


@dataclass(slots=True)
class HttpCall:
    """Facts of a request for its handler, and of the answer from it."""

    body: dict[str, Any]
    client: AsyncClient
    config: GatewayConfig
    # Last part of a path such as /v1/models/NAME.
    tail: str = ""
    # Option -> the name by which the request set it.
    names: dict[str, str] = field(default_factory=dict)
    # Fields that nothing reads.
    ignored: list[str] = field(default_factory=list)
    # That of the caller, or a new one; later that of the router, where several requests are made of this one.
    request_id: str = ""
    # Query of the URL.
    query: str = ""
    # Bearer token with its scheme.
    authorization: bytes | None = None
    # None: /v1/responses keeps none.
    responses: ResponseStore | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that every answer has."""
        found = _id_header(self.request_id)
        if self.ignored:
            shown = [name for name in self.ignored if name.isascii() and name.isprintable()]
            listed = ", ".join(name[:64] for name in shown[: self.config.max_ignored_fields])
            found.append((b"x-penstock-ignored-fields", listed.encode()))
        return found


Handler = Callable[[HttpCall], Awaitable[Answer]]


def _id_header(request_id: str) -> list[tuple[bytes, bytes]]:
    return [(REQUEST_ID_KEY.encode(), request_id.encode("ascii", "ignore"))] if request_id else []


def _authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the caller's bearer token with its scheme; Anthropic's clients send theirs as x-api-key."""
    shown = headers.get(b"authorization")
    if shown is None and b"x-api-key" in headers:
        return b"Bearer " + headers[b"x-api-key"]
    return shown


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata for a call to the router: the request's id, and the trace that it belongs to."""
    request_id = current_request_id.get()
    return (*(((REQUEST_ID_KEY, request_id),) if request_id else ()), *outgoing())


class Clients:
    """Clients of the router: one connection, a view of it for each caller's token."""

    def __init__(self, client: AsyncClient, config: GatewayConfig) -> None:
        self._client = client
        host = config.router.rpartition(":")[0].strip("[]")
        # A token must not travel in the clear; a router without tokens does not miss it.
        self._passes_tokens = config.is_channel_tls or host in ("localhost", "127.0.0.1", "::1")

    @property
    def passes_tokens(self) -> bool:
        """True when callers' tokens reach the router."""
        return self._passes_tokens

    def of(self, authorization: bytes | None) -> AsyncClient:
        """Return the client for a caller with this header. Raises Unauthenticated for a token that is none."""
        token = bearer_token(authorization)
        if not token or not self._passes_tokens:
            return self._client
        try:
            text = token.decode("ascii")
        except UnicodeDecodeError:
            text = "\n"
        if not text.isprintable():
            raise Unauthenticated("the bearer token has characters that no token has", reason="UNAUTHENTICATED")
        return self._client.with_token(text)


class Places:
    """Bound on requests at work, and the drain."""

    def __init__(self, most: int) -> None:
        self.running = 0
        self.is_draining = False
        self._most = most
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        """Take a place. Raises HttpError 429 at the bound, Unavailable in a drain."""
        if self.is_draining:
            raise Unavailable("the gateway is shutting down", reason="DRAINING", retry_after_seconds=1.0)
        if self.running >= self._most:
            raise HttpError(
                429,
                "as many requests are at work as --max-requests allows",
                reason="MAX_REQUESTS",
                retry_after_seconds=1.0,
            )
        self.running += 1
        self._empty.clear()

    def leave(self) -> None:
        """Give the place back."""
        self.running -= 1
        if not self.running:
            self._empty.set()

    async def drain(self) -> None:
        """Refuse new requests; return once those at work have ended."""
        self.is_draining = True
        await self._empty.wait()


class Endpoint:
    """ASGI application of one route: JSON in, JSON or server-sent events out."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        *,
        clients: Clients,
        config: GatewayConfig,
        places: Places,
        metrics: GatewayMetrics,
        tracer: Tracer | None = None,
        has_body: bool = True,
        errors: ErrorShape = OPENAI_ERRORS,
        responses: ResponseStore | None = None,
    ) -> None:
        """Make it. Without `has_body` it is a GET or DELETE, which no span tells of and every page may send."""
        self._route, self._handler, self._has_body = route, handler, has_body
        self._errors, self._responses = errors, responses
        self._tracer = tracer
        self._clients, self._config, self._places, self._metrics = clients, config, places, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; never raises but when its task is cancelled from outside."""
        begin = time.monotonic()
        headers = dict(scope["headers"])
        request_id = accept_request_id(headers.get(REQUEST_ID_KEY.encode(), b"").decode("latin-1"))
        current_request_id.set(request_id)
        # Of the request before it on the connection, where that was read ahead.
        current_span.set(None)
        span = self._begin_span(headers, scope) if self._tracer is not None and self._has_body else None
        exchange = _Exchange(scope, receive, send, self._config, self._metrics, begin, self._errors)
        exchange.request_id = request_id
        try:
            await self._answer(exchange, scope, headers)
        except asyncio.CancelledError:
            exchange.status, exchange.reason = 503, "DRAIN_GRACE_OVER"
            raise
        except Exception:
            # Nothing is known of what was sent: uvicorn answers 500, or hangs up.
            exchange.status, exchange.reason = 500, "INTERNAL"
            raise
        finally:
            trace_id = "" if span is None else _end_span(span, exchange)
            self._metrics.requests(self._route, str(exchange.status)).inc()
            self._metrics.duration.observe_traced(time.monotonic() - begin, trace_id)

    async def _answer(self, exchange: _Exchange, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        call: HttpCall | None = None
        try:
            self._places.enter()
        except PenstockError as error:
            # The body is not read: uvicorn closes the connection where there is one.
            await exchange.refuse(error, call)
        else:
            try:
                if self._has_body:
                    _refuse_other_sites(headers, self._config.allowed_origin)
                # A GET's body, which hardly one has, is taken off the connection and not looked at.
                sent = await exchange.read_body(headers)
                body = _parsed(sent) if self._has_body else {}
                shown = _authorization(headers)
                client = self._clients.of(shown)
                tail = str(scope.get("path_params", {}).get("name", ""))
                call = HttpCall(
                    body,
                    client,
                    self._config,
                    tail,
                    request_id=exchange.request_id,
                    query=scope.get("query_string", b"").decode("latin-1"),
                    authorization=shown,
                    responses=self._responses,
                )
                await exchange.run(self._handler, call)
            except PenstockError as error:
                await exchange.refuse(error, call)
            finally:
                self._places.leave()

    def _begin_span(self, headers: Mapping[bytes, bytes], scope: Scope) -> Span:
        """Begin the request's span, in the caller's trace where it names one."""
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
    """Raise HttpError for a page of another origin: a browser sends its text without asking first, and only keeps the
    answer from it.

    By Sec-Fetch-Site (https://www.w3.org/TR/fetch-metadata/), else by Origin beside Host. Callers that are no browsers
    send none of them.
    """
    origin = headers.get(b"origin")
    if origin is None or "*" in allowed or origin.decode("latin-1") in allowed:
        return
    site = headers.get(b"sec-fetch-site")
    is_own = site in _OWN_SITES if site is not None else origin.partition(b"://")[2] == headers.get(b"host")
    if not is_own:
        raise HttpError(403, "a page of another origin (--allowed-origin lets it in)", reason="ORIGIN_NOT_ALLOWED")


class _Exchange:
    """The reader's side of one request."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        begin: float,
        errors: ErrorShape,
    ) -> None:
        self.status = 0
        # Reason of the error that it ended with; for the span.
        self.reason = ""
        self.request_id = ""
        self._scope, self._receive, self._send = scope, receive, send
        self._config, self._metrics, self._begin, self._errors = config, metrics, begin, errors
        self._task = asyncio.current_task()
        self._is_gone = False
        self._has_stalled = False
        # Time at which the send under way began.
        self._sending_since: float | None = None

    async def read_body(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the body. Raises HttpError."""
        most, body = self._config.max_body_bytes, bytearray()
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) > most:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._config.body_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self._is_gone = True
                        raise HttpError(_GONE, "the caller left", reason="CLIENT_GONE")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HttpError(
                408, f"the body was not whole within {self._config.body_seconds:g} s", reason="BODY_TIMEOUT"
            ) from None
        return bytes(body)

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body has more than {self._config.max_body_bytes} bytes (--max-body-bytes)",
            reason="BODY_TOO_LARGE",
        )

    async def run(self, handler: Handler, call: HttpCall) -> None:
        """Let the handler answer, as long as there is a reader. Raises PenstockError while nothing is sent."""
        watcher = asyncio.create_task(self._watch())
        try:
            answer = await _checked(handler(call))
            if isinstance(answer, bytes):
                await self._send_whole(200, answer, call.headers())
            else:
                await self._stream(answer, call)
        except asyncio.CancelledError:
            if not self._is_gone or self._task is None or self._task.uncancel():
                raise
            self.status, self.reason = _GONE, "CLIENT_GONE"
            (self._metrics.stalled if self._has_stalled else self._metrics.left).inc()
        finally:
            watcher.cancel()

    async def _watch(self) -> None:
        """Cancel the request when its reader has gone, or takes nothing for too long."""
        stalled, loop = self._config.stalled_reader_seconds, asyncio.get_running_loop()
        gone = asyncio.ensure_future(self._receive())
        try:
            while not gone.done():
                await asyncio.wait([gone], timeout=stalled / 4)
                since = self._sending_since
                if since is not None and loop.time() - since > stalled:
                    self._has_stalled = True
                    self._scope["extensions"][ABORT]["call"]()
                    break
        finally:
            gone.cancel()
        self._is_gone = True
        if self._task is not None:
            self._task.cancel()

    async def _stream(self, answer: Followed | AsyncIterator[bytes], call: HttpCall) -> None:
        """Send pieces as they come. The first is awaited before the status is sent: until then an error has one."""
        try:
            first = await _checked(answer.first() if isinstance(answer, Followed) else anext(answer))
            self._metrics.first_token.observe_traced(time.monotonic() - self._begin, exemplar())
            self.status = 200
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *call.headers()]})
            await self._send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                await (self._follow(answer) if isinstance(answer, Followed) else self._send_pieces(answer))
            except (PenstockError, grpc.RpcError) as error:
                # The status has gone: the error is an event, after which [DONE] does not come.
                known = error if isinstance(error, PenstockError) else from_rpc_error(error)
                self.status, self.reason = status_of(known), known.reason
                last = self._errors.last_event(known, call.names)
                await self._send({"type": "http.response.body", "body": last, "more_body": True})
            except Exception:
                _log.exception("a stream failed", route=self._scope.get("path"))
                self.status, self.reason = 500, "INTERNAL"
                last = self._errors.last_event(internal(), call.names)
                await self._send({"type": "http.response.body", "body": last, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if isinstance(answer, Followed):
                answer.stream.close()
            elif (close := getattr(answer, "aclose", None)) is not None:
                await close()

    async def _follow(self, answer: Followed) -> None:
        """Write events in the turn in which their deltas come, while the connection takes them."""
        write, left = self._scope["extensions"][WRITE]["call"], b""

        def take(deltas: list[Delta]) -> bool:
            nonlocal left
            piece = answer.of(merged(deltas))
            if not piece or write(piece):
                return True
            left = piece
            return False

        while not await answer.stream.run(take):
            await self._send_piece(left)
        await self._send_piece(await answer.end())

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            await self._send_piece(piece)

    async def _send_piece(self, piece: bytes) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending_since = None

    async def refuse(self, error: PenstockError, call: HttpCall | None) -> None:
        """Answer with an error."""
        self.status, self.reason = status_of(error), error.reason
        if self._is_gone:
            return
        headers = [*error_headers(error), *(call.headers() if call is not None else _id_header(self.request_id))]
        if call is None and self.status in (408, 413):
            # What is left of the body is not read.
            headers.append((b"connection", b"close"))
        names = call.names if call is not None else {}
        await self._send_whole(self.status, self._errors.body(error, names), headers)

    async def _send_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        length = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
        self._sending_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._sending_since = None


async def _checked(work: Awaitable[Any]) -> Any:
    """Await `work`. Raises PenstockError for all that goes wrong in it."""
    try:
        return await work
    except PenstockError:
        raise
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed", reason="DEADLINE_EXCEEDED") from error
    except Exception as error:
        _log.exception("a request failed")
        raise internal() from error


def _no_number(name: str) -> float:
    """Refuse NaN and Infinity, which Python reads and JSON has not."""
    raise ValueError(name)


def _parsed(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises InvalidArgument."""
    try:
        parsed = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise InvalidArgument("body", "must be a JSON object (UTF-8)", reason="MALFORMED_MESSAGE") from None
    if not isinstance(parsed, dict):
        raise InvalidArgument("body", "must be a JSON object", reason="MALFORMED_MESSAGE")
    return parsed
