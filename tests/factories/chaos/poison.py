"""A poison request beside neighbours: real processes, each killed by a step that has the poison, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from factories.chaos.deployment import Figures
from factories.servers import stack
from factories.servers.router import Answer
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.v1 import common_pb2, config_pb2, text_pb2, text_pb2_grpc

NEIGHBOURS = 12
TOKENS = 250
# No prompt of a neighbour has it: a process dies of the step that has it.
POISON_ID = 3000
# float32: an id depends neither on the other rows of its batch nor on what is cached.
_FLAGS = ("--kv-memory", "32MiB", "--threads", "1", "--dtype", "float32")
_ORDERS = ("--failpoints", f"engine.step.kill@token:{POISON_ID}", "--allow-failpoints")
_PATIENCE_SECONDS = 300.0


@dataclass
class Mortal:
    """A generation process at one address. Another takes its place there whenever it dies."""

    process: stack.Process
    flags: tuple[str, ...]
    crashes: int = 0

    async def run(self) -> None:
        """Start it again until cancelled."""
        while True:
            await asyncio.to_thread(self.process.popen.wait)
            self.crashes += 1
            port = self.process.port
            self.process.log.unlink(missing_ok=True)
            self.process = stack.start("generation", *self.flags, "--port", str(port))
            self.process.port = port


@dataclass
class Seen:
    """End of one poison request and its neighbours."""

    crashes: int
    # Reason of the poison's end; "OK" where it had none.
    ending: str
    exact: int
    # Reasons of the neighbours that were lost.
    lost: list[str]
    # Longest time without a token of any neighbour, in seconds.
    pause: float

    @property
    def is_as_promised(self) -> bool:
        """True where the poison took two processes and nothing else."""
        return (self.crashes, self.ending, self.exact) == (2, "INTERNAL POISON", NEIGHBOURS)


@dataclass
class Stream:
    """A call, with its answer as far as it came, and its error if it had one."""

    answer: Answer = field(default_factory=Answer)
    pause: float = 0.0
    error: PenstockError | None = None

    async def run(self, call: Any, after: tuple[int, asyncio.Event] | None = None) -> Stream:
        """Read it to its end; `after`: so many ids an event is set."""
        last = time.monotonic()
        try:
            async for event in call:
                self.answer.add(event)
                now = time.monotonic()
                self.pause, last = max(self.pause, now - last), now
                if after is not None and len(self.answer.ids()) >= after[0]:
                    after[1].set()
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        finally:
            if after is not None:
                after[1].set()
        return self

    @property
    def ending(self) -> str:
        """Code and reason of its end."""
        return f"{self.error.code.name} {self.error.reason}" if self.error is not None else "OK"


@dataclass
class Deployment:
    """Everything that runs, and a client of the router."""

    backends: list[Mortal]
    router: stack.Process
    client: Any
    wanted: dict[int, list[int]] = field(default_factory=dict)

    def neighbour(self, number: int) -> Any:
        """Call for a neighbour's stream; each number has a prompt of its own, every second one is drawn by a seed."""
        ids = [300 + (number * 37 + place * 11) % 600 for place in range(24)]
        drawn = config_pb2.GenerationConfig(max_new_tokens=TOKENS, do_sample=True, temperature=1.1, seed=number + 1)
        return self._call(ids, drawn if number % 2 else config_pb2.GenerationConfig(max_new_tokens=TOKENS))

    def poison(self) -> Any:
        """Call that kills."""
        ids = [POISON_ID, *range(400, 420)]
        return self._call(ids, config_pb2.GenerationConfig(max_new_tokens=TOKENS))

    def _call(self, ids: list[int], config: config_pb2.GenerationConfig) -> Any:
        return self.client.Generate(
            text_pb2.GenerateTextRequest(
                token_ids=common_pb2.TokenIds(ids=ids),
                config=config,
                stop=config_pb2.StopConfig(ignore_eos=True),
                output=config_pb2.OutputConfig(return_token_ids=True),
            )
        )

    async def undisturbed(self) -> None:
        """Note what every neighbour answers when nothing is wrong."""
        for number in range(NEIGHBOURS):
            stream = await Stream().run(self.neighbour(number))
            assert stream.error is None, stream.error
            # Where a stream is moved, what it said is part of its prompt.
            assert POISON_ID not in stream.answer.ids()
            self.wanted[number] = stream.answer.ids()

    async def strike(self, rng: random.Random) -> Seen:
        """Send the poison when a neighbour has some of its tokens, and wait for the end of all."""
        before, started = sum(one.crashes for one in self.backends), asyncio.Event()
        after = (rng.randrange(1, TOKENS // 2), started)
        beside = [
            asyncio.ensure_future(Stream().run(self.neighbour(number), None if number else after))
            for number in range(NEIGHBOURS)
        ]
        await started.wait()
        poison = await Stream().run(self.poison())
        neighbours = await asyncio.gather(*beside)
        seen = Seen(
            crashes=sum(one.crashes for one in self.backends) - before,
            ending=poison.ending,
            exact=sum(
                one.error is None and one.answer.ids() == self.wanted[number] for number, one in enumerate(neighbours)
            ),
            lost=[one.ending for one in neighbours if one.error is not None],
            pause=max(one.pause for one in neighbours),
        )
        await self.until_whole()
        seen.crashes = sum(one.crashes for one in self.backends) - before
        return seen

    async def until_whole(self) -> None:
        """Wait until the router has every backend."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while (await Figures.read(self.router)).total("penstock_router_backend_up") != len(self.backends):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@asynccontextmanager
async def deployment(count: int, transport: str, *router_flags: str) -> AsyncIterator[Deployment]:
    """Start tokenizer, `count` generation processes that die of the poison, and a router with its default flags."""
    async with contextlib.AsyncExitStack() as exits:
        ways = ("--transport", transport)
        started: list[stack.Process] = []
        backends: list[Mortal] = []

        def end() -> None:
            for process in [*started, *(one.process for one in backends)]:
                if process.popen.poll() is None:
                    process.kill()
                process.log.unlink(missing_ok=True)

        exits.callback(end)
        tokenizer = stack.start("tokenizer", *ways)
        started.append(tokenizer)
        flags = (*_FLAGS, *ways, *_ORDERS)
        backends += [Mortal(stack.start("generation", *flags), flags) for _ in range(count)]
        for process in (tokenizer, *(one.process for one in backends)):
            await asyncio.to_thread(process.wait_ready)
        targets = [word for one in backends for word in ("--backend", one.process.address)]
        router = stack.start("router", "--tokenizer", tokenizer.address, *targets, *ways, *router_flags)
        started.append(router)
        await asyncio.to_thread(router.wait_ready)
        watching = [asyncio.ensure_future(one.run()) for one in backends]
        exits.push_async_callback(_cancel, watching)
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(router.address))
        made = Deployment(backends, router, text_pb2_grpc.TextServiceStub(channel))
        await made.until_whole()
        yield made


async def _cancel(tasks: list[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
