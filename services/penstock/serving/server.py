"""Life of a process with one service: listen, load, serve, drain, stop.

The server listens before the service loads, so that probes get an answer (NOT_SERVING) from the start. SIGTERM and
SIGINT turn health NOT_SERVING, drain the service within the grace, and end with exit code 0; a service that fails turns
health NOT_SERVING and ends with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import grpc
from prometheus_client import CollectorRegistry

from penstock.common.addresses import BoundAddresses, join_address, require_free_port
from penstock.common.config import ProcessConfig, ServerConfig
from penstock.common.credentials import BearerTokens, TokenFile
from penstock.common.errors import StartupError
from penstock.common.event_loop import running_loop_name
from penstock.common.logging import get_logger
from penstock.common.metrics import GrpcServerMetrics, add_process_metrics
from penstock.serving.descriptors import raise_descriptor_limit
from penstock.serving.health import Health, add_reflection
from penstock.serving.health_socket import HealthSocket
from penstock.serving.interceptors import CallInterceptor
from penstock.serving.loop_errors import LoopErrors
from penstock.serving.metrics_endpoint import METRICS_TOKENS, BoundMetrics, start_on_first_free
from penstock.serving.transport import make_transport

if TYPE_CHECKING:
    from penstock.serving.trace_export import Tracing

# Seconds after the drain for the last messages to be sent. Then streams that never end on their own (health watches,
# sessions) are cancelled.
STOP_GRACE_SECONDS = 0.5
# Address at which workers serve metrics to their parent.
LOOPBACK = "127.0.0.1"

_log = get_logger("penstock.server")


class Service(Protocol):
    """A service that a process serves. It is made inside the event loop; all methods are called on that loop."""

    name: str
    grpc_services: tuple[str, ...]
    failed: asyncio.Future[BaseException]

    async def start(self) -> None:
        """Load and warm up. Health stays NOT_SERVING until it returns. Raises StartupError."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers; called once, before the server listens."""

    async def drain(self) -> None:
        """Refuse new work (Unavailable, reason DRAINING) and return when live work is done."""

    async def close(self) -> None:
        """Free everything; called once, after the server stopped, even if start() failed or was cancelled."""

    def status_lines(self) -> list[str]:
        """Return facts for the start-up print, known after start(): model, KV pool, peers."""


