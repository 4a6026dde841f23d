"""Cases of RFC 9113 (sections 3 to 8), RFC 7541 and gRPC: bytes that a client sends, and what a server must do."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.http2 import frames
from penstock.v1 import tokenizer_pb2 as pb

Kind = Literal["connection", "stream", "grpc", "http", "ignored", "closed"]
PATH = "/penstock.v1.TokenizerService/GetTokenizer"
REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
HELLO = frames.PREFACE + frames.settings(())
OK, UNIMPLEMENTED, INTERNAL, RESOURCE_EXHAUSTED, INVALID_ARGUMENT, UNAUTHENTICATED = 0, 12, 13, 8, 3, 16
PROTOCOL, FLOW, SIZE, CLOSED = (
    frames.PROTOCOL_ERROR,
    frames.FLOW_CONTROL_ERROR,
    frames.FRAME_SIZE_ERROR,
    frames.STREAM_CLOSED,
)
END, END_HEADERS = frames.END_STREAM, frames.END_HEADERS
DATA, HEADERS, CONTINUATION = frames.DATA, frames.HEADERS, frames.CONTINUATION


@dataclass(frozen=True)
class Case:
    """Bytes behind the preface and SETTINGS (`raw`: in place of them), and what follows.

    `kind` and `code`: an error of the connection or of `stream`, a gRPC or HTTP status on `stream`; "ignored": nothing
    happens, "closed": the connection ends, by whatever code. After each case but the first two kinds a call is served.
    """

    name: str
    section: str
    data: bytes
    kind: Kind
    code: int = 0
    stream: int = 1
    raw: bool = False


def body(model: str = "m") -> bytes:
    """Make a request of GetTokenizer as gRPC frames it."""
    data = pb.GetTokenizerRequest(model=model).SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def head(
    fields: list[tuple[str, str]] | None = None, *, stream: int = 1, flags: int = END_HEADERS, more: bytes = b""
) -> bytes:
    """Make a HEADERS frame of a request; `more`: bytes behind its header block."""
    block = frames.request_headers(REQUEST if fields is None else fields)
    return frames.frame(HEADERS, flags, stream, block + more)


def data(payload: bytes, *, stream: int = 1, flags: int = END) -> bytes:
    """Make a DATA frame."""
    return frames.frame(DATA, flags, stream, payload)


def call(*more: tuple[str, str], stream: int = 1) -> bytes:
    """Make a whole call, with more header fields."""
    return head([*REQUEST, *more], stream=stream) + data(body(), stream=stream)


def without(name: str) -> list[tuple[str, str]]:
    """Return the request's fields but one."""
    return [field for field in REQUEST if field[0] != name]


def replaced(name: str, value: str) -> list[tuple[str, str]]:
    """Return the request's fields with another value of one."""
    return [(key, value if key == name else old) for key, old in REQUEST]


