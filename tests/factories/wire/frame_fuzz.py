"""Fuzzer of frames at both ends of penstock.http2, in one process, over sockets that only remember.

It takes connections of a corpus apart into frames, changes, repeats, moves, drops and mixes them, and hands the bytes
over in pieces, while handlers and callers go on. Every run is known by its seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from factories.wire.conformance import HELLO, REQUEST, cases
from factories.wire.http2 import LIMITS, Socket, frames_of, message
from penstock.common.config import ChannelConfig
from penstock.http2 import frames
from penstock.http2 import server as server_module
from penstock.http2.channel import Answers
from penstock.http2.client_calls import CallsConnection
from penstock.http2.client_stream import ClientStreamCall
from penstock.http2.limits import ServerLimits
from penstock.http2.server import Http2Server

# Connections whose frames found something once; a file is what came from the peer.
CORPUS = Path(__file__).resolve().parents[2] / "data" / "http2" / "corpus"
_LIMITS = replace(LIMITS, max_message_bytes=1 << 16, write_buffer_bytes=1 << 14, idle_frames=400, max_streams=30)
_SERVER_LIMITS = ServerLimits(max_calls=100, max_probes=8, request_bytes=1 << 20, max_strangers=10, strangers_share=1.0)
_MAX_FRAMES, _MAX_BYTES = 60, 200_000
# Turns of the event loop in which everything has to end once its connection is lost.
_LAST_TURNS = 200
Frame = tuple[int, int, int, bytes]


@dataclass
class Totals:
    """Counts of a run."""

    connections: int = 0
    frames: int = 0
    slowest_seconds: float = 0.0
    slowest_seed: str = ""


class Broken(AssertionError):
    """An end did what it must not; the text has the seed."""


def _valid_answers() -> list[bytes]:
    """Make bytes that a server sends to the three calls of a client."""
    begin = frames.settings(((frames.MAX_CONCURRENT_STREAMS, 100), (frames.INITIAL_WINDOW_SIZE, 1 << 20)))
    ok = frames.trailers(0, "", (("a", "b"),))

    def answer(stream: int, payload: bytes, end: bytes = ok) -> bytes:
        return (
            frames.header_frames(stream, frames.RESPONSE_HEADERS, end=False, limit=1 << 14)
            + frames.frame(frames.DATA, 0, stream, payload)
            + frames.header_frames(stream, end, end=True, limit=1 << 14)
        )

    several = [answer(stream, message(b"x" * size)) for stream, size in ((1, 3), (3, 20_000), (5, 0))]
    error = frames.trailers(13, "what", (("grpc-status-details-bin", b"\1\2"),))
    return [
        begin + b"".join(several),
        begin + answer(1, message(b"a") * 50) + frames.frame(frames.PING, 0, 0, bytes(8)),
        begin + answer(1, b"", error) + answer(3, message(b"a") + message(b"b")) + frames.goaway(3, 0, "bye"),
        begin + frames.window_update(0, 1000) + frames.reset(1, 8) + frames.reset(3, 7) + answer(5, message(b"x")),
        begin + frames.header_frames(1, frames.refusal(503), end=True, limit=100) + frames.goaway(0, 2, "no"),
        begin + answer(1, message(b"y" * 5000, compressed=True)) + frames.frame(frames.SETTINGS, 1, 0),
        begin + frames.frame(frames.HEADERS, 0, 1, b"\x88") + frames.frame(frames.CONTINUATION, 4, 1, ok),
    ]


def _client_corpus() -> list[list[Frame]]:
    settings = HELLO[len(frames.PREFACE) :]
    return [_take_apart(settings + case.data) for case in cases() if not case.raw and len(case.data) < _MAX_BYTES]


def _take_apart(data: bytes) -> list[Frame]:
    return list(frames_of(data))


class Fuzzer:
    """Connections with changed frames, one after the other. Belongs to one event loop."""

    def __init__(self, seed: int) -> None:
        self.totals = Totals()
        self._seed = seed
        self._requests = _client_corpus()
        self._answers = [_take_apart(one) for one in _valid_answers()]
        for path in sorted(CORPUS.glob("*.bin")):
            kind = self._answers if path.name.startswith("answer") else self._requests
            kind.append(_take_apart(path.read_bytes()))
        self._errors: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, context: self._errors.append(str(context)))

    async def run(self, num_frames: int) -> Totals:
        """Send so many frames. Raises Broken."""
        while self.totals.frames < num_frames:
            number = self.totals.connections
            self.totals.connections += 1
            name = f"seed {self._seed}:{number}"
            chance = random.Random(name)
            try:
                await (self._server(chance, name) if chance.random() < 0.6 else self._client(chance, name))
            except Broken:
                raise
            except Exception as error:
                raise Broken(f"{name}: {type(error).__name__}: {error}") from error
            if self._errors:
                raise Broken(f"{name}: {self._errors}")
        return self.totals

    # The server's end.

    async def _server(self, chance: random.Random, name: str) -> None:
        limits = replace(_LIMITS, idle_frames=chance.choice((5, 100_000)), max_streams=chance.choice((2, 30)))
        server = Http2Server(limits, _SERVER_LIMITS, admit=chance.choice((None, _admit)))
        server.add_generic_rpc_handlers((_Handlers(chance.random() < 0.5),))
        connection, socket = server._make_connection(), Socket()
        connection.connection_made(socket)
        data = frames.PREFACE + self._changed(chance, self._requests)
        if chance.random() < 0.02:
            data = _scratched(chance, data)
        for piece in _pieces(chance, data):
            self._feed(connection, piece, name)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                socket.unread = 0
                connection.resume_writing() if chance.random() < 0.5 else connection.pause_writing()
            if len(connection.calls) > limits.max_streams or len(connection._received) > len(data):
                raise Broken(f"{name}: more calls or bytes than may be")
        if connection.flow.request_bytes.held > limits.connection_window_bytes:
            raise Broken(f"{name}: more bytes of requests than may be")
        await _turns(chance.randrange(4))
        if chance.random() < 0.2:
            connection.drain()
        connection.connection_lost(None)
        for _ in range(_LAST_TURNS):
            if not server._tasks:
                break
            await asyncio.sleep(0)
        left = {
            "tasks": len(server._tasks),
            "calls": len(connection.calls),
            "blocked": len(connection.flow.blocked),
            "unfinished": len(connection._unfinished.calls),
            "bytes": connection.flow.request_bytes.held,
            "bytes of all": server._request_bytes.held,
            "probes": len(server._probes),
            "probes of the connection": 0 if connection.turns is None else connection.turns.probes,
            "strangers": len(server._strangers),
            "connections": len(server._connections),
        }
        if any(left.values()):
            raise Broken(f"{name}: left over: {left}")

    # The client's ends.

    async def _client(self, chance: random.Random, name: str) -> None:
        limits = ChannelConfig(max_message_bytes=1 << 16)
        head = frames.request_headers(REQUEST)
        data = self._changed(chance, self._answers)
        if chance.random() < 0.5:
            stream: ClientStreamCall[bytes] = ClientStreamCall(head, bytes, limits, joins=chance.random() < 0.5)
            stream.connection_made(Socket())
            tasks = [asyncio.ensure_future(stream.run(lambda _: None)), asyncio.ensure_future(stream.write(_Large()))]
            await self._answer(chance, stream, data, name)
        else:
            calls = CallsConnection(limits)
            calls.connection_made(Socket())
            tasks = [asyncio.ensure_future(calls.call(head, bytes(chance.choice((3, 200_000))))) for _ in range(2)]
            tasks += [asyncio.ensure_future(_read_all(calls, head)) for _ in range(2)]
            await asyncio.sleep(0)
            if chance.random() < 0.3:
                tasks[chance.randrange(len(tasks))].cancel()
            await self._answer(chance, calls, data, name)
            if calls._calls or calls._turns:
                raise Broken(f"{name}: calls left over")
        for _ in range(_LAST_TURNS):
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0)
        for task in tasks:
            if not task.done():
                raise Broken(f"{name}: a caller waits for ever")
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, (grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                raise Broken(f"{name}: {type(error).__name__}: {error}") from error

    async def _answer(self, chance: random.Random, end: Any, data: bytes, name: str) -> None:
        for piece in _pieces(chance, data):
            self._feed(end, piece, name)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await _turns(chance.randrange(4))
        end.connection_lost(None)
        await asyncio.sleep(0)

    def _feed(self, end: Any, piece: bytes, name: str) -> None:
        begin = time.thread_time()
        end.data_received(piece)
        seconds = time.thread_time() - begin
        if seconds > self.totals.slowest_seconds:
            self.totals.slowest_seconds, self.totals.slowest_seed = seconds, name

    # Changes.

    def _changed(self, chance: random.Random, corpus: list[list[Frame]]) -> bytes:
        some = list(chance.choice(corpus))
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            other = chance.choice(corpus)
            begin = chance.randrange(len(other) + 1)
            at = chance.randrange(len(some) + 1)
            some[at:at] = other[begin : begin + chance.choice((1, 2, 5, 20))]
        some = some[:_MAX_FRAMES]
        out, size = [], 0
        for one in some:
            changed = [one]
            what = chance.random()
            if what < 0.25:
                changed = [_mutated(chance, one)]
            elif what < 0.30:
                changed = [one] * chance.choice((2, 3, 10))
            elif what < 0.33:
                changed = []
            elif what < 0.38:
                changed = [one, _any_frame(chance)]
            for kind, flags, stream, payload in changed:
                raw = frames.frame(kind, flags, stream & 0xFFFFFFFF, payload)
                if chance.random() < 0.02:
                    raw = _scratched(chance, raw)
                self.totals.frames += 1
                size += len(raw)
                out.append(raw)
            if size > _MAX_BYTES:
                break
        if chance.random() < 0.2:
            chance.shuffle(out)
        return b"".join(out)


class _Large:
    """Message that is larger than the first window."""

    def SerializeToString(self) -> bytes:
        return bytes(100_000)


class _Handlers:
    """Handlers of every method: of one message or of a stream, by the length of its name."""

    def __init__(self, takes_stream: bool) -> None:
        make: Any = grpc.stream_stream_rpc_method_handler if takes_stream else grpc.unary_stream_rpc_method_handler
        self._handler = make(_echo if takes_stream else _stream)

    def service(self, details: Any) -> Any:
        return None if details.method.startswith("/no") else self._handler


async def _echo(requests: AsyncIterator[bytes], call: Any) -> None:
    async for request in requests:
        await call.write(request)


async def _stream(request: bytes, call: Any) -> None:
    for _ in range(20):
        await call.write(request * 10)
        call.try_write(request)
    if request[:1] == b"w":
        await asyncio.Event().wait()


def _admit(name: str, metadata: Any) -> bool:
    return len(metadata) % 2 == 0


async def _read_all(calls: CallsConnection, head: bytes) -> None:
    answers = Answers(lambda: None, lambda: calls.stream(head, b"ask"), bytes, None)
    while await answers.read_all():
        pass


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _mutated(chance: random.Random, frame: Frame) -> Frame:
    kind, flags, stream, payload = frame
    what = chance.randrange(6)
    if what == 0:
        kind = chance.choice((*range(10), 0x42))
    elif what == 1:
        flags ^= 1 << chance.randrange(8)
    elif what == 2:
        stream = chance.choice((0, 1, 2, 3, 5, 7, stream + 2, 2**31 - 1, 2**32 - 1))
    elif what == 3 and payload:
        payload = _scratched(chance, payload)
    elif what == 4:
        payload = payload[: chance.randrange(len(payload) + 1)]
    else:
        payload += bytes(chance.choice((1, 2, 3, 5, 100)))
    return kind, flags, stream, payload


def _scratched(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(out)) if out else 0
        if out:
            out[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return bytes(out)


def _any_frame(chance: random.Random) -> Frame:
    size = chance.choice((0, 1, 4, 5, 6, 8, 9, 100))
    return chance.randrange(11), chance.randrange(256), chance.choice((0, 1, 3, 5)), chance.randbytes(size)


def _pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """Cut the bytes as a network might."""
    how = chance.random()
    if how < 0.4:
        return [data]
    most = chance.choice((1, 9, 100, 1000)) if len(data) < 3000 else chance.choice((500, 5000))
    cut, at = [], 0
    while at < len(data):
        size = chance.randint(1, most)
        cut.append(data[at : at + size])
        at += size
    return cut


class LogOfErrors:
    """In place of the server's log: an error there is one of the server."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def warning(self, *_: Any, **__: Any) -> None:
        """Take a connection that is cut off."""

    def exception(self, event: str, **_: Any) -> None:
        """Take a handler that failed."""
        self.errors.append(event)


def replace_log(monkeypatch: Any) -> LogOfErrors:
    """Put a LogOfErrors in place of the server's logs."""
    from penstock.http2 import server_connection

    log = LogOfErrors()
    for module in (server_module, server_connection):
        monkeypatch.setattr(module, "_log", log)
    return log
