"""Tokenizer, two generation processes behind relays, and router: real processes that a test hurts and mends.

Every one of them asks for a token, which the tests and the router have.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from factories.servers import stack
from factories.wire.tcp_proxy import TcpProxy
from penstock.generation.engine.failpoints import FAILPOINTS
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    config_pb2,
    generation_pb2,
    generation_pb2_grpc,
    text_pb2_grpc,
)
from prometheus_client.parser import text_string_to_metric_families

BACKENDS = 2
STALL_SECONDS = 3.0
# As many as the contract allows.
MAX_MOVES = 2
# Time in which a process that lives must answer a router that lost its connection: else it counts as dead. And time for
# which a stream waits for another backend, which may be long in starting.
_VERDICT_SECONDS, _FAILOVER_SECONDS = 30.0, 120.0
_TOKEN = "open sesame"
CREDENTIALS = (("authorization", f"Bearer {_TOKEN}"),)
# float32: an id depends neither on the other rows of its batch nor on what is cached.
_FLAGS = ("--kv-memory", "32MiB", "--threads", "1", "--dtype", "float32", "--hung-step-seconds", "2")
PATIENCE_SECONDS = 120.0


@dataclass
class Backend:
    """A generation process on the embedded model behind a relay. Another process takes its place when it ends."""

    process: stack.Process
    proxy: TcpProxy
    folder: Path
    flags: tuple[str, ...]
    # Output of the process before this one.
    past_output: str = ""
    # To the process itself, past the relay.
    channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = grpc.aio.insecure_channel(self.process.address)

    def order(self, name: str) -> None:
        """Let a failpoint fire from the next step on."""
        (self.folder / name).touch()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.popen.send_signal(number)

    async def load(self) -> admin_pb2.Load:
        """Ask the process itself."""
        stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(self.channel)
        asked = admin_pb2.GetPoolStatsRequest()
        stats: admin_pb2.GetPoolStatsResponse = await stub.GetPoolStats(
            asked, metadata=CREDENTIALS, timeout=PATIENCE_SECONDS
        )
        return stats.load

    async def mend(self, exit_code: int | None) -> None:
        """End every fault. With `exit_code`: the process must end by it, and another one takes its place."""
        self.proxy.thaw()
        self.proxy.slow_down()
        self.proxy.reset_after(1 << 60)
        if exit_code is not None:
            code = await self._exit_code()
            assert code == exit_code, f"the process ended by {code}, not {exit_code}:\n{self.process.output()}"
        for name in FAILPOINTS:
            (self.folder / name).unlink(missing_ok=True)
        if exit_code is None:
            self.send(signal.SIGCONT)
            return
        self.past_output = self.process.output()
        self.process.log.unlink(missing_ok=True)
        await self.channel.close()
        self.process = stack.start("generation", *self.flags)
        await asyncio.to_thread(self.process.wait_ready)
        self.channel = grpc.aio.insecure_channel(self.process.address)
        self.proxy.lead_to(self.process.address)

    async def _exit_code(self) -> int:
        """Wait for the end of the process. A fault of a step needs a step: perhaps no stream has one left."""
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        step = generation_pb2.GenerateRequest(
            prompt_token_ids=[5, 6], config=config_pb2.GenerationConfig(max_new_tokens=1)
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (code := self.process.popen.poll()) is None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in stub.Generate(step, metadata=CREDENTIALS, timeout=1):
                        pass
                await asyncio.sleep(0.05)
        return code


@dataclass
class Deployment:
    """Everything that runs, and a client of the router."""

    transport: str
    backends: list[Backend]
    tokenizer: stack.Process
    router: stack.Process
    client: Any
    # Calls to Generate that the tests made, and those of them that the router has surely seen: it answered.
    calls: int = 0
    seen_calls: int = 0
    # Details of the errors that they got.
    told: list[str] = field(default_factory=list)

    @property
    def processes(self) -> dict[str, stack.Process]:
        """All processes by a name that stays."""
        backends = {f"generation {place}": one.process for place, one in enumerate(self.backends)}
        return {"router": self.router, "tokenizer": self.tokenizer, **backends}

    async def owner(self) -> Backend:
        """Find the backend that runs a request."""
        loads = await asyncio.gather(*(one.load() for one in self.backends))
        busiest = max(range(BACKENDS), key=lambda place: loads[place].running_requests)
        return self.backends[busiest]

    async def losses(self) -> float:
        """Count the losses of backends, as the router noticed them."""
        return (await Figures.read(self.router)).total("penstock_router_backend_losses_total")

    async def until_whole(self) -> None:
        """Wait until the router has every backend."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await Figures.read(self.router)).total("penstock_router_backend_up") != BACKENDS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


class Figures:
    """Samples that one process serves at /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

    @staticmethod
    async def read(process: stack.Process) -> Figures:
        """Ask for them."""

        def fetch() -> str:
            where = urllib.request.Request(f"http://{process.metrics_address}/metrics", headers=dict(CREDENTIALS))
            with urllib.request.urlopen(where, timeout=PATIENCE_SECONDS) as answer:
                return str(answer.read().decode())

        return Figures(await asyncio.to_thread(fetch))

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples of `name` that have these labels."""
        wanted = labels.items()
        return sum(one.value for one in self._samples if one.name == name and wanted <= one.labels.items())


@asynccontextmanager
async def deployment(transport: str) -> AsyncIterator[Deployment]:
    """Start it, ready with both backends; nothing is left of it."""
    async with contextlib.AsyncExitStack() as exits:
        tokens = Path(exits.enter_context(tempfile.TemporaryDirectory())) / "tokens"
        tokens.write_text(f"{_TOKEN}\n")
        ways = ("--transport", transport, "--auth-token-file", str(tokens))
        backends: list[Backend] = []
        started: list[stack.Process] = []

        def end() -> None:
            for process in [*started, *(one.process for one in backends)]:
                if process.popen.poll() is None:
                    process.kill()
                process.log.unlink(missing_ok=True)

        exits.callback(end)
        tokenizer = stack.start("tokenizer", *ways)
        started.append(tokenizer)
        for _ in range(BACKENDS):
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
            orders = ",".join(f"{name}@{folder / name}" for name in FAILPOINTS)
            flags = (*_FLAGS, *ways, "--failpoints", orders, "--allow-failpoints")
            process = stack.start("generation", *flags)
            proxy = await exits.enter_async_context(TcpProxy(process.address))
            backends.append(Backend(process, proxy, folder, flags))
            exits.push_async_callback(_hang_up, backends[-1])
        targets = [word for one in backends for word in ("--backend", one.proxy.address)]
        known = ("--tokenizer", tokenizer.address, *targets, "--channel-token-file", str(tokens))
        times = ("--stall-timeout-seconds", str(STALL_SECONDS), "--reconnect-max-seconds", "0.2")
        times += ("--death-verdict-seconds", str(_VERDICT_SECONDS), "--failover-wait-seconds", str(_FAILOVER_SECONDS))
        router = stack.start("router", *known, *ways, *times, "--max-moves", str(MAX_MOVES))
        started.append(router)
        for process in (*started, *(one.process for one in backends)):
            await asyncio.to_thread(process.wait_ready)
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(router.address))
        made = Deployment(transport, backends, tokenizer, router, text_pb2_grpc.TextServiceStub(channel))
        await made.until_whole()
        yield made


async def _hang_up(backend: Backend) -> None:
    await backend.channel.close()
