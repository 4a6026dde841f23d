"""Decoding of header blocks, and the rules for fields of requests (RFC 9113, 8.2 and 8.3).

The hpack package takes 9 µs for a field, and for some blocks a time that grows with the square of their size. This
module takes 1.5 µs for the blocks of this transport and other plain clients: literals that neither use nor change the
dynamic table and have no Huffman code. It reads every other block with hpack's table and Huffman code.
"""

from __future__ import annotations

import re

from hpack import HPACKDecodingError, InvalidTableSizeError, OversizedHeaderListError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

Headers = list[tuple[str, str]]
_STATIC = [("", ""), *((name.decode(), value.decode()) for name, value in HeaderTable.STATIC_TABLE)]
# Bytes that a field counts besides its name and value (RFC 9113, 6.5.2).
_FIELD_BYTES = 32
# Bits of a field's first byte: an entry of a table; a literal that goes into the table, or a new size of the table.
_INDEXED, _CHANGES_TABLE = 0x80, 0x60
_NAME_BITS = 0x0F
# Multiple of the limit up to which blocks are still decoded: a peer that sends one loses a call, not the connection.
_READ_BEYOND = 4
# Most new sizes of the table in one block (an encoder sends at most two), and most bytes of an integer.
_MAX_RESIZES, _MAX_INTEGER = 64, 8
# Most digits of a content-length.
_MAX_DIGITS = 18
# Fields that belong to a connection of HTTP/1 (RFC 9113, 8.2.2).
_OF_HTTP_1 = frozenset(("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"))
_PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))
# Characters that are not allowed in names, and in values (RFC 9113, 8.2.1).
_NOT_IN_NAMES = re.compile("[\x00-\x20A-Z:\x7f-\U0010ffff]")
_NOT_IN_VALUES = re.compile("[\x00\r\n]|^[ \t]|[ \t]$")
_BAD_VALUE = "a field's value has a character that none may have, or begins or ends with a space"


class HeadersTooLarge(Exception):
    """Headers are larger than the limit; later blocks can still be read."""


class MalformedError(ValueError):
    """Fields do not make a request; a stream error of PROTOCOL_ERROR (RFC 9113, 8.1.1)."""


class OddFieldError(MalformedError):
    """A field's value is not allowed, but the request is clear: it can be answered, and then the stream is reset."""


class OddCredentialsError(OddFieldError):
    """Credentials are invalid, such as a scheme with nothing after its space."""


class OddPathError(OddFieldError):
    """A path is invalid: no method has such a name."""


def check_request(fields: Headers) -> None:
    """Check the first fields of a request. Raises MalformedError."""
    pseudo: dict[str, str] = {}
    at = 0
    for name, value in fields:
        if name[:1] != ":":
            break
        if name in pseudo or name not in _PSEUDO:
            raise MalformedError("a pseudo-header field twice, or an unknown one")
        if _NOT_IN_VALUES.search(value):
            raise OddFieldError(_BAD_VALUE)
        pseudo[name] = value
        at += 1
    check_trailers(fields[at:] if at else fields)
    if pseudo.get(":method") == "CONNECT":
        if ":authority" not in pseudo or len(pseudo) != 2:
            raise MalformedError("CONNECT takes :authority alone")
        return
    path = pseudo.get(":path")
    if not pseudo.get(":method") or not pseudo.get(":scheme") or path is None:
        raise MalformedError("a request has a method, a scheme and a path")
    if path[:1] != "/":
        raise OddPathError("a path begins with a slash")
    authority = pseudo.get(":authority")
    if authority is not None:
        for name, value in fields:
            if name == "host" and value != authority:
                raise OddFieldError("host and :authority differ")


def check_trailers(fields: Headers) -> None:
    """Check fields other than pseudo-header fields. Raises MalformedError."""
    for name, value in fields:
        if not name or _NOT_IN_NAMES.search(name):
            raise MalformedError("a field's name has a character that none may have, or stands behind others")
        if _NOT_IN_VALUES.search(value):
            raise (OddCredentialsError if name == "authorization" else OddFieldError)(_BAD_VALUE)
        if name in _OF_HTTP_1 or (name == "te" and value.lower() != "trailers"):
            raise OddFieldError("a field that belongs to a connection of HTTP/1")


def content_length(fields: Headers) -> int | None:
    """Return the value of content-length; None without one. Raises MalformedError."""
    values = {value for name, value in fields if name == "content-length"}
    if not values:
        return None
    value = values.pop()
    if values or not (value.isascii() and value.isdigit()) or len(value) > _MAX_DIGITS:
        raise OddFieldError("content-length is not a number")
    return int(value)