def _preface() -> Iterator[Case]:
    yield Case("a preface and empty SETTINGS", "3.4", HELLO + call(), "grpc", OK, raw=True)
    yield Case("a preface that is wrong at its end", "3.4", frames.PREFACE[:-2] + b"XX" + call(), "closed", raw=True)
    yield Case("no preface", "3.4", frames.settings(()) + call(), "closed", raw=True)
    yield Case("HTTP/1", "3.4", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", "closed", raw=True)
    ping = frames.frame(frames.PING, 0, 0, bytes(8))
    for name, first in {
        "PING": ping,
        "HEADERS": call(),
        "WINDOW_UPDATE": frames.window_update(0, 1),
        "an acknowledgement": frames.frame(frames.SETTINGS, frames.ACK, 0),
        "an unknown frame": frames.frame(0x42, 0, 0, b"x"),
    }.items():
        yield Case(
            f"{name} as the first frame", "3.4", frames.PREFACE + first + call(), "connection", PROTOCOL, raw=True
        )


def _frames() -> Iterator[Case]:
    yield Case("an unknown frame is ignored", "4.1", frames.frame(0x42, 0xFF, 0, b"whatever") + call(), "grpc", OK)
    yield Case("an unknown frame of a stream", "4.1", frames.frame(0x42, 0, 77, b"whatever"), "ignored")
    yield Case("unknown flags are ignored", "4.1", frames.frame(frames.PING, 0xFE, 0, bytes(8)) + call(), "grpc", OK)
    reserved = frames.frame(frames.PING, 0, 0x80000000, bytes(8))
    yield Case("the reserved bit of a stream's number", "4.1", reserved + call(), "grpc", OK)
    large = frames.frame(0x42, 0, 0, bytes(16_385))
    yield Case("an unknown frame that is too large", "4.2", large, "connection", SIZE)
    yield Case("DATA that is too large", "4.2", head() + data(bytes(16_385)), "connection", SIZE)
    huge = frames.frame(HEADERS, END_HEADERS, 1, bytes(16_385))
    yield Case("HEADERS that are too large", "4.2", huge, "connection", SIZE)
    yield Case("DATA as large as may be", "4.2", head() + data(body("m" * 16_376)), "grpc", OK)
    settings = frames.frame(frames.SETTINGS, 0, 0, bytes(6 * 2731))
    yield Case("SETTINGS that are too large", "4.2", settings, "connection", SIZE)


def _header_blocks() -> Iterator[Case]:
    block = frames.request_headers(REQUEST)
    parts = [block[:10], block[10:20], block[20:]]
    begin = frames.frame(HEADERS, 0, 1, parts[0])
    rest = frames.frame(CONTINUATION, 0, 1, parts[1]) + frames.frame(CONTINUATION, END_HEADERS, 1, parts[2])
    yield Case("a block in three parts", "4.3", begin + rest + data(body()), "grpc", OK)
    empty = frames.frame(CONTINUATION, 0, 1)
    yield Case("an empty part", "6.10", begin + empty + rest + data(body()), "grpc", OK)
    ended = frames.frame(HEADERS, END, 1, parts[0]) + rest
    yield Case("END_STREAM on HEADERS that go on", "6.10", ended, "grpc", INTERNAL)
    between = {
        "PING": frames.frame(frames.PING, 0, 0, bytes(8)),
        "DATA": data(b""),
        "HEADERS": head(stream=3),
        "an unknown frame": frames.frame(0x42, 0, 0, b"x"),
        "SETTINGS": frames.settings(()),
        "PRIORITY": frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
        "RST_STREAM": frames.reset(1, frames.CANCEL),
        "CONTINUATION of another stream": frames.frame(CONTINUATION, END_HEADERS, 3, parts[1]),
    }
    for name, frame in between.items():
        yield Case(f"{name} within a block", "4.3", begin + frame + rest, "connection", PROTOCOL)
    alone = frames.frame(CONTINUATION, END_HEADERS, 1, b"\x82")
    yield Case("CONTINUATION of nothing", "6.10", alone, "connection", PROTOCOL)
    yield Case("CONTINUATION behind the end of a block", "6.10", head() + alone, "connection", PROTOCOL)
    yield Case("CONTINUATION behind DATA", "6.10", head() + data(body(), flags=0) + alone, "connection", PROTOCOL)
    yield Case(
        "CONTINUATION of stream 0", "6.10", begin + frames.frame(CONTINUATION, 4, 0, b""), "connection", PROTOCOL
    )
    flood = frames.frame(CONTINUATION, 0, 1, b"") * 20_000
    yield Case("a flood of empty CONTINUATION", "10.5", begin + flood, "closed")
    long = frames.frame(CONTINUATION, 0, 1, bytes(16_384)) * 8
    yield Case("a block without end", "10.5.1", begin + long, "closed")
    bombs = {
        "an index of nothing": b"\xff\x80\x01",
        "index 0": b"\x80",
        "an integer without end": b"\xff" * 40,
        "a string that is cut short": b"\x00\x7f\x01a",
        "a table that is too large": b"\x3f\xe2\x1f" + block,
        "a new size behind a field": block + b"\x20",
        "Huffman code with EOS": b"\x00\x84\xff\xff\xff\xff\x01a",
        "Huffman code with eight bits of padding": b"\x00\x82\x1f\xff\x01a",
        "Huffman code whose padding is not EOS": b"\x00\x81\x18\x01a",
        "a name of an index of nothing": b"\x7f\x80\x01\x01a",
    }
    for name, bomb in bombs.items():
        frame = frames.frame(HEADERS, END_HEADERS, 1, bomb)
        yield Case(f"HPACK: {name}", "4.3", frame, "connection", frames.COMPRESSION_ERROR)
    sizes = frames.frame(HEADERS, END_HEADERS, 1, b"\x20\x3f\xe1\x1f" + block) + data(body())
    yield Case("HPACK: two new sizes of the table", "4.3", sizes, "grpc", OK)
    indexed = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 12_000
    yield Case("HPACK: a small block of many large fields", "10.5.1", head(more=indexed), "closed")


def _streams() -> Iterator[Case]:
    idle = {
        "DATA": data(b"x", stream=5),
        "RST_STREAM": frames.reset(5, 0),
        "WINDOW_UPDATE": frames.window_update(5, 1),
    }
    for name, frame in idle.items():
        yield Case(f"{name} of an idle stream", "5.1", frame, "connection", PROTOCOL)
    for name, frame in {
        "DATA": data(b"x", stream=2),
        "RST_STREAM": frames.reset(2, 0),
        "WINDOW_UPDATE": frames.window_update(2, 1),
    }.items():
        yield Case(f"{name} of an even stream", "5.1.1", call(stream=5) + frame, "connection", PROTOCOL)
    yield Case("PRIORITY of an idle stream", "5.1", frames.frame(frames.PRIORITY, 0, 9, bytes(5)), "ignored")
    wait = head() + data(body("wait"))
    yield Case("DATA behind the end of a request", "5.1", wait + data(b"x"), "stream", CLOSED)
    yield Case("HEADERS behind the end of a request", "5.1", wait + head(flags=5), "stream", CLOSED)
    yield Case("WINDOW_UPDATE behind the end of a request", "5.1", wait + frames.window_update(1, 1), "ignored")
    gone = head() + frames.reset(1, frames.CANCEL)
    yield Case("DATA behind a reset", "5.1", gone + data(b"x"), "stream", CLOSED)
    yield Case("HEADERS behind a reset", "5.1", gone + head(flags=5), "stream", CLOSED)
    yield Case("WINDOW_UPDATE behind a reset", "5.1", gone + frames.window_update(1, 1), "ignored")
    yield Case("RST_STREAM behind a reset", "5.1", gone + frames.reset(1, 0), "ignored")
    yield Case("PRIORITY behind a reset", "5.1", gone + frames.frame(frames.PRIORITY, 0, 1, bytes(5)), "ignored")
    yield Case("HEADERS of an even stream", "5.1.1", call(stream=2), "connection", PROTOCOL)
    yield Case("a stream below the last", "5.1.1", call(stream=5) + call(stream=3), "connection", PROTOCOL)
    yield Case("a stream that leaves numbers out", "5.1.1", call(stream=9), "grpc", OK, stream=9)
    late = head(replaced(":path", "/no/Method"), stream=1) + data(bytes(1000), flags=0) * 3
    yield Case("DATA of a call that the server ended", "5.1", late, "grpc", UNIMPLEMENTED)
    trailers = head(replaced(":path", "/no/Method")) + frames.frame(HEADERS, 5, 1, frames.request_headers([("a", "b")]))
    yield Case("trailers of a call that the server ended", "5.1", trailers, "grpc", UNIMPLEMENTED)


def _definitions() -> Iterator[Case]:
    """Cases of section 6."""
    yield Case("DATA of stream 0", "6.1", data(b"x", stream=0), "connection", PROTOCOL)
    padded = frames.PADDED | END
    yield Case("DATA with padding", "6.1", head() + data(b"\x03" + body() + bytes(3), flags=padded), "grpc", OK)
    yield Case("DATA of padding alone", "6.1", head() + data(b"\x03" + bytes(3), flags=padded), "grpc", INTERNAL)
    yield Case("more padding than DATA", "6.1", head() + data(b"\x04" + b"abc", flags=padded), "connection", PROTOCOL)
    yield Case(
        "padding as long as DATA", "6.1", head() + data(b"\x04" + bytes(3), flags=padded), "connection", PROTOCOL
    )
    yield Case("DATA without its pad length", "4.2", head() + data(b"", flags=padded), "connection", SIZE)
    yield Case("HEADERS of stream 0", "6.2", head(stream=0), "connection", PROTOCOL)
    block = frames.request_headers(REQUEST)
    both = END_HEADERS | frames.PADDED | frames.PRIORITISED
    whole = frames.frame(HEADERS, both, 1, b"\x02" + bytes(5) + block + bytes(2)) + data(body())
    yield Case("HEADERS with padding and priority", "6.2", whole, "grpc", OK)
    itself = frames.frame(HEADERS, END_HEADERS | frames.PRIORITISED, 1, (1).to_bytes(4, "big") + b"\0" + block)
    yield Case("HEADERS that depend on themselves", "5.3", itself + data(body()), "grpc", OK)
    much = frames.frame(HEADERS, END_HEADERS | frames.PADDED, 1, bytes((255,)) + block[:200])
    yield Case("more padding than HEADERS", "6.2", much, "connection", PROTOCOL)
    into = frames.frame(HEADERS, both, 1, bytes((3,)) + bytes(5) + b"ab")
    yield Case("padding that reaches into the priority", "6.2", into, "connection", PROTOCOL)
    short = frames.frame(HEADERS, END_HEADERS | frames.PRIORITISED, 1, bytes(4))
    yield Case("HEADERS that are too short for their priority", "4.2", short, "connection", SIZE)
    yield Case(
        "HEADERS without their pad length",
        "4.2",
        frames.frame(HEADERS, END_HEADERS | frames.PADDED, 1),
        "connection",
        SIZE,
    )
    yield Case("PRIORITY of stream 0", "6.3", frames.frame(frames.PRIORITY, 0, 0, bytes(5)), "connection", PROTOCOL)
    yield Case(
        "PRIORITY of four bytes", "6.3", head() + frames.frame(frames.PRIORITY, 0, 1, bytes(4)), "connection", SIZE
    )
    itself = frames.frame(frames.PRIORITY, 0, 1, (1).to_bytes(4, "big") + b"\0")
    yield Case("PRIORITY of a stream on itself", "5.3", itself + call(), "grpc", OK)
    yield Case("RST_STREAM of stream 0", "6.4", frames.reset(0, 0), "connection", PROTOCOL)
    for size in (3, 5):
        frame = frames.frame(frames.RST_STREAM, 0, 1, bytes(size))
        yield Case(f"RST_STREAM of {size} bytes", "6.4", head() + frame, "connection", SIZE)
    yield Case("SETTINGS of a stream", "6.5", frames.frame(frames.SETTINGS, 0, 1), "connection", PROTOCOL)
    yield Case("SETTINGS of five bytes", "6.5", frames.frame(frames.SETTINGS, 0, 0, bytes(5)), "connection", SIZE)
    acknowledgement = frames.frame(frames.SETTINGS, frames.ACK, 0, bytes(6))
    yield Case("SETTINGS in an acknowledgement", "6.5", acknowledgement, "connection", SIZE)
    values = {
        "SETTINGS_ENABLE_PUSH 2": ((2, 2), PROTOCOL),
        "SETTINGS_INITIAL_WINDOW_SIZE 2^31": ((4, 2**31), FLOW),
        "SETTINGS_MAX_FRAME_SIZE 16383": ((5, 16_383), PROTOCOL),
        "SETTINGS_MAX_FRAME_SIZE 2^24": ((5, 2**24), PROTOCOL),
    }
    for name, (value, code) in values.items():
        yield Case(name, "6.5.2", frames.settings((value,)), "connection", code)
        behind = frames.settings((value, (value[0], 16_384 if value[0] > 2 else 0)))
        yield Case(f"{name}, and a good value behind it", "6.5.3", behind, "connection", code)
    good = frames.settings(((1, 0), (2, 0), (3, 0), (4, 1), (5, 2**24 - 1), (6, 1000), (0x99, 7)))
    more = frames.settings(((4, 1 << 20),))
    yield Case("SETTINGS of every kind", "6.5.2", good + more + call(), "grpc", OK)
    yield Case("an acknowledgement of nothing", "6.5.3", frames.frame(frames.SETTINGS, 1, 0) + call(), "grpc", OK)
    push = frames.frame(frames.PUSH_PROMISE, END_HEADERS, 1, (2).to_bytes(4, "big") + block)
    yield Case("PUSH_PROMISE", "8.4", head() + push, "connection", PROTOCOL)
    yield Case("PING of a stream", "6.7", frames.frame(frames.PING, 0, 1, bytes(8)), "connection", PROTOCOL)
    for size in (0, 7, 9):
        yield Case(f"PING of {size} bytes", "6.7", frames.frame(frames.PING, 0, 0, bytes(size)), "connection", SIZE)
    yield Case("an answer to no PING", "6.7", frames.frame(frames.PING, 1, 0, bytes(8)) + call(), "grpc", OK)
    yield Case("GOAWAY of a stream", "6.8", frames.frame(frames.GOAWAY, 0, 1, bytes(8)), "connection", PROTOCOL)
    yield Case("GOAWAY of seven bytes", "4.2", frames.frame(frames.GOAWAY, 0, 0, bytes(7)), "connection", SIZE)
    yield Case("WINDOW_UPDATE of 0 bytes for all", "6.9", frames.window_update(0, 0), "connection", PROTOCOL)
    yield Case(
        "WINDOW_UPDATE of 0 bytes for a stream", "6.9", wait_then(frames.window_update(1, 0)), "stream", PROTOCOL
    )
    for size in (3, 5):
        frame = frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(size - 1) + b"\1")
        yield Case(f"WINDOW_UPDATE of {size} bytes", "6.9", frame, "connection", SIZE)
    update = frames.frame(frames.WINDOW_UPDATE, 0, 0, b"\x80\0\0\1")
    yield Case("the reserved bit of WINDOW_UPDATE", "6.9", update + call(), "grpc", OK)
    most = frames.MAX_WINDOW
    yield Case("a window of all that is too large", "6.9.1", frames.window_update(0, most), "connection", FLOW)
    yield Case("a window that is too large", "6.9.1", wait_then(frames.window_update(1, most)), "stream", FLOW)
    grown = wait_then(frames.window_update(1, 1) + frames.settings(((4, most),)))
    yield Case("SETTINGS that make a window too large", "6.9.2", grown, "connection", FLOW)
    flood = head() + data(bytes(16_384), flags=0) * 80
    yield Case("more DATA than the window", "6.9.1", flood, "closed")


