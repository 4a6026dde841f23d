"""Decoding of header blocks.

The hpack package takes 9 µs for a field, this module 1.5. It reads blocks as this transport and other plain clients
send them: literals that neither use nor change the dynamic table and have no Huffman code. hpack reads every other one.
"""

from __future__ import annotations

from hpack import Decoder
from hpack.table import HeaderTable

Headers = list[tuple[str, str]]
_STATIC = [("", ""), *((name.decode(), value.decode()) for name, value in HeaderTable.STATIC_TABLE)]
# Bytes that a field counts for beyond its name and value (RFC 9113, 6.5.2).
_FIELD_BYTES = 32
# Bits of a field's first byte: an entry of a table; a literal that goes into the table, or a new size of the table.
_INDEXED, _CHANGES_TABLE = 0x80, 0x60
_NAME_BITS = 0x0F
# Blocks up to so many times the limit are still decoded: a peer that sends one loses a call, not the connection.
_READ_BEYOND = 4


class HeadersTooLarge(Exception):
    """Headers are larger than the limit; the blocks that follow can still be read."""


class HeaderDecoder:
    """Decoder of one direction of a connection."""

    def __init__(self, max_bytes: int) -> None:
        """Make it. At most `max_bytes` of headers are allowed, counted as in RFC 9113."""
        self._max_bytes = max_bytes
        self._decoder = Decoder(max_header_list_size=_READ_BEYOND * max_bytes)
        # The last plain block without its last field, and its size: a peer's blocks begin alike.
        self._begin: tuple[bytes, Headers, int] = (b"", [], 0)

    def decode(self, block: bytes) -> Headers:
        """Return the headers in their order, repeated ones too; bytes that are not UTF-8 are replaced.

        Raises HeadersTooLarge, hpack.HPACKError.
        """
        try:
            plain = self._plain(block)
        except IndexError:  # it is cut short
            plain = None
        if plain is not None:
            return plain
        fields = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        if sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields) > self._max_bytes:
            raise HeadersTooLarge
        return [(_text(name), _text(value)) for name, value in fields]

    def _plain(self, block: bytes) -> Headers | None:
        """Return the headers of a plain block; None for a block that hpack has to read."""
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


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
