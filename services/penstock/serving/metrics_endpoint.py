"""HTTP endpoint beside gRPC: /metrics for Prometheus, /healthz and /readyz for probes, 404 elsewhere.

Probes need no credentials. /metrics needs one of the server's bearer tokens if it has any.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from errno import EADDRINUSE
from functools import partial
from socket import AI_PASSIVE, SHUT_RDWR, SOCK_STREAM, getaddrinfo, socket
from socketserver import TCPServer
from ssl import SSLError
from typing import TYPE_CHECKING, Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from penstock.common.addresses import PortTaken, join_address
from penstock.common.config import ServerConfig
from penstock.common.credentials import BearerTokens, TokenFile, tls_context
from penstock.common.errors import PenstockError, StartupError
from penstock.http2.strangers import network_of_peer
from penstock.serving.loop_errors import LACKS
from penstock.serving.metrics_callers import MetricsCallers

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Copied for each answer: wsgiref adds to the list.
_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
# Seconds of work for a connection beside its own thread's: its acceptance, and the thread's begin and end.
_CONNECTION_SECONDS = 0.0002
# Seconds before another attempt at a connection that could not be accepted.
_ACCEPT_WAIT = 0.2


@dataclass
class BoundMetrics:
    """A running endpoint."""

    host: str
    port: int
    _server: WSGIServer = field(repr=False)

    def close(self) -> None:
        """Stop answering; the port is free within half a second, since the server checks that often."""
        threading.Thread(target=self._shut_down, name="metrics-close", daemon=True).start()

    def _shut_down(self) -> None:
        self._server.shutdown()
        self._server.server_close()


# Name of the tokens of /metrics among those of a service (serving.server.HasTokens).
METRICS_TOKENS = "/metrics"


def start_metrics_server(
    registry: CollectorRegistry,
    host: str,
    port: int,
    *,
    is_ready: Callable[[], bool],
    config: ServerConfig | None = None,
    tokens: BearerTokens | None = None,
) -> BoundMetrics:
    """Serve `registry` at http(s)://host:port/metrics from daemon threads; port 0 takes a free one.

    `is_ready` answers /readyz. With `config` it uses its certificate, key, client CA, tokens and bounds. `tokens`
    replace those of `config`.
    Raises StartupError naming --metrics-port or a file's flag.
    """
    # They add a series for every counter and histogram, and say no more than process_start_time_seconds.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    if tokens is None and config is not None and config.auth_token_file:
        tokens = TokenFile(config.auth_token_file, "--auth-token-file")
    context = tls_context(config, alpn=()) if config is not None and config.is_tls else None
    try:
        family, *_ = getaddrinfo(host.strip("[]"), port, type=SOCK_STREAM, flags=AI_PASSIVE)[0]
        bounds = config or ServerConfig()
        # Without tokens nobody is a stranger.
        callers = MetricsCallers(bounds.metrics_max_connections, bounds.anonymous_cpu_share if tokens else None)
        server_class = type("_Server", (_Server,), {"address_family": family, "callers": callers, "tokens": tokens})
        # Also the limit of its socket, for every read and write.
        handler_class = type("_Handler", (_Handler,), {"timeout": bounds.metrics_request_seconds})
        server: WSGIServer = make_server(
            host.strip("[]"),
            port,
            _pages(make_wsgi_app(registry), is_ready, tokens),
            server_class,
            handler_class=handler_class,
        )
    except OSError as error:
        raise StartupError(
            f"cannot serve metrics on {join_address(host, port)}: {error.strerror or 'failed'}", flag="--metrics-port"
        ) from error
    if context is not None:
        # The connection's own thread does the handshake, so a silent caller holds up nobody else.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return BoundMetrics(host, server.server_port, server)


def start_on_first_free(
    registry: CollectorRegistry,
    host: str,
    ports: Sequence[int],
    *,
    is_ready: Callable[[], bool],
    config: ServerConfig | None = None,
    tokens: BearerTokens | None = None,
) -> BoundMetrics:
    """Serve at the first of `ports` that nobody has, as `start_metrics_server`, which says what it raises.

    Raises PortTaken where somebody has each.
    """
    for port in ports:
        try:
            return start_metrics_server(registry, host, port, is_ready=is_ready, config=config, tokens=tokens)
        except StartupError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == EADDRINUSE):
                raise
    raise PortTaken(host, ports[-1], "--metrics-port")


def _pages(metrics: WSGIApplication, is_ready: Callable[[], bool], tokens: BearerTokens | None) -> WSGIApplication:
    """Make the application of the three pages."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/healthz":
            start_response("200 OK", [*_TEXT])
            return [b"ok\n"]
        if path == "/readyz":
            ready = is_ready()
            start_response("200 OK" if ready else "503 Service Unavailable", [*_TEXT])
            return [b"ready\n" if ready else b"not ready\n"]
        if path != "/metrics":
            start_response("404 Not Found", [*_TEXT])
            return [b"/metrics, /healthz or /readyz\n"]
        if tokens is not None and not _accepts(tokens, environ.get("HTTP_AUTHORIZATION")):
            start_response("401 Unauthorized", [*_TEXT, ("WWW-Authenticate", "Bearer")])
            return [f"/metrics needs {tokens.wanted}\n".encode()]
        return metrics(environ, start_response)

    return application