class HeaderDecoder:
    """Decoder of one direction of a connection."""

    def __init__(self, max_bytes: int) -> None:
        """Make it. At most `max_bytes` of headers are allowed, counted as in RFC 9113."""
        self._max_bytes = max_bytes
        self._table = HeaderTable()
        # The last plain block without its last field, and its size: a peer's blocks begin the same way.
        self._begin: tuple[bytes, Headers, int] = (b"", [], 0)

    def decode(self, block: bytes) -> Headers:
        """Return the headers in order, including repeated ones; bytes that are not UTF-8 are replaced.

        Raises HeadersTooLarge, hpack.HPACKError.
        """
        try:
            plain = self._plain(block)
        except IndexError:  # it is cut short
            plain = None
        if plain is not None:
            return plain
        try:
            fields, size = self._any(block)
        except IndexError:
            raise HPACKDecodingError("a block is cut short") from None
        if size > self._max_bytes:
            raise HeadersTooLarge
        return fields

    def _any(self, block: bytes) -> tuple[Headers, int]:
        """Return the headers of a block, and their size. Raises HPACKError, IndexError when it is cut short."""
        table, total = self._table, 0
        fields: Headers = []
        most = _READ_BEYOND * self._max_bytes
        at, end, resizes = 0, len(block), 0
        while at < end:
            first = block[at]
            if first & _INDEXED:
                index, at = _integer(block, at, 0x7F)
                name, value = table.get_by_index(index)
            elif first & _CHANGES_TABLE == 0x20:
                size, at = _integer(block, at, 0x1F)
                resizes += 1
                if fields or resizes > _MAX_RESIZES:
                    raise HPACKDecodingError("a new size of the table stands behind fields, or is one of many")
                if size > HeaderTable.DEFAULT_SIZE:
                    raise InvalidTableSizeError("the table would be larger than may be")
                table.maxsize = size
                continue
            else:
                joins_table = first & 0x40
                index, at = _integer(block, at, 0x3F if joins_table else _NAME_BITS)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                if joins_table:
                    table.add(name, value)
            total += len(name) + len(value) + _FIELD_BYTES
            if total > most:
                raise OversizedHeaderListError("far more headers than may be")
            fields.append((_text(name), _text(value)))
        return fields, total

    def _plain(self, block: bytes) -> Headers | None:
        """Return the headers of a plain block; None for any other."""
        begin, known, total = self._begin
        if not block.startswith(begin):
            begin, known, total = b"", [], 0
        headers, at, end = known.copy(), len(begin), len(block)
        # The last field: its place, and the total before it.
        last, before = 0, 0
        while at < end:
            last, before = at, total
            first = block[at]
            at += 1
            if first & _INDEXED:
                index = first - _INDEXED
                if not 0 < index < len(_STATIC):
                    return None
                name, value = _STATIC[index]
            else:
                index = first & _NAME_BITS
                if first & _CHANGES_TABLE or (index == _NAME_BITS and block[at] >= len(_STATIC) - _NAME_BITS):
                    return None
                if index == _NAME_BITS:
                    index += block[at]
                    at += 1
                if index:
                    name = _STATIC[index][0]
                else:
                    size = block[at]
                    at += 1 + size
                    # 127 and above: more bytes of the length follow, or it is Huffman code.
                    if size >= 127 or at >= end:
                        return None
                    name = _text(block[at - size : at])
                size = block[at]
                at += 1 + size
                if size >= 127 or at > end:
                    return None
                value = _text(block[at - size : at])
            total += len(name) + len(value) + _FIELD_BYTES
            headers.append((name, value))
        if total > self._max_bytes:
            return None
        if last and not begin:
            self._begin = (block[:last], headers[:-1], before)
        return headers


def _integer(block: bytes, at: int, most: int) -> tuple[int, int]:
    """Read an integer from the first byte's bits `most`; also return the place after it (RFC 7541, 5.1)."""
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for place in range(_MAX_INTEGER):
        byte = block[at]
        at += 1
        value += (byte & 127) << 7 * place
        if byte < 128:
            return value, at
    raise HPACKDecodingError("an integer is too long")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Read a string literal; also return the place after it (RFC 7541, 5.2)."""
    is_huffman = block[at] & 128
    size, at = _integer(block, at, 127)
    raw = block[at : at + size]
    if len(raw) != size:
        raise HPACKDecodingError("a string is cut short")
    return decode_huffman(raw) if is_huffman else raw, at + size


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
