"""Stop strings: text that may be the start of one is held back, and not one character more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.text.thoughts import Thought, ThoughtGate


class ReadyText(NamedTuple):
    """Text to send, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


_NOTHING = ReadyText("")


class StopStrings:
    """Stop strings of one sequence, and its text that is held back.

    The result does not depend on how the text is split: the stop string that is complete first wins, and the longest of
    those that are complete at the same character.
    """

    __slots__ = ("_begins", "_gate", "_held", "_include", "_reach", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool, thought: Thought | None = None) -> None:
        """Make it. With `include` a matched stop string is part of the text. Text of a `thought` before it passes."""
        self._gate: ThoughtGate[str] | None = None if thought is None else thought.gate()
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._begins = {stop[0] for stop in self._stops}
        # Most characters that can be held back: the longest stop string without its last character.
        self._reach = max([1, *(len(stop) - 1 for stop in self._stops)])
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> ReadyText:
        """Take more text and return the part that can be sent now; nothing after a match."""
        if self.matched is not None:
            return _NOTHING
        if not text:
            return _NOTHING
        if self._gate is not None:
            before, answer = self._gate.feed(text)
            if answer is None:
                return ReadyText(before)
            self._gate = None
            return self._behind(before, answer)
        pending = self._held + text
        end, stop = self._first(pending)
        if stop is not None:
            self.matched, self._held = stop, ""
            return ReadyText(pending[: end if self._include else end - len(stop)], stop)
        # Only text that begins with a stop string's first character can be held back.
        if self._begins.isdisjoint(pending[-self._reach :]):
            self._held = ""
            return ReadyText(pending)
        held = self._held_length(pending)
        self._held = pending[len(pending) - held :]
        return ReadyText(pending[: len(pending) - held])

    def finish(self, text: str, matched: str | None) -> ReadyText:
        """Return the rest. `matched`: a stop string that the engine found at the end; cut even if unknown here."""
        before = self.matched
        ready = self.push(text)
        if self._gate is not None:
            rest, self._gate = self._gate.finish(), None
            ready = self._behind(ready.text, rest)
        rest, self._held = ready.text + self._held, ""
        if self.matched is not None or matched is None or before is not None:
            return ReadyText(rest, ready.matched)
        self.matched = matched
        place = rest.rfind(matched)
        if place < 0:
            return ReadyText(rest, matched)
        return ReadyText(rest[: place + len(matched) if self._include else place], matched)

    def _behind(self, before: str, answer: str) -> ReadyText:
        ready = self.push(answer)
        return ReadyText(before + ready.text, ready.matched)

    def _first(self, text: str) -> tuple[int, str | None]:
        """Return (end, stop string) of the match that is complete first; None without one."""
        best_end, best = len(text) + 1, None
        for stop in self._stops:  # longest first, so that a tie keeps the longest
            place = text.find(stop, 0, best_end)
            if place >= 0 and place + len(stop) < best_end:
                best_end, best = place + len(stop), stop
        return best_end, best

    def _held_length(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