def _accepts(tokens: BearerTokens, authorization: str | None) -> bool:
    try:
        return tokens.accepts(authorization)
    except PenstockError:
        return False


class _Server(ThreadingWSGIServer):
    """Server with limits on its callers: one without a place is closed at once."""

    callers: ClassVar[MetricsCallers]
    tokens: ClassVar[BearerTokens | None]
    # Connections that wait to be accepted while others are.
    request_queue_size = 128

    def get_request(self) -> tuple[socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            # The connection stays pending: retrying without a pause would take a whole processor.
            if error.errno in LACKS:
                time.sleep(_ACCEPT_WAIT)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        network = network_of_peer(client_address)
        if not self.callers.enter(request, network, partial(_hang_up, request)):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.callers.leave(request, network, 0.0)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        begin = time.thread_time()
        try:
            super().process_request_thread(request, client_address)
        finally:
            seconds = _CONNECTION_SECONDS + time.thread_time() - begin
            self.callers.leave(request, network_of_peer(client_address), seconds)

    def server_bind(self) -> None:
        # http.server asks the name service for the host's name here, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Log nothing: a caller that hangs up, is silent or does not speak TLS is not this process's error."""


class _Handler(WSGIRequestHandler):
    server: _Server
    timeout: ClassVar[float]

    def setup(self) -> None:
        super().setup()
        self.wfile.write = _of_tls(self.wfile.write)  # type: ignore[method-assign]
        # A caller that sends an occasional byte would keep its place for ever.
        self._limit = threading.Timer(self.timeout, _hang_up, (self.connection,))
        self._limit.daemon = True
        self._limit.start()

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self._limit.cancel()
        if parsed:
            tokens = self.server.tokens
            is_trusted = tokens is None or _accepts(tokens, self.headers.get("Authorization"))
            self.server.callers.ask(self.connection, is_trusted=is_trusted)
        return parsed

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def address_string(self) -> str:
        # The default asks the name service, for every request.
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""


def _hang_up(connection: socket) -> None:
    """Let the thread that reads a connection find its end."""
    with contextlib.suppress(OSError):
        # Not SSLSocket's own method: it would remove TLS under the reading thread.
        socket.shutdown(connection, SHUT_RDWR)


def _of_tls(write: Callable[[Any], int]) -> Callable[[Any], int]:
    """Make a caller that left over TLS look like one without TLS: for any other error wsgiref prints a traceback."""

    def write_or_leave(data: Any) -> int:
        try:
            return write(data)
        except SSLError as error:
            raise ConnectionAbortedError("the caller has left") from error

    return write_or_leave
