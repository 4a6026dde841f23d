"""Clients of tools/soak.py: their calls, and the answer that each must get."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.v1 import common_pb2, text_pb2, text_pb2_grpc

# Seconds after which a call counts as lost.
PATIENCE = 180.0
_CHANNELS = 6
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
Code = grpc.StatusCode


class Wrong(Exception):
    """An answer that is none of those it may be."""


def generate() -> text_pb2.GenerateTextRequest:
    """A request that any backend of the soak answers with the same text."""
    return text_pb2.GenerateTextRequest(text="Water runs downhill.")


def chat() -> text_pb2.ChatRequest:
    """The same as a conversation."""
    request = text_pb2.ChatRequest()
    request.messages.add(role="user", content="What is Penstock?")
    return request


class Clients:
    """`work` is one of many callers; all share some channels."""

    def __init__(self, address: str, text: str, rng: random.Random) -> None:
        """`text`: what every whole answer says."""
        self.address = address
        self.text = text
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._rng = rng
        self._channels: list[grpc.aio.Channel] = []
        self._operations: dict[Callable[[], Awaitable[None]], int] = {
            self.whole: 26,
            self.conversation: 14,
            self.cancelled: 14,
            self.late: 10,
            self.slow: 8,
            self.unread: 5,
            self.compressed: 4,
            self.refused: 4,
            self.asked: 4,
            self.hung_up: 3,
            self.garbage: 3,
        }

    async def work(self, until: asyncio.Event) -> None:
        """One operation after another."""
        kinds, weights = list(self._operations), list(self._operations.values())
        while not until.is_set():
            operation = self._rng.choices(kinds, weights)[0]
            name = getattr(operation, "__name__", "")
            try:
                await operation()
            except Wrong as wrong:
                self.wrong.append(f"{name}: {wrong}")
            except grpc.aio.AioRpcError as error:
                self.wrong.append(f"{name}: {error.code().name} {error.details()}")
            self.done[name] += 1

    async def close(self) -> None:
        """Of the channels that are shared."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    def _stub(self) -> Any:
        while len(self._channels) < _CHANNELS:
            self._channels.append(self._open())
        return text_pb2_grpc.TextServiceStub(self._rng.choice(self._channels))

    def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=_OPTIONS)

    # What they do.

    async def whole(self) -> None:
        _whole(await _read(self._stub().Generate(generate(), timeout=PATIENCE)), self.text)

    async def conversation(self) -> None:
        _whole(await _read(self._stub().Chat(chat(), timeout=PATIENCE)), self.text)

    async def compressed(self) -> None:
        call = self._stub().Generate(generate(), timeout=PATIENCE, compression=grpc.Compression.Gzip)
        _whole(await _read(call), self.text)

    async def cancelled(self) -> None:
        call, after = self._stub().Generate(generate(), timeout=PATIENCE), self._rng.randrange(20)
        events = await _read(call, after)
        call.cancel()
        self._begins(events)

    async def late(self) -> None:
        """A deadline that some answers keep and some do not."""
        call, events = self._stub().Generate(generate(), timeout=self._rng.choice((0.003, 0.05, 0.5, 2))), []
        try:
            async for event in call:
                events.append(event)  # noqa: PERF401 - what came before a failure is looked at
        except grpc.aio.AioRpcError as error:
            if error.code() is not Code.DEADLINE_EXCEEDED:
                raise
            self._begins(events)
        else:
            _whole(events, self.text)

    async def slow(self) -> None:
        """Reads now and then."""
        events = []
        async for event in self._stub().Generate(generate(), timeout=PATIENCE):
            events.append(event)
            await asyncio.sleep(self._rng.random() * 0.5)
        _whole(events, self.text)

    async def unread(self) -> None:
        """Reads nothing for a while, then everything."""
        call = self._stub().Generate(generate(), timeout=PATIENCE)
        events = await _read(call, 1)
        await asyncio.sleep(self._rng.random() * 8)
        _whole(events + await _read(call), self.text)

    async def refused(self) -> None:
        try:
            await _read(self._stub().Chat(text_pb2.ChatRequest(), timeout=PATIENCE))
        except grpc.aio.AioRpcError as error:
            trailers: set[Any] = {key for key, _ in error.trailing_metadata() or ()}
            if error.code() is Code.INVALID_ARGUMENT and {"grpc-status-details-bin", "x-request-id"} <= trailers:
                return
            raise
        raise Wrong("was not refused")

    async def asked(self) -> None:
        """Unary calls."""
        models = await self._stub().ListModels(text_pb2.ListModelsRequest(), timeout=PATIENCE)
        if not models.models:
            raise Wrong("no models")
        async with self._open() as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = (await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)).status
        if status != health_pb2.HealthCheckResponse.SERVING:
            raise Wrong("not serving")

    async def hung_up(self) -> None:
        """A connection with several streams is closed."""
        async with self._open() as channel:
            stub: Any = text_pb2_grpc.TextServiceStub(channel)
            calls = [stub.Generate(generate(), timeout=PATIENCE) for _ in range(4)]
            for call in calls:
                self._begins(await _read(call, self._rng.randrange(6)))

    async def garbage(self) -> None:
        """Bytes that are no HTTP/2, or its beginning only."""
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        kind = self._rng.randrange(4)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        settings = b"\0\0\0\x04\0\0\0\0\0"
        with contextlib.suppress(ConnectionError):
            if kind == 0:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.read()
            elif kind == 1:
                writer.write(preface[: self._rng.randrange(len(preface))])
                await writer.drain()
            elif kind == 2:
                writer.write(preface + settings + self._rng.randbytes(100))
                await asyncio.wait([asyncio.ensure_future(reader.read(1 << 16))], timeout=1)
            else:
                # Frames that do no work until the server has enough of them.
                writer.write(preface + settings + 5000 * (b"\0\0\x04\x03\0\0\0\0\x01" + b"\0\0\0\x08"))
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def _begins(self, events: list[Any]) -> None:
        text = "".join(event.delta.text for event in events)
        if not self.text.startswith(text):
            raise Wrong(f"not how the answer begins: {text!r}")


async def _read(call: AsyncIterator[Any], most: int | None = None) -> list[Any]:
    events: list[Any] = []
    if most == 0:
        return events
    async for event in call:
        events.append(event)
        if len(events) == most:
            break
    return events


def _whole(events: list[Any], text: str) -> None:
    """Raises Wrong unless this is all of the answer, once."""
    kinds = [event.WhichOneof("event") for event in events]
    if not kinds or kinds[0] != "started" or kinds[-1] != "finished" or kinds.count("finished") != 1:
        raise Wrong(f"{len(kinds)} events, {kinds[:1]} to {kinds[-1:]}")
    given = "".join(event.delta.text for event in events)
    if given != text:
        raise Wrong(f"{len(given)} characters of {len(text)}: {given[-40:]!r}")
    found = events[-1].finished.sequences[0].finish_reason
    if found != common_pb2.FINISH_REASON_STOP_EOS:
        raise Wrong(f"finish reason {found}")
