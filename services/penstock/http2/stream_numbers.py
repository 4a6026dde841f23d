"""Numbers of a client's streams: which have begun, which it left out, and which ended here before their requests."""

from __future__ import annotations

from penstock.http2 import frames

# Streams that ended before their requests (frames of them may still be on their way), and gaps between numbers.
_MOST_CUT_OFF, _MOST_SKIPPED = 1000, 64


class StreamNumbers:
    """Numbers of one connection's streams."""

    __slots__ = ("_cut_off", "_skipped", "last")

    def __init__(self) -> None:
        """Make it: no stream has begun."""
        # The highest that has begun.
        self.last = 0
        self._cut_off: dict[int, None] = {}
        self._skipped: list[tuple[int, int]] = []

    def begin(self, stream: int) -> bool:
        """Begin a stream; return False for one that is over. Raises Violation for a number that none can have."""
        if stream & 1 and stream > self.last:
            if stream > self.last + 2:
                self._skipped = [*self._skipped[1 - _MOST_SKIPPED :], (self.last + 1, stream - 2)]
            self.last = stream
            return True
        if not stream & 1 or any(first <= stream <= last for first, last in self._skipped):
            raise frames.Violation(frames.PROTOCOL_ERROR, "a stream's number is wrong")
        return False

    def require_begun(self, stream: int) -> None:
        """Raise Violation for a stream that never began."""
        if stream > self.last or not stream & 1:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a frame of no stream")

    def cut_off(self, stream: int) -> None:
        """Remember a stream that ended here before its request: its frames may still be on their way."""
        self._cut_off[stream] = None
        if len(self._cut_off) > _MOST_CUT_OFF:
            del self._cut_off[next(iter(self._cut_off))]

    def is_cut_off(self, stream: int) -> bool:
        """True when frames of a stream may still be on their way, though it is over."""
        return stream in self._cut_off

    def end(self, stream: int) -> None:
        """Note that the client has ended a stream, too: nothing more is on its way."""
        self._cut_off.pop(stream, None)