@runtime_checkable
class ControlsHealth(Protocol):
    """A service that turns its health off and on while the process lives (Drain and Resume)."""

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Take `set_serving`; called once, before start(). It shows SERVING only once start() has returned."""


@runtime_checkable
class HasControlServices(Protocol):
    """A service with gRPC services that answer while the process is up, even if it wants no calls."""

    control_services: tuple[str, ...]


@runtime_checkable
class HasTokens(Protocol):
    """A service with gRPC services or methods that accept other bearer tokens than those of --auth-token-file."""

    def token_files(self) -> Mapping[str, BearerTokens]:
        """Read them, by the gRPC service's name, a method's ("/package.Service/Name"), "" for all others, or
        METRICS_TOKENS for the metrics port; called once, before the server is made. Raises StartupError."""


@runtime_checkable
class ChecksCallers(Protocol):
    """A service that finds out in its handlers who calls: another process knows the tokens.

    A handler calls `vouch` of a call that it lets in.
    """

    def is_known(self, authorization: str | bytes | None) -> bool:
        """True for a caller that was let in a moment ago; others' calls are bounded as strangers' until `vouch`."""


class OwnServer(ABC):
    """A service that is its own server, without gRPC: its counterpart to RunningServer."""

    name: str
    failed: asyncio.Future[BaseException]

    @property
    @abstractmethod
    def addresses(self) -> BoundAddresses:
        """Addresses after `listen`."""

    @abstractmethod
    async def listen(self) -> BoundAddresses:
        """Open the port. Raises StartupError naming the flag."""

    @abstractmethod
    async def start(self) -> None:
        """Return once it serves. Raises StartupError."""

    @abstractmethod
    async def stop(self, *, drain: bool = True) -> None:
        """Drain within the grace, stop, close. It is safe at any point of the life."""

    @abstractmethod
    def status_lines(self) -> list[str]:
        """Return facts for the start-up print, known after start()."""


class RunningServer:
    """A service behind its server. `run_until_stopped` is for processes, `serve_in_process` for tests."""

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        registry: CollectorRegistry | None = None,
        *,
        is_worker: bool = False,
    ) -> None:
        """Make it. `is_worker`: it shares its port with others, and only the parent reads its metrics.

        Raises StartupError for an invalid configuration.
        """
        config.validate()
        self.service = service
        self.config = config
        self._is_worker = is_worker
        self.registry = registry if registry is not None else CollectorRegistry()
        control = service.control_services if isinstance(service, HasControlServices) else ()
        self.health = Health(service.grpc_services, control)
        tokens = TokenFile(config.auth_token_file, "--auth-token-file") if config.auth_token_file else None
        self._tracing = open_tracing(config, service.name)
        own_tokens = service.token_files() if isinstance(service, HasTokens) else {}
        self._metrics_tokens = own_tokens.get(METRICS_TOKENS)
        self.calls = CallInterceptor(
            GrpcServerMetrics(self.registry),
            tracer=self._tracing,
            tokens=tokens,
            service_tokens=own_tokens,
            max_concurrent_rpcs=config.max_concurrent_rpcs,
            max_message_fields=config.max_message_fields,
            is_known=service.is_known if isinstance(service, ChecksCallers) else None,
        )
        self._server = make_transport(config).make_server(
            config,
            # Calls beyond max_concurrent_rpcs are refused with pushback; health checks have their own places.
            max_calls=config.max_concurrent_rpcs + config.anonymous_rpcs,
            wrap=self.calls.wrap,
            shares_port=is_worker,
            admit=self.calls.admit,
        )
        self._metrics: BoundMetrics | None = None
        self._health_socket: HealthSocket | None = None
        if config.health_socket and not is_worker:
            self._health_socket = HealthSocket(config.health_socket, lambda: self.health.is_serving)
        self._addresses: BoundAddresses | None = None

    @property
    def addresses(self) -> BoundAddresses:
        """Addresses of gRPC and metrics. Raises RuntimeError before `listen`."""
        if self._addresses is None:
            raise RuntimeError("not listening yet")
        return self._addresses

    @property
    def address(self) -> str:
        """Address of gRPC, `host:port`."""
        return self.addresses.grpc

    async def listen(self) -> BoundAddresses:
        """Open the ports; health answers NOT_SERVING. Raises StartupError naming --port, --host or --metrics-port."""
        await self.register()
        return await self.bind()

    async def register(self) -> None:
        """Add all servicers; the first half of `listen`."""
        # Generated code is typed for grpc.aio's server.
        server = cast("grpc.aio.Server", self._server)
        await self.health.add_to(server)
        if isinstance(self.service, ControlsHealth):
            self.service.bind_health(self.health.set_wanted)
        self.service.register(server)
        add_reflection(server, self.service.grpc_services)

    async def bind(self) -> BoundAddresses:
        """Open the ports; the second half of `listen`."""
        try:
            port = await self._server.open_port()
        except OSError as error:
            raise _bind_error(self.config) from error
        host, config = (LOOPBACK, None) if self._is_worker else (self.config.host, self.config)
        if ports := self.config.metrics_ports:
            add_process_metrics(self.registry)
            self._metrics = start_on_first_free(
                self.registry,
                host,
                ports,
                is_ready=lambda: self.health.is_serving,
                config=config,
                tokens=None if self._is_worker else self._metrics_tokens,
            )
        if self._health_socket is not None:
            await self._health_socket.open()
        await self._server.start()
        metrics = join_address(host, self._metrics.port) if self._metrics else None
        self._addresses = BoundAddresses(join_address(self.config.host, port), metrics)
        _log.info("listening", grpc=self._addresses.grpc, metrics=metrics, event_loop=running_loop_name())
        return self._addresses

    async def start(self) -> None:
        """Load the service, then show SERVING."""
        await self.service.start()
        await self.health.set_up(True)
        _log.info("ready", service=self.service.name)

    async def stop(self, *, drain: bool = True) -> None:
        """Turn NOT_SERVING, drain within the grace, stop, close. It is safe at any point of the life.

        Without `drain` live calls have STOP_GRACE_SECONDS to end on their own.
        """
        await self.health.set_up(False)
        if drain:
            await self._drain()
        await self._server.stop(STOP_GRACE_SECONDS)
        await self.service.close()
        if self._health_socket is not None:
            await self._health_socket.close()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._tracing is not None:
            # It sends the remaining spans, and waits for that.
            await asyncio.to_thread(self._tracing.close)

    async def _drain(self) -> None:
        _log.info("draining", calls=self.calls.in_flight)
        try:
            async with asyncio.timeout(self.config.drain_grace_seconds):
                await self.service.drain()
        except TimeoutError:
            _log.warning("drain grace is over, live calls end now", calls=self.calls.in_flight)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                await self.calls.wait_idle()


async def run_until_stopped(
    service: Service | OwnServer,
    config: ProcessConfig,
    *,
    registry: CollectorRegistry | None = None,
    on_listening: Callable[[BoundAddresses], None] | None = None,
    on_ready: Callable[[BoundAddresses], None] | None = None,
    gate: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or a failure of the service; return the process's exit code.

    With `gate` it is one of several workers on a port. It loads first, and opens its port once `gate` returns, since
    callers could not avoid a worker that is still loading.

    Raises StartupError when it cannot start; everything is closed by then.
    """
    raise_descriptor_limit()
    running: RunningServer | OwnServer
    if isinstance(service, OwnServer):
        running = service
    else:
        running = RunningServer(service, cast("ServerConfig", config), registry, is_worker=gate is not None)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())
    signalled: asyncio.Future[None] = loop.create_future()
    with _signals(lambda: None if signalled.done() else signalled.set_result(None)):
        try:
            if gate is None or isinstance(running, OwnServer):
                addresses = await running.listen()
                if on_listening is not None:
                    on_listening(addresses)
                loading = running.start()
            else:
                loading = _load_as_worker(running, gate)
            if not await _unless(signalled, loading):
                await running.stop(drain=False)
                return 0
            addresses = running.addresses
        except BaseException:
            await running.stop(drain=False)
            raise
        if on_ready is not None:
            on_ready(addresses)
        ends: list[asyncio.Future[Any]] = [signalled, service.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if service.failed.done():
            _log.error("service failed, stopping", exc_info=service.failed.result())
            await running.stop(drain=False)
            return 1
        await running.stop()
        _log.info("stopped")
        return 0


@contextlib.asynccontextmanager
async def serve_in_process(
    service: Service, config: ServerConfig, registry: CollectorRegistry | None = None
) -> AsyncIterator[RunningServer]:
    """Run a ready server on free ports, for tests: the code of a real process, in this one."""
    running = RunningServer(service, dataclasses.replace(config, port=0, metrics_port=0), registry)
    try:
        await running.listen()
        await running.start()
        yield running
    finally:
        await running.stop(drain=False)


async def _load_as_worker(running: RunningServer, gate: Callable[[], Awaitable[None]]) -> None:
    await running.register()
    await running.start()
    await gate()
    await running.bind()


async def _unless(stop: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`; return False when `stop` came first and the work was cancelled. Raises the work's error."""
    task = asyncio.create_task(work)
    try:
        both: list[asyncio.Future[None]] = [stop, task]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def open_tracing(config: ProcessConfig, service: str) -> Tracing | None:
    """Make the tracer of a process, None without --tracing-endpoint. OpenTelemetry is imported here.

    Raises StartupError, also if it is not installed.
    """
    if config.tracing_endpoint is None:
        return None
    try:
        from penstock.serving.trace_export import start_tracing
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            raise
        raise StartupError(
            f"traces need {error.name}: pip install 'penstock[tracing]'", flag="--tracing-endpoint"
        ) from error
    return start_tracing(config, service)


def _bind_error(config: ServerConfig) -> StartupError:
    """Find the reason why the port could not be opened: grpc does not give it, a plain socket does."""
    try:
        require_free_port(config.host, config.port, "--port")
    except StartupError as error:
        return error
    if config.is_tls:
        return StartupError("--tls-cert and --tls-key are not a certificate chain and its key (PEM)", flag="--tls-cert")
    return StartupError(f"cannot listen on {join_address(config.host, config.port)}", flag="--port")
