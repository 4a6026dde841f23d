"""uvicorn's HTTP/1.1 with the bounds that it lacks: connections, size and time of headers, readers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.common.addresses import join_address, require_free_port
from penstock.common.credentials import tls_context
from penstock.common.errors import StartupError
from penstock.gateway.config import GatewayConfig

# Key of the request's scope: a function that cuts its connection off, unsent bytes and all.
ABORT = "penstock.abort"
# Another: `_BoundedProtocol.write_piece` of its connection.
WRITE = "penstock.write"


class _BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    bounds: GatewayConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.bounds.max_connections:
            transport.abort()
            return
        # Else the system takes megabytes for a reader that has stopped, at the full speed of the stream.
        own = transport.get_extra_info("socket")
        if own is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.bounds.max_unsent_bytes)
        self._await_head()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.bounds.header_seconds, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)
        # Without a timer the headers are whole.
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.max_header_bytes:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}, WRITE: {"call": self.write_piece}}

    def write_piece(self, piece: bytes) -> bool:
        """Send a piece of an answer in chunks whose head has been sent, in one system call and without a coroutine.

        False: it must wait, or nobody reads any more: ASGI's `send` does either. The per-token path.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        if not piece:
            # A chunk of no bytes would end the answer.
            return True
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def on_headers_complete(self) -> None:
        self._head_is_whole()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_whole()
        super().connection_lost(exc)

    def _head_is_whole(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _is_fault(record: logging.LogRecord) -> bool:
    """False for a request that `HttpServer.close` ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class HttpServer:
    """Server of one ASGI application. Belongs to one event loop."""

    def __init__(self, app: Any, config: GatewayConfig) -> None:
        log = logging.getLogger("uvicorn.error")
        # Its warnings are a line for each connection that a scanner spoils; its errors are faults of ours.
        log.setLevel(logging.ERROR)
        log.addFilter(_is_fault)
        self._bounds = config
        self._config = Config(
            app,
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=max(1, round(config.idle_seconds)),
        )
        self._config.load()
        self._state = ServerState()
        self._protocol = type("_Protocol", (_BoundedProtocol,), {"bounds": config})
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._state.connections)

    async def listen(self) -> str:
        """Open the port; return its address, host:port. Raises StartupError naming --port, --host or a TLS flag."""
        config = self._bounds
        try:
            context = tls_context(config, alpn=()) if config.is_tls else None
        except OSError as error:
            raise StartupError(
                "--tls-cert and --tls-key are not a certificate chain and its key (PEM)", flag="--tls-cert"
            ) from error
        require_free_port(config.host, config.port, "--port")
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: self._protocol(config=self._config, server_state=self._state, app_state={}),
                config.host.strip("[]"),
                config.port,
                ssl=context,
                ssl_handshake_timeout=config.header_seconds if context else None,
                backlog=1024,
            )
        except OSError as error:
            raise StartupError(f"cannot listen on {join_address(config.host, config.port)}", flag="--port") from error
        return join_address(config.host, self._server.sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        """Take no further connection; those that have no request are closed, others after their answer."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def close(self, seconds: float) -> None:
        """End what is left: after `seconds` connections are cut off."""
        self.stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if tasks := set(self._state.tasks):
                    await asyncio.wait(tasks)
        for connection in list(self._state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        for task in set(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
