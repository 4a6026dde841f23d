"""Worker processes (`--processes N`): several processes of a service on one port, which share its connections.

The kernel spreads connections over them. The parent holds the port, starts the workers, replaces one that dies, sums
their metrics, and stops them together. It serves no call itself. The workers open the port only once they are loaded;
at the start they all open it at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.cli.console import complain_or_log, say
from penstock.cli.flags import as_flags
from penstock.cli.progress_display import parent_display
from penstock.cli.serve.reports import READY, Report, Reporter
from penstock.cli.serve.supervisor import ServiceEnded, ServiceProcess, Supervisor, first_of
from penstock.common.addresses import BoundAddresses, require_free_port
from penstock.common.config import ServerConfig
from penstock.common.credentials import BearerTokens
from penstock.common.errors import StartupError
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from penstock.common.options import options_of
from penstock.common.progress import StageProgress
from penstock.serving.health_socket import HealthSocket
from penstock.serving.metrics_endpoint import BoundMetrics, start_on_first_free
from penstock.serving.summed_metrics import SummedMetrics

# Seconds before a dead worker is replaced; doubled while its successors also die soon.
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.2, 30.0
# Seconds of life after which a worker's next replacement waits the shortest time again.
STABLE_SECONDS = 60.0
# Options that the parent sets for its workers.
_OWN = ("processes", "port", "metrics_port", "health_socket")
_log = get_logger("penstock.cli")


@contextlib.contextmanager
def shared_port(host: str, port: int) -> Iterator[int]:
    """Hold a port without listening; only processes of this user can share it. Raises StartupError naming --port."""
    if not hasattr(socket, "SO_REUSEPORT") or sys.platform != "linux":
        raise StartupError("several processes on one port need Linux", flag="--processes")
    require_free_port(host, port, "--port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        # Set as the workers set it: connections of the last run, perhaps of one process, may still be closing.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host.strip("[]"), port))
        yield int(holder.getsockname()[1])


class WorkerProcesses:
    """One run of the workers. For the main thread only: see Supervisor."""

    def __init__(self, role: str, given: dict[str, Any], config: ServerConfig, reporter: Reporter) -> None:
        self._role = role
        self._given = given
        self._config = config
        self._reporter = reporter
        self._count: int = getattr(config, "processes", 1)
        self._display = parent_display(config, role)
        self._supervisor = Supervisor(drain_grace_seconds=config.drain_grace_seconds, on_progress=self._on_progress)
        self._metrics = SummedMetrics(with_exemplars=config.tracing_endpoint is not None)
        self._began = time.monotonic()
        self._ended = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Start, serve, stop; return the exit code. Raises StartupError when a worker could not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        endpoint: BoundMetrics | None = None
        health = HealthSocket(self._config.health_socket, self._is_serving) if self._config.health_socket else None
        try:
            async with contextlib.AsyncExitStack() as stack:
                opening = asyncio.create_task(stack.enter_async_context(metrics_tokens_of(self._config)))
                if not await first_of([opening], self._ended, lambda _: None):
                    opening.cancel()
                    await asyncio.gather(opening, return_exceptions=True)
                    return 0
                with shared_port(self._config.host, self._config.port) as port:
                    endpoint = self._open_metrics(opening.result())
                    if health is not None:
                        await health.open()
                    return await self._run_on(port, self._bound(port, endpoint))
        except ServiceEnded as ended:
            complain_or_log(str(ended))
            return ended.exit_code
        finally:
            await self._supervisor.stop_together(self._hurry)
            if health is not None:
                await health.close()
            if endpoint is not None:
                endpoint.close()

    async def _run_on(self, port: int, bound: BoundAddresses) -> int:
        self._reporter.listening(self._role, bound)
        try:
            children = await self._start(port)
        finally:
            self._display.close()
        if not children:
            return 0
        self._show_ready(bound, children)
        return await self._serve(port, children)

    def _is_serving(self) -> bool:
        """True while a worker takes calls."""
        return not self._ended.is_set() and any(child.is_ready for child in self._supervisor.children)

    def _on_progress(self, child: str, progress: StageProgress | None) -> None:
        if progress is None:
            self._display.drop(child)
        elif self._reporter.is_heard:
            self._reporter.progress(progress)
        else:
            self._display.show(progress, child)

    def _signalled(self) -> None:
        (self._hurry if self._ended.is_set() else self._ended).set()

    def _open_metrics(self, tokens: BearerTokens | None) -> BoundMetrics | None:
        config = self._config
        if not config.metrics_ports:
            return None
        registry = CollectorRegistry()
        registry.register(self._metrics)
        return start_on_first_free(
            registry,
            config.host,
            config.metrics_ports,
            is_ready=self._is_serving,
            config=config,
            tokens=tokens,
        )

    def _bound(self, port: int, endpoint: BoundMetrics | None) -> BoundAddresses:
        host = f"[{self._config.host.strip('[]')}]" if ":" in self._config.host else self._config.host
        return BoundAddresses(f"{host}:{port}", f"{host}:{endpoint.port}" if endpoint is not None else None)

    async def _start(self, port: int) -> list[ServiceProcess]:
        """Start all workers and return them when they are ready; none when a signal came first."""
        gate, opener = os.pipe()
        try:
            children = [await self._start_one(slot, port, gate) for slot in range(self._count)]
            if not await first_of([child.loaded for child in children], self._ended, lambda _: None):
                return []
        finally:
            # The end of the pipe opens the gate. Workers that are about to stop must not open the port.
            os.close(opener)
            os.close(gate)
        if not await first_of([child.ready for child in children], self._ended, lambda _: None):
            return []
        for child in children:
            self._add_metrics(child)
        return children

    async def _start_one(self, slot: int, port: int, gate: int | None) -> ServiceProcess:
        bound = {option.name: option for option in options_of(type(self._config))}
        arguments = ["serve", self._role]
        for name, value in self._given.items():
            if name not in _OWN:
                arguments += as_flags(bound[name], value)
        metrics_port = 0 if self._config.metrics_ports else -1
        arguments += ["--processes", "1", "--port", str(port), "--metrics-port", str(metrics_port)]
        arguments += ["--gate-fd", str(-1 if gate is None else gate)]
        name = f"{self._role} {slot + 1}"
        own = [bound[option].env for option in _OWN if option in bound]
        return await self._supervisor.start(name, arguments, without=own, fds=() if gate is None else (gate,))

    def _add_metrics(self, child: ServiceProcess) -> None:
        for address in child.ready.result().metrics.values():
            self._metrics.add(child.name, address)

    async def _serve(self, port: int, children: list[ServiceProcess]) -> int:
        keepers = [asyncio.create_task(self._keep(slot, port, child)) for slot, child in enumerate(children)]
        stop = asyncio.create_task(self._ended.wait())
        await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
        for keeper in keepers:
            if keeper.done():
                keeper.result()  # it ends only by an error
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await self._supervisor.stop_together(self._hurry)
        codes = [child.ended.result() for child in self._supervisor.children]
        # The signal itself killed it: a replacement that did not handle the signal yet, and had no work to finish.
        return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1

    async def _keep(self, slot: int, port: int, child: ServiceProcess) -> None:
        """Replace the worker of `slot` each time it ends."""
        wait = MIN_WAIT_SECONDS
        while True:
            began = time.monotonic()
            await asyncio.shield(child.ended)
            if time.monotonic() - began >= STABLE_SECONDS:
                wait = MIN_WAIT_SECONDS
            complain_or_log(f"{child.name} ended with exit code {child.exit_code}; another one starts in {wait:g} s")
            self._supervisor.children.remove(child)
            self._metrics.retire(child.name)
            name, replacement = child.name, None
            while replacement is None:
                await asyncio.sleep(wait)
                wait = min(2 * wait, MAX_WAIT_SECONDS)
                try:
                    replacement = await self._start_one(slot, port, None)
                except OSError as error:  # no process, file or memory is available now
                    complain_or_log(f"{name} cannot be started ({error.strerror}); the next try is in {wait:g} s")
            child = replacement
            with contextlib.suppress(ServiceEnded, StartupError):
                await asyncio.shield(child.ready)
                self._add_metrics(child)

    def _show_ready(self, bound: BoundAddresses, children: list[ServiceProcess]) -> None:
        lines = children[0].ready.result().lines
        metrics = {self._role: bound.metrics} if bound.metrics else {}
        self._reporter.send(Report(READY, {self._role: bound.grpc}, metrics, lines))
        if self._reporter.is_heard:
            return
        for line in lines:
            say(f"  {line}")
        shown = f" · metrics http://{bound.metrics}/metrics" if bound.metrics else ""
        seconds = time.monotonic() - self._began
        say(f"READY {self._role} · gRPC {bound.grpc}{shown} · {self._count} processes · {seconds:.1f} s")


@contextlib.asynccontextmanager
async def metrics_tokens_of(config: ServerConfig) -> AsyncIterator[BearerTokens | None]:
    """Tokens of the metrics port that are not only --auth-token-file's: keys with the scope metrics, as the workers
    know them. Raises StartupError."""
    from penstock.router.config import RouterConfig

    if not isinstance(config, RouterConfig) or config.keys_file is None or not config.metrics_ports:
        yield None
        return
    from penstock.router.frontend.key_scopes import metrics_tokens
    from penstock.router.keys.revoked_watch import RevokedWatch

    watch = RevokedWatch(config)
    try:
        await watch.open()
        following = asyncio.create_task(kept_running(watch.run, _log, "revoked keys", MIN_WAIT_SECONDS))
        try:
            yield metrics_tokens(config, watch.ring)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    finally:
        await watch.close()


def run_workers(role: str, given: dict[str, Any], config: ServerConfig, reporter: Reporter) -> int:
    """Serve until a signal to stop; return the exit code. Raises StartupError."""
    if not reporter.is_heard:
        say(f"{role}: loading")

    async def run() -> int:
        return await WorkerProcesses(role, given, config, reporter).run()

    return asyncio.run(run())
