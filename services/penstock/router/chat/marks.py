"""Search for markers of calls and thoughts in text as it comes: most text has none of their first characters."""

from __future__ import annotations

import re
from functools import lru_cache


class Marks:
    """A set of markers."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._tags = tags
        heads = "".join(sorted({tag[0] for tag in tags}))
        self._heads = re.compile(f"[{re.escape(heads)}]" if heads else "(?!)")
        self._halves = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self._longest = max(map(len, self._halves), default=0)

    def find(self, text: str, begin: int = 0) -> tuple[int, str]:
        """Return the place of the first marker from `begin` on, and the marker; -1 when there is none."""
        head = self._heads.search(text, begin)
        if head is None:
            return -1, ""
        found = [(place, tag) for tag in self._tags if (place := text.find(tag, head.start())) >= 0]
        return min(found) if found else (-1, "")

    def half(self, text: str, begin: int = 0) -> int:
        """Return the place, from `begin` on, of the longest partial marker that ends the text; without one, the text's
        length."""
        place = max(begin, len(text) - self._longest)
        while (head := self._heads.search(text, place)) is not None:
            if text[head.start() :] in self._halves:
                return head.start()
            place = head.start() + 1
        return len(text)


@lru_cache(maxsize=64)
def marks_of(*tags: str) -> Marks:
    """Return the markers; a format's are made once."""
    return Marks(tags)
