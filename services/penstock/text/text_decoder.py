"""Decoding of one sequence: ids to text, then text past its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.text.detokenizer import SequenceDetokenizer
from penstock.text.stop_strings import ReadyText, StopStrings
from penstock.text.thoughts import Thought


class TextDecoder:
    """Decoder of one sequence. With stop strings the text that `push` returns goes through `stops`."""

    __slots__ = ("_detokenizer", "_include_stop", "push", "stops")

    def __init__(
        self,
        detokenizer: SequenceDetokenizer,
        stop_strings: Sequence[str],
        include_stop: bool,
        thought: Thought | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        # Takes ids and returns text; raises IndexError for ids outside the vocabulary.
        self.push = detokenizer.push
        # None for most sequences: their text passes unchanged.
        self.stops = StopStrings(stop_strings, include_stop, thought) if stop_strings else None

    def replay(
        self, prefix: Sequence[int], resumed: Sequence[int], *, is_cut: bool = False, with_open_end: bool = False
    ) -> None:
        """Restore the state after `prefix`, a context as in SequenceDetokenizer.begin, and `resumed`, ids with sent
        text."""
        if prefix:
            self._detokenizer.begin(prefix, is_cut=is_cut, with_open_end=with_open_end)
        text = self.push(resumed)
        if self.stops is not None:
            self.stops.push(text)

    def finish(self, text: str, matched: str | None) -> ReadyText:
        """Return all held text, after `text`; `matched` as in StopStrings.finish."""
        text += self._detokenizer.finish()
        if self.stops is None:
            if matched is None:
                return ReadyText(text)
            self.stops = StopStrings((), self._include_stop)
        return self.stops.finish(text, matched)
