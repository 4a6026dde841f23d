"""Times at which requests must end, found without reading every request in every step."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

Key = TypeVar("Key")


class DeadlineQueue(Generic[Key]):
    """Keys with one time each. `due` is O(1) until the earliest known time has come, then O(keys) once."""

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        # Never later than the earliest time; may be earlier after a `discard`.
        self._earliest = math.inf

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: Key) -> bool:
        return key in self._times

    def set(self, key: Key, time: float) -> None:
        """Make `key` due once `time` has passed."""
        self._times[key] = time
        self._earliest = min(self._earliest, time)

    def discard(self, key: Key) -> None:
        """Remove the limit of `key`."""
        self._times.pop(key, None)

    def due(self, now: float) -> list[Key]:
        """Remove and return the keys with a time before `now`, earliest first."""
        if now <= self._earliest:
            return []
        over = sorted((time, position) for position, time in enumerate(self._times.values()) if time < now)
        keys = list(self._times)
        due = [keys[position] for _, position in over]
        for key in due:
            del self._times[key]
        self._earliest = min(self._times.values(), default=math.inf)
        return due
