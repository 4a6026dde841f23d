"""Router in this process, before scripted backends and a real tokenizer in a process of its own."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend
from penstock.router.app import RouterApp
from penstock.router.config import RouterConfig
from penstock.serving.server import RunningServer, serve_in_process
from penstock.v1 import common_pb2, generation_pb2, text_pb2, text_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from prometheus_client import CollectorRegistry

# Time that a condition has to come true; the tests end as soon as it does.
PATIENCE_SECONDS = 60.0
# Quick to retry: a test should wait milliseconds. Slow to give up: the machine may be busy.
QUICK: dict[str, Any] = {
    "start_timeout_seconds": PATIENCE_SECONDS,
    "connect_timeout_seconds": PATIENCE_SECONDS,
    "reconnect_min_seconds": 0.01,
    "reconnect_max_seconds": 0.05,
    "load_interval_seconds": 0.01,
    "failover_wait_seconds": PATIENCE_SECONDS,
    "death_verdict_seconds": 0.5,
    "tokenizer_wait_seconds": PATIENCE_SECONDS,
    "tokenizer_stall_seconds": PATIENCE_SECONDS,
}


@functools.cache
def tokenizer_address() -> str:
    """A tokenizer process on the embedded model, shared by every test of the run."""
    process = stack.start("tokenizer")
    atexit.register(process.kill)
    stack.wait_serving(process.address, process)
    return process.address


@functools.cache
def tokenizer_fingerprint() -> str:
    """Fingerprint that a backend must report to be used with that tokenizer."""
    with grpc.insecure_channel(tokenizer_address()) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        return str(stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest()).tokenizer_fingerprint)


def backend(**knobs: Any) -> EmittingBackend:
    """Make a scripted backend with a model that belongs to the shared tokenizer."""
    knobs.setdefault("fingerprint", tokenizer_fingerprint())
    return EmittingBackend(**knobs)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            # A loop that never sleeps can keep Python's lock from every other thread for minutes.
            await asyncio.sleep(0.001)


@dataclass
class Router:
    """A running router and a client of it."""

    server: RunningServer
    stub: Any
    tokenizer: Any
    registry: CollectorRegistry

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode at once, which streamed text must equal."""
        request = tokenizer_pb2.DecodeRequest(
            sequences=[common_pb2.TokenIds(ids=ids)], skip_special_tokens=skip_special_tokens
        )
        return str((await self.tokenizer.Decode(request)).texts[0])

    async def encode(self, text: str) -> list[int]:
        """Encode `text`, control tokens parsed."""
        answer = await self.tokenizer.Encode(tokenizer_pb2.EncodeRequest(texts=[text], parse_special_tokens=True))
        return list(answer.encodings[0].ids)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 when it was never set."""
        return self.registry.get_sample_value(f"penstock_router_{name}", labels) or 0.0

    async def until(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has `value`."""
        await until(lambda: self.metric(name, **labels) == value)


@asynccontextmanager
async def running_router(
    *backends: EmittingBackend,
    tokenizer: str | tuple[str, ...] = "",
    fingerprint: str = "",
    resolver: Any = None,
    **settings: Any,
) -> AsyncIterator[Router]:
    """Run a ready router before backends that listen already. `fingerprint`: of another tokenizer than the shared."""
    addresses = settings.pop("backend", tuple(one.address for one in backends))
    tokenizers = (tokenizer or tokenizer_address(),) if isinstance(tokenizer, str) else tokenizer
    quick = {**QUICK, "transport": os.environ.get("PENSTOCK_TEST_TRANSPORT", RouterConfig.transport)}
    config = RouterConfig(tokenizer=tokenizers, backend=addresses, **{**quick, **settings})
    registry = CollectorRegistry()
    app = RouterApp(config, registry, **({"resolver": resolver} if resolver else {}))
    async with (
        serve_in_process(app, config, registry) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        grpc.aio.insecure_channel(tokenizer_address()) as tokenizer_channel,
    ):
        text: Any = text_pb2_grpc.TextServiceStub(channel)
        router = Router(server, text, tokenizer_pb2_grpc.TokenizerServiceStub(tokenizer_channel), registry)
        if resolver is None:
            # The router is ready with its first backend; a test with two needs both.
            wanted = fingerprint or tokenizer_fingerprint()
            refused = {one.address for one in backends if one.fingerprint != wanted}
            for address in addresses:
                await router.until("backend_up", float(address not in refused), backend=address)
        yield router
        assert not app.failed.done(), "whatever backends and clients do, the process goes on"


@dataclass
class Answer:
    """All messages of a stream."""

    deltas: list[Any] = field(default_factory=list)
    _started: generation_pb2.Started | None = None
    _finished: generation_pb2.Finished | None = None

    @property
    def started(self) -> generation_pb2.Started:
        assert self._started is not None, "no Started"
        return self._started

    @property
    def finished(self) -> generation_pb2.Finished:
        assert self._finished is not None, "no Finished: OK never comes without it"
        return self._finished

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self.deltas)

    def ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    def calls(self) -> list[text_pb2.ToolCallDelta]:
        return [call for delta in self.deltas for call in delta.tool_calls]

    def add(self, response: Any) -> None:
        """Take one message, in the order that the contract allows."""
        kind = response.WhichOneof("event")
        assert self._finished is None, "nothing comes after Finished"
        if kind == "started":
            assert self._started is None, "Started comes once"
            self._started = response.started
        else:
            assert self._started is not None, "Started comes first"
            if kind == "delta":
                assert response.delta.seq == len(self.deltas), "seq is gapless from 0"
                self.deltas.append(response.delta)
            else:
                self._finished = response.finished


async def collect(call: Any, on_delta: Callable[[Answer], Any] | None = None) -> Answer:
    """Read a stream to its end; `on_delta` is awaited after each delta. Raises the stream's error."""
    answer = Answer()
    async for response in call:
        answer.add(response)
        if on_delta is not None and response.HasField("delta"):
            await on_delta(answer)
    assert answer.finished
    return answer


def generate(text: str = "Hello", **fields: Any) -> text_pb2.GenerateTextRequest:
    """Make a Generate request."""
    return text_pb2.GenerateTextRequest(text=text, **fields)


def chat(text: str = "Hello", **fields: Any) -> text_pb2.ChatRequest:
    """Make a Chat request with one user message."""
    return text_pb2.ChatRequest(messages=[tokenizer_pb2.Message(role="user", content=text)], **fields)
