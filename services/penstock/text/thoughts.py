"""Thoughts before an answer, in text as it comes: rules for the answer, such as stop strings, apply after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import AnyStr, Generic


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought that comes, or may come, before an answer."""

    # The text that begins it. An output with another start has no thought.
    opens: str
    # It ends after the first of these.
    closes: tuple[str, ...]
    # The prompt ends inside it: the output has no start of one.
    is_open: bool = False

    def gate(self) -> ThoughtGate[str]:
        """Return the gate of an output's text."""
        return ThoughtGate(self.opens, self.closes, is_open=self.is_open)

    def byte_gate(self) -> ThoughtGate[bytes]:
        """Return the gate of an output's bytes."""
        return ThoughtGate(self.opens.encode(), tuple(one.encode() for one in self.closes), is_open=self.is_open)


class ThoughtGate(Generic[AnyStr]):
    """Reader of one output up to its answer. The result does not depend on how the output is split."""

    __slots__ = ("_closes", "_held", "_opens", "_reach", "has_thought")

    def __init__(self, opens: AnyStr, closes: tuple[AnyStr, ...], *, is_open: bool) -> None:
        self._opens: AnyStr = opens
        self._closes: tuple[AnyStr, ...] = closes
        # The end of the earlier output that may be part of a marker that ends a thought.
        self._reach = max(map(len, closes)) - 1
        # True once the output is known to begin with a thought.
        self.has_thought = is_open
        # White space and the start of a thought's marker; inside one, its last characters.
        self._held: AnyStr = opens[:0]

    def copy(self) -> ThoughtGate[AnyStr]:
        """Return a gate at the same place."""
        twin = ThoughtGate(self._opens, self._closes, is_open=self.has_thought)
        twin._held = self._held
        return twin

    def feed(self, data: AnyStr) -> tuple[AnyStr, AnyStr | None]:
        """Take more of the output. Return the part of the thought, and the start of the answer; None: nothing yet.

        Undecided text comes later. Once the answer has begun, the gate must not be fed any more.
        """
        none, text = data[:0], self._held + data
        if not self.has_thought:
            begin = text.lstrip()
            if not begin.startswith(self._opens):
                if self._opens.startswith(begin):
                    self._held = text
                    return none, None
                return none, text
            self.has_thought, data, self._held = True, text, none
        ends = [place + len(one) for one in self._closes if (place := text.find(one)) >= 0]
        if not ends:
            self._held = text[max(0, len(text) - self._reach) :]
            return data, None
        answer = text[min(ends) :]
        return data[: len(data) - len(answer)], answer

    def finish(self) -> AnyStr:
        """Return the undecided text that was held back: the output is over, and it was not a thought."""
        return self._held[:0] if self.has_thought else self._held
