"""Fuzzer of the gateway's HTTP: connections with random requests, whose heads, framing and bodies are changed.

Most requests of a connection keep to HTTP's grammar, so that each must have an answer: routes with changed JSON, odd
queries, paths and headers. The last of many connections keeps to nothing: changed heads, chunks, bytes.
A connection is known by the seed of the run and its number, whatever ran before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import ssl
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from factories.wire.good_bodies import ROUTES, Route
from factories.wire.random_json import RandomJson
from factories.wire.raw_client import reset

AT_ONCE = 16
# Requests of a connection that keep to the grammar.
_COUNTS = (0, 1, 1, 3, 8, 20, 40)
# Share of requests with the token: bodies of the others are hardly looked at.
_SHOWN = 0.6
# A connection has its answers by then; more where the machine stops its programs for minutes.
PATIENCE_SECONDS = float(os.environ.get("PENSTOCK_FUZZ_PATIENCE", "60"))
# What follows no grammar may have no end for the server: then nothing has come for so long.
_SILENT_SECONDS = 0.3
# Kept of what has no end of a line yet.
_LONGEST_BYTES = 100
_STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d)[^\r\n]*\r\n")
# No request may be answered so. 501: the backend does not know a call. 503, 504: nobody there, too late.
_FAULTS = ("500", "502", "505", "506", "507", "508", "510", "511")
_FAULT_REASONS = (b'"reason": "INTERNAL"', b'"reason":"INTERNAL"', b"Internal Server Error")
_GETS = (
    "/v1/models",
    "/v1/models/penstock-demo",
    "/v1/models/{}",
    "/v1/responses/{}",
    "/v1/responses/{}/input_items",
    "/v1/conversations/{}",
    "/v1/conversations/{}/items",
    "/v1/conversations/a/items/{}",
    "/options",
    "/tokenizer_info",
    "/health",
    "/healthz",
    "/readyz",
    "/version",
    "/metrics",
    "/",
    "/page/{}",
    "/{}",
)
_NAMES = (
    "resp_0123456789abcdef0123456789abcdef",
    "a",
    "%00",
    "%ff%fe",
    "%ed%a0%80",
    "..%2f..%2fetc%2fpasswd",
    "../../etc/passwd",
    "a" * 5000,
    "%F0%9F%99%82",
    "a;b=c",
    "%",
    "%zz",
    "//a//",
)
_QUERIES = (
    "limit=" + "9" * 5000,
    "limit=-1",
    "limit=1e3",
    "limit=%00",
    "limit=",
    "limit=5&limit=6",
    "order=asc&after=a&limit=2",
    "after=%ed%a0%80",
    "&&&===",
    "include[]=a",
    "a=" + "b" * 20_000,
    "%",
)
_FIELDS = (
    "Accept: text/event-stream",
    "Accept-Encoding: gzip, br",
    "Accept: application/openmetrics-text; version=1.0.0",
    "Authorization: Bearer",
    "Authorization: Bearer ",
    "Authorization: Basic YTpi",
    "Authorization: Bearer \xff\xfe",
    "Authorization: Bearer " + "a" * 9000,
    "Authorization: bearer a b",
    "X-Api-Key: a",
    "X-Api-Key: \xe9",
    "X-Request-Id: " + "a" * 5000,
    "X-Request-Id: \xff",
    "Traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "Traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "Traceparent: ff-x",
    "Tracestate: " + "a=b," * 200,
    "Origin: http://evil.example",
    "Origin: null",
    "Sec-Fetch-Site: cross-site",
    "Cookie: a=b",
    "Content-Encoding: gzip",
    "Content-Encoding: deflate, gzip",
    "Content-Type: text/plain",
    "Content-Type: multipart/form-data; boundary=a",
    "Expect: 100-continue",
    "Range: bytes=0-1,2-3",
    "Range: bytes=-999999999999999999999",
    "If-None-Match: *",
    "If-Modified-Since: Thu, 01 Jan 1970 00:00:00 GMT",
    "X-Forwarded-For: 127.0.0.1",
    "X-Http-Method-Override: DELETE",
    "Te: trailers",
    "Connection: close",
    "Connection: keep-alive",
    "A:",
    "X-Empty: ",
)
# Behind it a server may understand something else than requests.
_UPGRADES = (
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: a",
    "Upgrade: websocket",
    "Upgrade: a/1",
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI", "get", "G\x00T", "")
_VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.1 ", "HTTP/1.", "HTP/1.1", "HTTP/99999999999.1", "")
_TARGETS = ("*", "http://evil.example/v1/models", "//evil.example", "evil.example:443", "/ /", "/\t", "", "\xff", "/#a")
_LENGTHS = (
    "-1",
    "+2",
    "0x2",
    "2, 2",
    "2, 3",
    "1e1",
    " ",
    "99999999999999999999999",
    "00002",
    "2 ",
    "\t2",
    "２",
    "1",
    "5",
)
_CODINGS = (
    "chunked, chunked",
    "xchunked",
    "identity",
    "gzip, chunked",
    "chunked;a=b",
    "Chunked",
    " chunked",
    "chunked\t",
)
_SIZES = (
    b"-1",
    b"+2",
    b"0x2",
    b"2 ",
    b" 2",
    b"2;a",
    b"2;" + b"a" * 5000,
    b"0" * 5000 + b"2",
    b"g",
    b"",
    b"f" * 20,
    b"2\n",
)
_SPECIAL = (b"\r", b"\n", b"\r\n", b"\0", b":", b" ", b"\t", b"\xff", b"\x80", b",", b";", b"\r\n\r\n", b"%")


@dataclass(frozen=True)
class Connection:
    """Bytes of one: requests in the grammar, and what follows none."""

    requests: tuple[bytes, ...]
    tail: bytes = field(repr=False)
    # The requests are sent at once, not each behind the answer of the one before it.
    is_pipelined: bool

    @property
    def count(self) -> int:
        return len(self.requests) + bool(self.tail)


@dataclass
class Totals:
    """Counts of a run, and what was wrong."""

    requests: int = 0
    connections: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        """Number of all answers."""
        return self.statuses.total()

    def __str__(self) -> str:
        rate = self.requests / self.seconds if self.seconds else 0.0
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        lines = [
            f"{self.requests} requests on {self.connections} connections, {self.sent_bytes >> 20} MiB, {rate:.0f}/s",
            f"answers {self.answers}: {counts}",
        ]
        return "\n".join([*lines, *self.problems[:40]])


class HttpFuzzer:
    """Sends connections to one gateway. Belongs to one event loop."""

    def __init__(self, address: str, seed: int, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        """Make it. `token`: of a caller who may; most requests show it."""
        host, _, port = address.rpartition(":")
        self._where, self._host = (host, int(port)), address
        self._seed, self._token, self._tls = seed, token, tls
        self.totals = Totals()

    async def run(
        self, count: int, *, first: int = 0, every: int = 0, look: Callable[[], None] = lambda: None
    ) -> Totals:
        """Send connections from number `first` on, until `count` requests were sent; call `look` after each `every`."""
        begin, numbers = time.perf_counter(), self._numbers(first, self.totals.requests + count)
        looked = self.totals.requests // max(1, every)

        async def work() -> None:
            nonlocal looked
            for number in numbers:
                await self._try(number)
                if every and self.totals.requests // every > looked:
                    looked = self.totals.requests // every
                    look()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        self.totals.seconds += time.perf_counter() - begin
        return self.totals

    def _numbers(self, first: int, until: int) -> Iterator[int]:
        """Yield numbers of connections while there are requests left to send."""
        number = first
        while self.totals.requests < until:
            yield number
            number += 1

    def connection(self, number: int) -> Connection:
        """Make a connection of the run."""
        draw = random.Random(f"{self._seed} {number}")
        requests = tuple(self._request(draw) for _ in range(draw.choice(_COUNTS)))
        has_tail = not requests or draw.random() < 0.6
        return Connection(requests, self._tail(draw) if has_tail else b"", draw.random() < 0.15)

    # In the grammar.

    def _request(self, draw: random.Random) -> bytes:
        fields = [f"Host: {self._host}"]
        if draw.random() < _SHOWN and self._token:
            fields.append(f"Authorization: Bearer {self._token}")
        elif draw.random() < 0.5:
            fields += draw.sample(_FIELDS, draw.choice((1, 1, 2, 4)))
        if draw.random() < 0.75:
            return self._post(draw, draw.choice(ROUTES), fields)
        method = draw.choice(("GET", "GET", "GET", "DELETE", "OPTIONS", "PUT"))
        path = draw.choice(_GETS).format(draw.choice(_NAMES))
        query = "?" + draw.choice(_QUERIES) if draw.random() < 0.4 else ""
        return _head(method, path + query, fields)

    def _post(self, draw: random.Random, route: Route, fields: list[str]) -> bytes:
        body = RandomJson(draw).body(route.fields, route.required)
        if any(one.startswith("Content-Encoding: gzip") for one in fields):
            packer = zlib.compressobj(wbits=31)
            body = packer.compress(body) + packer.flush()
        if not any(one.startswith("Content-Type") for one in fields):
            fields.append("Content-Type: application/json")
        if draw.random() < 0.15:
            return _head("POST", route.path, [*fields, "Transfer-Encoding: chunked"]) + _chunks(draw, body)
        return _head("POST", route.path, [*fields, f"Content-Length: {len(body)}"]) + body

    # In none.

    def _tail(self, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return self._changed_parts(draw)
        data = b"".join(self._request(draw) for _ in range(draw.choice((1, 1, 1, 3))))
        for _ in range(draw.choice((1, 1, 2, 8))):
            data = _scratched(draw, data)
        return data

    def _changed_parts(self, draw: random.Random) -> bytes:
        """Write a request with wrong words at right places."""
        method, target, version = "POST", draw.choice(ROUTES).path, "HTTP/1.1"
        fields, body = [f"Host: {self._host}"], b"{}"
        for _ in range(draw.choice((1, 1, 2, 3))):
            match draw.randrange(9):
                case 0:
                    method = draw.choice(_METHODS)
                case 1:
                    target = draw.choice(_TARGETS)
                case 2:
                    version = draw.choice(_VERSIONS)
                case 3:
                    fields.append(f"Content-Length: {draw.choice(_LENGTHS)}")
                case 4:
                    fields.append(f"Transfer-Encoding: {draw.choice(_CODINGS)}")
                case 5:
                    fields.append("Transfer-Encoding: chunked")
                    body = (
                        draw.choice(_SIZES)
                        + b"\r\n{}\r\n0\r\n"
                        + draw.choice((b"\r\n", b"", b"a: b\r\n\r\n", b"a\r\n"))
                    )
                case 6:
                    fields = draw.choice(([], [*fields, "Host: b.example"], ["Host:"], ["Host: a b"], ["hOST : a"]))
                case 7:
                    wrong = (" folded: a", "no colon", ": a", "a b: c", "a\0: b", "a: \0", "a: b\rc: d", "\x7f: a")
                    fields.append(draw.choice(wrong))
                case _:
                    fields += draw.sample((*_FIELDS, *_UPGRADES), 2) * draw.choice((1, 40))
        end = draw.choice(("\r\n", "\r\n", "\r\n", "\n", "\r"))
        head = end.join((f"{method} {target} {version}", *fields, "", ""))
        return head.encode("utf-8", "surrogatepass") + body

    # On the wire.

    async def _try(self, number: int) -> None:
        made, draw = self.connection(number), random.Random(number)
        self.totals.requests += made.count
        self.totals.connections += 1
        steps = [(one, 1) for one in made.requests]
        if made.is_pipelined and steps:
            steps = [(b"".join(made.requests), len(made.requests))]
        line: _Line | None = None
        try:
            for data, answers in steps:
                line = await self._ask(number, line, _pieces(draw, data), answers)
            if made.tail:
                await self._send_tail(number, line, _pieces(draw, made.tail))
        except OSError as error:
            self._note(number, f"{type(error).__name__}: {error}")

    async def _ask(self, number: int, line: _Line | None, pieces: list[bytes], answers: int) -> _Line | None:
        """Send requests in the grammar and await their answers; return the connection while it is open."""
        for is_again in (False, True):
            is_fresh = line is None
            if line is None:
                line = await self._open()
            wanted = len(line.statuses) + answers
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    is_whole = await line.exchange(pieces, wanted)
            except TimeoutError:
                self._note(number, f"no answer for {PATIENCE_SECONDS:g} s to {pieces[0][:150]!r}", line)
                return None
            if is_whole:
                self._note(number, "", line)
                return line
            has_answer = len(line.statuses) > wanted - answers
            self._note(number, "", line)
            line = None
            # What was answered last may have closed the connection; and a reset takes answers along.
            if has_answer or is_fresh or is_again:
                break
        return line

    async def _send_tail(self, number: int, line: _Line | None, pieces: list[bytes]) -> None:
        """Send what keeps to no grammar; read until nothing comes any more."""
        line = line or await self._open()
        line.silent_seconds = _SILENT_SECONDS
        with contextlib.suppress(TimeoutError):
            await line.exchange(pieces, None)
        self._note(number, "", line)

    async def _open(self) -> _Line:
        name = "localhost" if self._tls else None
        return _Line(*await asyncio.open_connection(*self._where, ssl=self._tls, server_hostname=name))

    def _note(self, number: int, problem: str, line: _Line | None = None) -> None:
        """Count a connection's answers; keep what was wrong."""
        if line is not None:
            self.totals.sent_bytes += line.sent_bytes
            self.totals.statuses.update(line.statuses[line.noted :])
            faults = {status for status in line.statuses[line.noted :] if status in _FAULTS}
            problem = problem or ("answered with " + ", ".join(sorted(faults)) if faults else line.fault)
            line.noted, line.sent_bytes, line.fault = len(line.statuses), 0, ""
        if problem:
            self.totals.problems.append(f"{self._seed} {number}: {problem}"[:300])


