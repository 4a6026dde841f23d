"""Load client of the overload benchmarks: calls of GenerateText at random times, each with a deadline, and their ends.

It reads frames and looks at the first byte of a message only (`_http2.py`), so that a call costs it a tenth of what it
costs the router: on a machine that all of them share, it must not be what decides.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "services")]
from penstock.http2.headers import HeaderDecoder
from penstock.v1 import config_pb2, text_pb2

from benchmarks import _http2

_WORDS = ("river", "stone", "lamp", "cloud", "garden", "winter", "paper", "silver", "road", "music", "forest", "window")
_PATH = "/penstock.v1.TextService/Generate"
# First bytes of messages with `started` and with `finished`.
_STARTED, _FINISHED = 0x0A, 0x1A
_OK, _DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED = "0", "4", "8"
# A call that the service should have ended at its deadline is given up so much later.
_PATIENCE_SECONDS = 5.0


@dataclass(slots=True)
class Call:
    """A call under way. Times are of time.monotonic()."""

    began: float
    deadline: float
    forecast: float | None = None
    has_begun: bool = False
    has_finished: bool = False


@dataclass
class Flow:
    """Ends of calls."""

    # When each good one began, its seconds, and its seconds as they were forecast then (None: no forecast).
    good: list[tuple[float, float, float | None]] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    # Calls that died at their deadline: before their first token, and after it.
    late_waiting: list[float] = field(default_factory=list)
    late_running: list[float] = field(default_factory=list)
    without_pushback: int = 0
    # Anything else, by status: none is to be expected.
    lost: Counter[str] = field(default_factory=Counter)
    # How much later than meant each call was made: what machine and client take by themselves.
    lags: list[float] = field(default_factory=list)

    @property
    def late(self) -> int:
        """Number of calls that died at their deadline."""
        return len(self.late_waiting) + len(self.late_running)

    @property
    def accepted(self) -> int:
        """Number of calls that were not refused."""
        return len(self.good) + self.late + self.lost.total()


class _Calls(_http2.Connection):
    """Connection whose calls have a deadline and a token, and whose trailers are read."""

    def __init__(self, authority: str, on_message: Callable[[int, bytes], None], on_end: Callable[[int], None]) -> None:
        super().__init__(authority, on_message, on_end)
        self._decoder = HeaderDecoder(1 << 16)
        self.statuses: dict[int, dict[str, str]] = {}

    def call(self, message: bytes, seconds: float | None) -> int:
        """Make a call; returns the number of its stream."""
        assert self._transport is not None
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        head = _http2._header_block(self._authority, _PATH, self.content_type)
        if seconds is not None:
            head += _http2._literal("grpc-timeout", f"{int(seconds * 1e3)}m")
        frames = _http2.frame(_http2.HEADERS, _http2.END_HEADERS, stream, head)
        body = b"\x00" + struct.pack(">I", len(message)) + message
        self._transport.write(frames + _http2.frame(_http2.DATA, _http2.END_STREAM, stream, body))
        return stream

    def _take_control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _http2.HEADERS:
            # All blocks in their order: each may change the decoder's table.
            fields = dict(self._decoder.decode(payload))
            if flags & _http2.END_STREAM:
                self.statuses[stream] = fields
        super()._take_control(kind, flags, stream, payload)


class Client:
    """Calls over a few connections, spread in turn."""

    def __init__(self, prompt_words: int, tokens: int, seed: int) -> None:
        """Make it: prompts and times of calls are drawn from `seed`."""
        self._random = random.Random(seed)
        self._prompt_words = prompt_words
        self._tokens = tokens
        self._connections: list[_Calls] = []
        self._live: list[dict[int, Call]] = []
        self._turn = 0
        self._flow = Flow()
        self._next: bool = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Seconds that a call made now would take, where they are known; kept with each call.
        self.forecast: float | None = None

    async def connect(self, address: str, connections: int = 4) -> None:
        """Open the connections."""
        for number in range(connections):
            live: dict[int, Call] = {}

            def on_message(stream: int, message: bytes, live: dict[int, Call] = live) -> None:
                call = live.get(stream)
                if call is not None and message:
                    # Where tokens come before `finished`, it has begun.
                    call.has_begun = call.has_begun or message[0] > _STARTED
                    call.has_finished = call.has_finished or message[0] == _FINISHED

            def on_end(stream: int, number: int = number) -> None:
                self._ended(number, stream)

            self._live.append(live)
            connection = await _http2.connect(address, on_message, on_end, _Calls)
            assert isinstance(connection, _Calls)
            self._connections.append(connection)

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections:
            connection.close()

    async def closed_loop(self, callers: int, seconds: float) -> Flow:
        """Keep `callers` calls going; return when all have ended."""
        flow = self._flow = Flow()
        self._next = True
        for _ in range(callers):
            self._call(None)
        await asyncio.sleep(seconds)
        self._next = False
        await self._idle.wait()
        return flow

    async def open_loop(self, rate: float, seconds: float, deadline: float) -> Flow:
        """Make calls at random times, `rate` a second, whatever becomes of them; return when all have ended."""
        flow = self._flow = Flow()
        at = time.monotonic()
        until = at + seconds
        while (at := at + self._random.expovariate(rate)) < until:
            wait = at - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            flow.lags.append(time.monotonic() - at)
            self._call(deadline)
        try:
            async with asyncio.timeout(deadline + _PATIENCE_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            for live in self._live:
                flow.lost["never ended"] += len(live)
                live.clear()
            self._idle.set()
        return flow

    def _call(self, seconds: float | None) -> None:
        self._turn = number = (self._turn + 1) % len(self._connections)
        request = text_pb2.GenerateTextRequest(
            text=" ".join(self._random.choices(_WORDS, k=self._prompt_words)),
            config=config_pb2.GenerationConfig(max_new_tokens=self._tokens),
            stop=config_pb2.StopConfig(ignore_eos=True),
        )
        stream = self._connections[number].call(request.SerializeToString(), seconds)
        now = time.monotonic()
        self._live[number][stream] = Call(now, now + (seconds or 1e9), self.forecast)
        self._idle.clear()

    def _ended(self, number: int, stream: int) -> None:
        fields = self._connections[number].statuses.pop(stream, {})
        call = self._live[number].pop(stream, None)
        if call is None:
            return
        self._note(call, fields)
        if self._next:
            self._call(None)
        elif not any(self._live):
            self._idle.set()

    def _note(self, call: Call, fields: dict[str, str]) -> None:
        flow, now, status = self._flow, time.monotonic(), fields.get("grpc-status", "")
        if status == _RESOURCE_EXHAUSTED:
            flow.refusals.append(now - call.began)
            flow.without_pushback += int(fields.get("grpc-retry-pushback-ms", "-1")) < 0
        elif status == _DEADLINE_EXCEEDED or (status == _OK and now > call.deadline):
            (flow.late_running if call.has_begun else flow.late_waiting).append(call.began)
        elif status == _OK and call.has_finished:
            flow.good.append((call.began, now - call.began, call.forecast))
        else:
            flow.lost[f"status {status or 'none'}"] += 1
