"""One sequence on its way to text: ids to text, then text past its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.text.detokenizer import Detokenizer
from penstock.text.stop_strings import Emission, StopStrings


class TextDecoder:
    """`push` is for sequences without stop strings; with them what it returns goes through `stops`."""

    __slots__ = ("_detokenizer", "_include_stop", "push", "stops")

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str], include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        # Ids to text; raises IndexError for ids outside the vocabulary.
        self.push = detokenizer.push
        # Most sequences have none: their text passes as it is.
        self.stops = StopStrings(stop_strings, include_stop) if stop_strings else None

    def replay(self, prefix: Sequence[int], resumed: Sequence[int]) -> None:
        """Take the state that a sequence has after `prefix` (context only) and `resumed` (text sent already)."""
        self.push(prefix)
        text = self.push(resumed)
        if self.stops is not None:
            self.stops.push(text)

    def finish(self, text: str, matched: str | None) -> Emission:
        """Whatever is held back, after `text`; `matched` as in StopStrings.finish."""
        text += self._detokenizer.finish()
        if self.stops is None:
            if matched is None:
                return Emission(text)
            self.stops = StopStrings((), self._include_stop)
        return self.stops.finish(text, matched)
