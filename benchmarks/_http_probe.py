"""Callers beside an attack on a gateway: authorised streams, short requests, health; their gaps, times, failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._report import percentile

# A caller gives up by then.
PATIENCE_SECONDS = 10.0
_ASK_SECONDS = 0.25
_LAG_SECONDS = 0.01


@dataclass
class Figures:
    """Times, in seconds, and failures that the callers saw in one phase."""

    # Between events of a stream, from one look at the connection to the next.
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    # Of whole short answers.
    asks: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    # By how much this process woke up too late: the machine's own part in the gaps.
    lags: list[float] = field(default_factory=list)

    def add(self, later: Figures) -> None:
        """Take in those of a later phase of the same kind."""
        for name in ("gaps", "health", "asks", "lags"):
            getattr(self, name).extend(getattr(later, name))
        self.failures += later.failures

    def p(self, times: list[float], share: float) -> float:
        """A percentile in milliseconds; 0 where there are no times."""
        return 1000 * percentile(times, share) if times else 0.0

    def told(self, name: str, later: Sequence[float] = ()) -> str:
        """Median, 99th percentile and longest of the times of that name in ms; `later` ones may be the longest."""
        times: list[float] = getattr(self, name)
        return f"{self.p(times, 0.5):.0f}/{self.p(times, 0.99):.0f}/{self.p([*times, *later], 1):.0f}"

    def facts(self) -> dict[str, Any]:
        """Return the same, and how many there are, as plain data."""
        found: dict[str, Any] = {"failures": self.failures}
        for name in ("gaps", "health", "asks", "lags"):
            times: list[float] = getattr(self, name)
            shares = {"p50": 0.5, "p99": 0.99, "max": 1}
            found[name] = {"count": len(times), **{key: self.p(times, share) for key, share in shares.items()}}
        return found


class Probe:
    """The callers. Belongs to one event loop."""

    def __init__(
        self, address: str, token: str, tls: ssl.SSLContext | None, *, health_seconds: float, stream_tokens: int
    ) -> None:
        self._address, self._token, self._tls = address, token, tls
        self._health_seconds, self._stream_tokens = health_seconds, stream_tokens
        self.figures = Figures()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Call all the time, for the block."""
        callers = (self._streams, self._health, self._asks, self._lag)
        tasks = [asyncio.ensure_future(_forever(one)) for one in callers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def turn(self) -> Figures:
        """Begin anew; return what was seen until now."""
        seen, self.figures = self.figures, Figures()
        return seen

    async def _streams(self) -> None:
        """One stream; what comes without an end of it, or with an error, is a failure."""
        async with self._failing("stream"), self._connection() as (reader, writer):
            writer.write(self._post(self._stream_tokens, stream=True))
            async with asyncio.timeout(PATIENCE_SECONDS):
                _require_200(await reader.readline())
            last, tail = 0.0, b""
            while b"[DONE]" not in tail:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    data = await reader.read(1 << 16)
                if not data:
                    raise ConnectionError("it broke off")
                now = time.perf_counter()
                tail = tail[-16:] + data
                if b"data: " in data:
                    if last:
                        self.figures.gaps.append(now - last)
                    last = now
            if b'"error"' in tail:
                raise ConnectionError("it ended with an error")

    async def _asks(self) -> None:
        begin = time.perf_counter()
        async with self._failing("request"), self._connection() as (reader, writer), asyncio.timeout(PATIENCE_SECONDS):
            writer.write(self._post(2, stream=False))
            _require_200(await reader.readline())
            await reader.read(-1)
            self.figures.asks.append(time.perf_counter() - begin)
        await asyncio.sleep(_ASK_SECONDS)

    async def _health(self) -> None:
        # A connection for each, as probes of container runtimes make them.
        begin = time.perf_counter()
        async with self._failing("health"), asyncio.timeout(PATIENCE_SECONDS), self._connection() as (reader, writer):
            writer.write(f"GET /health HTTP/1.1\r\nHost: {self._address}\r\nConnection: close\r\n\r\n".encode())
            _require_200(await reader.readline())
            self.figures.health.append(time.perf_counter() - begin)
        await asyncio.sleep(self._health_seconds)

    async def _lag(self) -> None:
        begin = time.perf_counter()
        await asyncio.sleep(_LAG_SECONDS)
        self.figures.lags.append(time.perf_counter() - begin - _LAG_SECONDS)

    def _post(self, tokens: int, *, stream: bool) -> bytes:
        body = json.dumps({"prompt": [1], "max_tokens": tokens, "ignore_eos": True, "stream": stream}).encode()
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {self._address}",
            f"Authorization: Bearer {self._token}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, _, port = self._address.rpartition(":")
        async with asyncio.timeout(PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=self._tls)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def _failing(self, what: str) -> AsyncIterator[None]:
        """Count what goes wrong in the block."""
        try:
            yield
        except (OSError, EOFError, TimeoutError) as error:
            self.figures.failures[f"{what}: {str(error) or type(error).__name__}"] += 1
            await asyncio.sleep(self._health_seconds)


async def _forever(call: Callable[[], Awaitable[None]]) -> None:
    while True:
        await call()


def _require_200(line: bytes) -> None:
    """Raise ConnectionError for a status line of another status, or none."""
    if not line.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(line.decode("latin-1").strip() or "closed without an answer")
