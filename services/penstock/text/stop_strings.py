"""Holding back text that may turn out to be the beginning of a stop string, and not one character more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Emission(NamedTuple):
    """Text to send, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


_NOTHING = Emission("")


class StopStrings:
    """Text of one sequence on its way out.

    Feeding the same text in other portions gives the same result: the stop string that is complete first wins, the
    longest of those that are complete at the same character.
    """

    __slots__ = ("_begins", "_held", "_include", "_reach", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """With `include` a matched stop string is part of the text."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._begins = {stop[0] for stop in self._stops}
        # The longest that can be held back: a stop string without its last character.
        self._reach = max([1, *(len(stop) - 1 for stop in self._stops)])
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> Emission:
        """What can be sent now. Nothing after a match."""
        if self.matched is not None:
            return _NOTHING
        if not text:
            return _NOTHING
        pending = self._held + text
        end, stop = self._first(pending)
        if stop is not None:
            self.matched, self._held = stop, ""
            return Emission(pending[: end if self._include else end - len(stop)], stop)
        # Only what begins with a stop string's first character can be held back.
        if self._begins.isdisjoint(pending[-self._reach :]):
            self._held = ""
            return Emission(pending)
        held = self._held_length(pending)
        self._held = pending[len(pending) - held :]
        return Emission(pending[: len(pending) - held])

    def finish(self, text: str, matched: str | None) -> Emission:
        """The rest. `matched` is a stop string that the engine saw at the very end; it is cut even if not ours."""
        before = self.matched
        emission = self.push(text)
        rest, self._held = emission.text + self._held, ""
        if self.matched is not None or matched is None or before is not None:
            return Emission(rest, emission.matched)
        self.matched = matched
        place = rest.rfind(matched)
        if place < 0:
            return Emission(rest, matched)
        return Emission(rest[: place + len(matched) if self._include else place], matched)

    def _first(self, text: str) -> tuple[int, str | None]:
        """(end, stop string) of the match that is complete first."""
        best_end, best = len(text) + 1, None
        for stop in self._stops:  # longest first, so that a tie keeps the longest
            place = text.find(stop, 0, best_end)
            if place >= 0 and place + len(stop) < best_end:
                best_end, best = place + len(stop), stop
        return best_end, best

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