def wait_then(more: bytes) -> bytes:
    """Make a call that is not answered yet, and more bytes."""
    return head() + data(body("wait")) + more


def _messages() -> Iterator[Case]:
    """Cases of section 8: malformed requests are stream errors."""
    for name in (":method", ":scheme", ":path"):
        yield Case(f"no {name}", "8.3.1", head(without(name)) + data(body()), "stream", PROTOCOL)
        yield Case(f"{name} twice", "8.3", head([dict_field(name), *REQUEST]) + data(body()), "stream", PROTOCOL)
    yield Case(":authority twice", "8.3", head([(":authority", "a"), *REQUEST]), "stream", PROTOCOL)
    for value in ("", PATH[1:], "*", "x", "é", "?/", "%2f"):
        odd = replaced(":path", value)
        yield Case(f"{value!r} as a :path", "8.3.1", head(odd), "grpc", UNIMPLEMENTED)
        yield Case(f"{value!r} as a :path alone", "8.3.1", head(odd, flags=5), "grpc", UNIMPLEMENTED)
        plain = [field for field in odd if field[0] != "content-type"]
        yield Case(f"{value!r} as a :path that is not gRPC's", "8.3.1", head(plain, flags=5), "stream", PROTOCOL)
    yield Case("an unknown pseudo-header field", "8.3", head([(":what", "x"), *REQUEST]), "stream", PROTOCOL)
    yield Case(":status in a request", "8.3", head([(":status", "200"), *REQUEST]), "stream", PROTOCOL)
    yield Case(":protocol in a request", "8.3", head([(":protocol", "x"), *REQUEST]), "stream", PROTOCOL)
    late = [*without(":path"), dict_field(":path")]
    yield Case("a pseudo-header field behind others", "8.3", head(late), "stream", PROTOCOL)
    bad_names = {"upper case": "Abc", "a space": "a b", "a colon": "a:b", "nothing": "", "DEL": "a\x7f", "NUL": "a\0"}
    for name, value in bad_names.items():
        yield Case(f"a name with {name}", "8.2.1", call((value, "x")), "stream", PROTOCOL)
    raw = frames.frame(HEADERS, END_HEADERS, 1, frames.request_headers(REQUEST) + b"\x00\x02a\xe9\x01x") + data(body())
    yield Case("a name that is not ASCII", "8.2.1", raw, "stream", PROTOCOL)
    values = {
        "NUL": "a\0b",
        "a line feed": "a\nb",
        "a carriage return": "a\rb",
        "a space before it": " a",
        "a space behind it": "a ",
        "a tab behind it": "a\t",
    }
    for name, value in values.items():
        yield Case(f"a value with {name}", "8.2.1", call(("x-y", value)), "grpc", INTERNAL)
        yield Case(f"a grpc-timeout with {name}", "8.2.1", call(("grpc-timeout", value)), "grpc", INTERNAL)
        yield Case(f"a path with {name}", "8.2.1", head(replaced(":path", value)), "grpc", INTERNAL)
    for value in ("Bearer ", "Bearer\t", " Bearer x"):
        yield Case(f"{value!r} as authorization", "8.2.1", call(("authorization", value)), "grpc", UNAUTHENTICATED)
    for name in ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"):
        yield Case(f"{name}", "8.2.2", call((name, "x")), "grpc", INTERNAL)
    yield Case("te of another value", "8.2.2", head(replaced("te", "gzip")) + data(body()), "grpc", INTERNAL)
    yield Case("another host than :authority", "8.3.1", call(("host", "b")), "grpc", INTERNAL)
    yield Case("no :authority", "8.3.1", head(without(":authority")) + data(body()), "grpc", OK)
    connect = [(":method", "CONNECT"), (":scheme", "http"), (":path", "/"), (":authority", "a")]
    yield Case("CONNECT with a path", "8.5", head(connect), "stream", PROTOCOL)
    yield Case("CONNECT", "8.5", head([connect[0], connect[3]]), "http", 405)
    length = str(len(body()))
    yield Case("a right content-length", "8.1.1", call(("content-length", length)), "grpc", OK)
    for name, value in {"larger": "99", "smaller": "1", "of letters": "1x", "negative": "-1", "empty": ""}.items():
        # What is no number is known before there is a call.
        expected = ("stream", PROTOCOL) if value.isdigit() else ("grpc", INTERNAL)
        yield Case(f"a content-length that is {name}", "8.1.1", call(("content-length", value)), *expected)
    two = call(("content-length", length), ("content-length", "3"))
    yield Case("two content-lengths", "8.1.1", two, "grpc", INTERNAL)
    nothing = head([*REQUEST, ("content-length", "5")], flags=END_HEADERS | END)
    yield Case("a content-length without a body", "8.1.1", nothing, "grpc", INTERNAL)
    part = head([*REQUEST, ("content-length", "50")]) + data(body(), flags=0)
    trailer = frames.frame(HEADERS, END_HEADERS | END, 1, frames.request_headers([("a", "b")]))
    yield Case("a content-length that trailers end", "8.1.1", part + trailer, "stream", PROTOCOL)
    sent = head() + data(body(), flags=0)
    yield Case("trailers", "8.1", sent + trailer, "grpc", OK)
    unended = frames.frame(HEADERS, END_HEADERS, 1, frames.request_headers([("a", "b")]))
    yield Case("trailers without END_STREAM", "8.1", sent + unended, "stream", PROTOCOL)
    for name, field in {"a pseudo-header field": (":path", "/"), "upper case": ("A", "b")}.items():
        bad = frames.frame(HEADERS, END_HEADERS | END, 1, frames.request_headers([field]))
        yield Case(f"trailers with {name}", "8.1", sent + bad, "stream", PROTOCOL)
    yield Case("trailers with connection", "8.2.2", sent + head([("connection", "x")], flags=5), "stream", PROTOCOL)


