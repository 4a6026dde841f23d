"""Header block of a request on its way: its HEADERS frame, and CONTINUATION until it is whole."""

from __future__ import annotations

from hpack import HPACKError

from penstock.http2 import frames
from penstock.http2.headers import HeaderDecoder, Headers, HeadersTooLarge

# Most bytes of a request's compressed headers, CONTINUATION included.
MAX_HEADER_BYTES = 64 << 10


class HeaderBlock:
    """Header blocks of one connection, one after the other: nothing else may come between the parts of one."""

    __slots__ = ("_decoder", "_max_list_bytes", "_parts", "_size", "ends_stream", "is_open", "stream")

    def __init__(self, max_list_bytes: int) -> None:
        """Make it: no block has begun. `max_list_bytes`: most bytes of a block's fields."""
        # True until its last part has come.
        self.is_open = False
        self.stream = 0
        # True when the stream ends with it.
        self.ends_stream = False
        self._max_list_bytes = max_list_bytes
        # Made for the first block: connections of a flood may send none.
        self._decoder: HeaderDecoder | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def begin(self, stream: int, flags: int) -> None:
        """Begin a block by the flags of its HEADERS frame; `add` takes that frame's part, too."""
        self.stream, self.ends_stream = stream, bool(flags & frames.END_STREAM)
        self._parts, self._size = [], 0

    def add(self, flags: int, part: bytes) -> bool:
        """Add a part; `flags` are those of its frame. Return True when the block is whole. Raises Violation."""
        self._size += len(part)
        if self._size > MAX_HEADER_BYTES:
            raise frames.Violation(frames.ENHANCE_YOUR_CALM, "headers are too large")
        self._parts.append(part)
        self.is_open = not flags & frames.END_HEADERS
        return not self.is_open

    def decode(self) -> Headers | None:
        """Return the fields of the whole block; None where they are too large. Raises Violation."""
        parts = self._parts
        if self._decoder is None:
            self._decoder = HeaderDecoder(self._max_list_bytes)
        try:
            return self._decoder.decode(parts[0] if len(parts) == 1 else b"".join(parts))
        except HeadersTooLarge:
            return None
        except HPACKError:
            raise frames.Violation(frames.COMPRESSION_ERROR, "headers cannot be decoded") from None
