"""Where the time of a start goes."""

from __future__ import annotations

import time


class Stages:
    """Seconds of each part, in order; the first begins now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """What ran since the end of the one before was `name`."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._began, 3)
        self._began = now
