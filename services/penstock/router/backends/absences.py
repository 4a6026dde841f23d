"""Record of the models and adapters that lost their last ready backend, and of when they did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from penstock.router.backends.backend import Backend


class Absences:
    """Models, and models with an adapter, that had a ready backend and have none. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Model and adapter, or no adapter -> the time of the clock since then.
        self._since: dict[tuple[str, str], float] = {}
        self._present: set[tuple[str, str]] = set()

    def note(self, ready: Iterable[Backend], known: Iterable[Backend]) -> None:
        """Note a change: `ready` ones take requests now, of all that are `known`."""
        now, there = self._clock(), set(_names(ready))
        lost = (self._present | self._since.keys()) - there
        # An adapter that was unloaded, and a model that no backend has any more, are not expected back.
        self._since = {name: self._since.get(name, now) for name in lost.intersection(_names(known))}
        self._present = there

    def since(self, model: str, adapter: str) -> float | None:
        """Return the time at which the last ready backend of these went; None: there is one, or never was."""
        return self._since.get((model, adapter))


def _names(backends: Iterable[Backend]) -> Iterator[tuple[str, str]]:
    for backend in backends:
        if backend.link.info is not None:
            for adapter in ("", *backend.adapters.known.names):
                yield backend.link.info.model, adapter
