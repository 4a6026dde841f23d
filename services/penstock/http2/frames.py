"""Frames of HTTP/2 and header blocks of gRPC, as bytes."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable
from urllib.parse import quote

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)
MAX_HEADER_LIST_SIZE = 6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11
DEFAULT_WINDOW, DEFAULT_FRAME_SIZE, MAX_WINDOW = 65_535, 16_384, 2**31 - 1
FRAME_HEAD, MESSAGE_HEAD = 9, 5
# Bytes that the peer may send on a stream before a window update.
STREAM_WINDOW = 1 << 20
_OF_STREAMS = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION))
_OF_CONNECTIONS = frozenset((SETTINGS, PING, GOAWAY))
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_LEAST_GOAWAY = 8
_PRIORITY_BYTES = 5
_LARGEST_FRAME_SIZE = 2**24 - 1
# An answer that an HTTP/1 client understands.
NOT_HTTP_1 = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: 36\r\n\r\nThis is a gRPC server: HTTP/2 only.\n"
)

# Length (24 bits as 8 and 16), type, flags, stream; then gRPC's flag and length.
HEAD = struct.Struct(">BHBBI")
_MESSAGE = struct.Struct(">BHBBIBI")
_STATUS_200 = b"\x88"
# Literals without indexing; 31 is content-type in the static table.
_CONTENT_TYPE = b"\x0f\x10\x10application/grpc"
RESPONSE_HEADERS = _STATUS_200 + _CONTENT_TYPE
# Lengths that one byte encodes, and the first that takes more.
_LONG = 127
_LENGTHS = tuple(bytes((size,)) for size in range(_LONG))
_MESSAGE_SAFE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Most bytes of grpc-message: a longer one is cut, since clients limit the size of headers.
_MAX_MESSAGE_BYTES = 2048


class Violation(Exception):
    """The peer broke the protocol; `code` is HTTP/2's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def check(kind: int, flags: int, stream: int, size: int) -> None:
    """Check a frame. Raises Violation for a wrong size, or a stream of the wrong kind (RFC 9113, 6)."""
    if (stream == 0 and kind in _OF_STREAMS) or (stream and kind in _OF_CONNECTIONS):
        raise Violation(PROTOCOL_ERROR, "a frame of the wrong stream")
    if size != _SIZES.get(kind, size) or (kind == SETTINGS and (size % 6 or (flags & ACK and size))):
        raise Violation(FRAME_SIZE_ERROR, "a frame has the wrong size")
    if kind == GOAWAY and size < _LEAST_GOAWAY:
        raise Violation(FRAME_SIZE_ERROR, "a frame has the wrong size")


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings of a SETTINGS frame in order. Raises Violation for a value that is not allowed."""
    values = list(struct.iter_unpack(">HI", payload))
    for key, value in values:
        if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Violation(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
        if key == ENABLE_PUSH and value > 1:
            raise Violation(PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
        if key == MAX_FRAME_SIZE and not DEFAULT_FRAME_SIZE <= value <= _LARGEST_FRAME_SIZE:
            raise Violation(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
    return values


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Make one frame."""
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def message_frame(stream: int, message: bytes) -> bytes:
    """Make a DATA frame with one complete gRPC message."""
    size = len(message)
    total = size + MESSAGE_HEAD
    return _MESSAGE.pack(total >> 16, total & 0xFFFF, DATA, 0, stream, 0, size) + message


def content(flags: int, payload: bytes, *, prioritised: bool) -> bytes:
    """Return a frame's payload without its padding and, if `prioritised`, its priority. Raises Violation."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Violation(FRAME_SIZE_ERROR, "a frame has the wrong size")
        begin, end = 1, end - payload[0]
    if prioritised and flags & PRIORITISED:
        begin += _PRIORITY_BYTES
        if begin > len(payload):
            raise Violation(FRAME_SIZE_ERROR, "a frame has the wrong size")
    if begin > end:
        raise Violation(PROTOCOL_ERROR, "more padding than frame")
    return payload[begin:end]


def window_update(stream: int, more: int) -> bytes:
    """Make a WINDOW_UPDATE frame: the peer may send `more` bytes on `stream` (0: on the connection)."""
    return frame(WINDOW_UPDATE, 0, stream, more.to_bytes(4, "big"))


def request_headers(fields: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Make the header block that begins a call; binary metadata (`-bin`) is encoded here."""
    return b"".join(_field(name, value) for name, value in fields)


def timeout(seconds: float) -> str:
    """Make the value of grpc-timeout: at most eight digits, rounded up."""
    for unit, per_second in (("u", 1e6), ("m", 1e3), ("S", 1)):
        value = math.ceil(seconds * per_second)
        if value < 10**8:
            return f"{value}{unit}"
    return f"{min(math.ceil(seconds / 3600), 10**8 - 1)}H"


def reset(stream: int, code: int) -> bytes:
    """Make an RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last_stream: int, code: int, text: str = "") -> bytes:
    """Make a GOAWAY frame: streams above `last_stream` are not served; `text` is for people."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + text.encode())


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Make a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values))


def header_frames(stream: int, block: bytes, *, end: bool, limit: int) -> bytes:
    """Make a HEADERS frame, followed by CONTINUATION frames when the block is larger than `limit` bytes."""
    if 0 < len(block) <= limit:
        return frame(HEADERS, END_HEADERS | END_STREAM if end else END_HEADERS, stream, block)
    parts = [block[at : at + limit] for at in range(0, len(block), limit)]
    out = []
    for place, part in enumerate(parts):
        flags = (END_STREAM if end and not place else 0) | (END_HEADERS if part is parts[-1] else 0)
        out.append(frame(CONTINUATION if place else HEADERS, flags, stream, part))
    return b"".join(out)


def trailers(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Make the header block that ends a call."""
    fields = [_WELL if code == 0 else _literal("grpc-status", str(code).encode())]
    if message:
        # Cut by bytes, since an escaped character may take twelve of them, but between characters.
        short = message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        fields.append(_literal("grpc-message", quote(short, safe=_MESSAGE_SAFE).encode()))
    fields += [_field(name, value) for name, value in metadata]
    return b"".join(fields)


def refusal(status: int) -> bytes:
    """Make the header block that refuses a request that is not gRPC."""
    return _literal(":status", str(status).encode())


def _field(name: str, value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _literal(name, base64.b64encode(raw).rstrip(b"=") if name.endswith("-bin") else raw)


def _literal(name: str, value: bytes) -> bytes:
    raw = name.encode()
    size, more = len(raw), len(value)
    if size < _LONG and more < _LONG:
        return b"\x00" + _LENGTHS[size] + raw + _LENGTHS[more] + value
    return b"\x00" + _length(size) + raw + _length(more) + value


def _length(value: int) -> bytes:
    """Encode an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    if value < _LONG:
        return _LENGTHS[value]
    value -= _LONG
    out = bytearray((_LONG,))
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# Field of a call that ended well.
_WELL = _literal("grpc-status", b"0")