def dict_field(name: str) -> tuple[str, str]:
    """Return a field of the request."""
    return name, dict(REQUEST)[name]


def _grpc() -> Iterator[Case]:
    """Cases of gRPC over HTTP/2."""
    for value in ("application/grpc+proto", "application/grpc;charset=utf-8"):
        yield Case(f"content-type {value}", "gRPC", head(replaced("content-type", value)) + data(body()), "grpc", OK)
    for value in ("application/grpc-web", "application/json", "", "text/html"):
        yield Case(f"content-type {value!r}", "gRPC", head(replaced("content-type", value)), "http", 415)
    yield Case("no content-type", "gRPC", head(without("content-type")), "http", 415)
    for value in ("GET", "PUT", "OPTIONS"):
        yield Case(f"method {value}", "gRPC", head(replaced(":method", value), flags=5), "http", 405)
    yield Case("no te", "gRPC", head(without("te")) + data(body()), "grpc", OK)
    for value in ("/", "/x", "/a/b/c", "/penstock.v1.TokenizerService/", PATH + "x", PATH + "?a=b"):
        path = head(replaced(":path", value)) + data(body())
        yield Case(f"path {value}", "gRPC", path, "grpc", UNIMPLEMENTED)
    for value in ("", "1", "S", "1s", "-1S", "123456789S", "1.5S", "1 S"):
        yield Case(f"grpc-timeout {value!r}", "gRPC", call(("grpc-timeout", value)), "grpc", INTERNAL)
    for value in ("99999999H", "60S", "00000060S"):
        yield Case(f"grpc-timeout {value}", "gRPC", call(("grpc-timeout", value)), "grpc", OK)
    packed = gzip.compress(body()[5:])
    compressed = b"\1" + len(packed).to_bytes(4, "big") + packed
    yield Case(
        "a compressed message", "gRPC", head([*REQUEST, ("grpc-encoding", "gzip")]) + data(compressed), "grpc", OK
    )
    yield Case("a compressed message without grpc-encoding", "gRPC", head() + data(compressed), "grpc", INTERNAL)
    unknown = head([*REQUEST, ("grpc-encoding", "snappy")]) + data(compressed)
    yield Case("an encoding that is not known", "gRPC", unknown, "grpc", UNIMPLEMENTED)
    yield Case("a message flag of 2", "gRPC", head() + data(b"\2" + body()[1:]), "grpc", INTERNAL)
    over = head() + data(b"\0\x7f\xff\xff\xff", flags=0)
    yield Case("a message that is too large", "gRPC", over, "grpc", RESOURCE_EXHAUSTED)
    yield Case("no message", "gRPC", head(flags=5), "grpc", INTERNAL)
    yield Case("half of a message", "gRPC", head() + data(body()[:-1]), "grpc", INTERNAL)
    yield Case("half of a message's head", "gRPC", head() + data(b"\0\0"), "grpc", INTERNAL)
    yield Case("two messages", "gRPC", head() + data(body() * 2), "grpc", INTERNAL)
    garbage = head() + data(b"\0\0\0\0\3\xff\xff\xff")
    yield Case("a message that is no protobuf", "gRPC", garbage, "grpc", INVALID_ARGUMENT)
    parts = head() + b"".join(data(body()[at : at + 1], flags=0) for at in range(len(body()))) + data(b"")
    yield Case("a message byte by byte", "gRPC", parts, "grpc", OK)
    no_base64 = head(more=b"\x00\x05x-bin\x03!!!") + data(body())
    yield Case("metadata that is not base64", "gRPC", no_base64, "grpc", INTERNAL)
    fields = [*REQUEST, ("x", "y" * 20_000)]
    large = frames.header_frames(1, frames.request_headers(fields), end=False, limit=16_384)
    yield Case("more metadata than may be", "gRPC", large, "grpc", RESOURCE_EXHAUSTED)


def cases() -> list[Case]:
    """Return all cases."""
    made = (_preface, _frames, _header_blocks, _streams, _definitions, _messages, _grpc)
    return [case for make in made for case in make()]
