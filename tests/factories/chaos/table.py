"""Table of a chaos run: tries, exact streams and pauses of each fault, printed and written as Markdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from factories.chaos.faults import Seen

_HEAD = "| fault | transport | tries | exact | longest pause p50 | max |\n|---|---|---|---|---|---|\n"


class Table:
    """Results by fault and transport, in the order in which they came."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[Seen]] = defaultdict(list)

    def add(self, fault: str, transport: str, seen: Seen) -> None:
        """Note one try."""
        self._seen[fault, transport].append(seen)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def markdown(self) -> str:
        """Write it; pauses in seconds."""
        rows = []
        for (fault, transport), tries in self._seen.items():
            pauses = [one.pause for one in tries]
            exact = sum(one.exact for one in tries)
            figures = f"{statistics.median(pauses):.2f} s | {max(pauses):.2f} s"
            rows.append(f"| {fault} | {transport} | {len(tries)} | {exact} | {figures} |\n")
        return _HEAD + "".join(rows)

    def write(self, path: Path, words: str) -> None:
        """Write a page with `words` before it."""
        path.write_text(f"# Chaos\n\n{words}\n\n{self.markdown()}", encoding="utf-8")


TABLE = Table()