class _Line:
    """One connection, and the answers on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.statuses: list[str] = []
        self.fault = ""
        self.sent_bytes = 0
        # Statuses that were counted.
        self.noted = 0
        # Time that a piece of an answer may take; None: any.
        self.silent_seconds: float | None = None
        self._reader, self._writer, self._left = reader, writer, b""

    async def exchange(self, pieces: list[bytes], wanted: int | None) -> bool:
        """Send, and read until `wanted` statuses came; return False where the connection has ended before, or has to.

        Raises TimeoutError; the connection is closed then.
        """
        sending, is_open = asyncio.ensure_future(self._send(pieces)), False
        try:
            while wanted is None or len(self.statuses) < wanted:
                async with asyncio.timeout(self.silent_seconds):
                    data = await self._reader.read(1 << 16)
                if not data:
                    return False
                self._take(data)
            # Behind an answer that is there before all was read, nothing can be said on this connection.
            is_open = sending.done()
        except OSError:
            return False
        finally:
            sending.cancel()
            if not is_open:
                reset(self._writer)
        return is_open

    async def _send(self, pieces: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                self.sent_bytes += len(piece)
                self._writer.write(piece)
                await self._writer.drain()
                await asyncio.sleep(0)

    def _take(self, data: bytes) -> None:
        data = self._left + data
        self.statuses += [status for one in _STATUS.findall(data) if (status := one.decode()) != "100"]
        if any(reason in data for reason in _FAULT_REASONS):
            self.fault = "answered with INTERNAL"
        # An answer's last line has no end: it may be the begin of a status line.
        self._left = data[max(data.rfind(b"\n") + 1, len(data) - _LONGEST_BYTES) :]


def _head(method: str, target: str, fields: list[str]) -> bytes:
    return "\r\n".join((f"{method} {target} HTTP/1.1", *fields, "", "")).encode("latin-1")


def _chunks(draw: random.Random, body: bytes) -> bytes:
    out, at = [], 0
    while at < len(body):
        size = draw.choice((1, 7, 100, 10_000)) if len(body) < 1000 else 10_000
        piece = body[at : at + size]
        out.append(b"%x%b\r\n%b\r\n" % (len(piece), draw.choice((b"", b"", b";a=b")), piece))
        at += size
    trailers = draw.choice((b"", b"", b"x-a: b\r\n"))
    return b"".join((*out, b"0\r\n", trailers, b"\r\n"))


def _scratched(draw: random.Random, data: bytes) -> bytes:
    """Change bytes: in the head more often than in the body."""
    room = len(data) if draw.random() < 0.3 else min(len(data), 300)
    at = draw.randrange(room + 1)
    end = min(len(data), at + draw.choice((1, 1, 2, 10, 100)))
    match draw.randrange(6):
        case 0:
            return data[:at] + draw.choice(_SPECIAL) + data[at:]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:end] + data[at:end] * draw.choice((1, 2, 50)) + data[end:]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + draw.randbytes(end - at) + data[end:]
        case _:
            return data[:at] + draw.choice(_SPECIAL) + data[end:]


def _pieces(draw: random.Random, data: bytes) -> list[bytes]:
    """Cut the bytes as a network might."""
    if draw.random() < 0.7 or len(data) < 2:
        return [data]
    cuts = sorted(draw.randrange(len(data)) for _ in range(draw.choice((1, 2, 9))))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
