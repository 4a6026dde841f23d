"""Real generation processes that fail when a test says so, each behind a relay, with a router of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from factories.servers import stack
from factories.servers.only_route import only_route
from factories.servers.router import Router, running_router
from factories.wire.tcp_proxy import TcpProxy
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.generation.engine.failpoints import FAILPOINTS
from penstock.v1 import admin_pb2, admin_pb2_grpc

SESSION = b"/penstock.v1.GenerationService/Session"
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class FailingEngine:
    """A generation process on the embedded model; faults are ordered by files of a folder of its own."""

    process: stack.Process
    proxy: TcpProxy
    folder: Path

    @property
    def address(self) -> str:
        """Address by which the router reaches it."""
        return self.proxy.address

    def order(self, name: str) -> None:
        """Let the fault happen from the next step on."""
        (self.folder / name).touch()

    def lift(self) -> None:
        """End every fault."""
        for name in FAILPOINTS:
            (self.folder / name).unlink(missing_ok=True)

    def stop(self) -> None:
        """Send SIGSTOP."""
        self.process.popen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.process.popen.send_signal(signal.SIGCONT)

    async def exit_code(self) -> int:
        """Wait for its end."""
        return await asyncio.to_thread(self.process.popen.wait, 120)

    async def health(self) -> int:
        """Ask the process itself, past the relay."""
        async with grpc.aio.insecure_channel(self.process.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="penstock.v1.GenerationService"))
            return int(answer.status)

    async def load(self) -> admin_pb2.Load:
        """Ask the process itself, past the relay."""
        async with grpc.aio.insecure_channel(self.process.address) as channel:
            stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
            load: admin_pb2.Load = (await stub.GetLoad(admin_pb2.GetLoadRequest())).load
            return load

    async def until(self, serving: bool) -> None:
        """Wait until its health is so."""
        async with asyncio.timeout(60):
            while (await self.health() == SERVING) != serving:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def until_free(self) -> None:
        """Wait until it holds no request and no block."""
        async with asyncio.timeout(60):
            while True:
                load = await self.load()
                if not (load.running_requests or load.waiting_requests or load.kv_blocks_used):
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def failing_engines(
    count: int, *flags: str, program: Sequence[str] = ("-m", "penstock.cli.main")
) -> AsyncIterator[list[FailingEngine]]:
    """Start processes, ready, each behind a relay of its own."""
    async with contextlib.AsyncExitStack() as exits:
        made = []
        for _ in range(count):
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
            orders = ",".join(f"{name}@{folder / name}" for name in FAILPOINTS)
            process = stack.start(
                "generation",
                *("--kv-memory", "32MiB", "--threads", "1", "--failpoints", orders, "--allow-failpoints", *flags),
                program=tuple(program),
            )
            exits.callback(_end, process)
            made.append((process, folder))
        engines = []
        for process, folder in made:
            await asyncio.to_thread(process.wait_ready)
            proxy = await exits.enter_async_context(TcpProxy(process.address))
            engines.append(FailingEngine(process, proxy, folder))
        yield engines


def _end(process: stack.Process) -> None:
    if process.popen.poll() is None:
        process.kill()
    process.log.unlink(missing_ok=True)


@asynccontextmanager
async def router_before(engines: Sequence[FailingEngine], **settings: Any) -> AsyncIterator[Router]:
    """Run a router, ready with all of them."""
    addresses = tuple(one.address for one in engines)
    async with running_router(backend=addresses, **{"reconnect_max_seconds": 0.2, **settings}) as router:
        for address in addresses:
            await router.until("backend_up", 1.0, backend=address)
        yield router


def owner(router: Router, engines: Sequence[FailingEngine]) -> FailingEngine:
    """Find the engine with most of the router's requests."""
    app: Any = router.server.service
    most = max(only_route(app).pool.backends, key=lambda backend: backend.in_flight)
    return next(one for one in engines if one.address == most.key)
