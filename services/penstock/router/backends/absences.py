"""Record of the models and adapters that lost their last ready backend, and of when they did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.router.backends.discovery import BackendAddress

# A model and an adapter, or no adapter.
Name = tuple[str, str]
_NONE: frozenset[Name] = frozenset()


class Absences:
    """Models, and models with an adapter, that had a ready backend and have none. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Name -> the time of the clock since then.
        self._since: dict[Name, float] = {}
        # What each backend has, and what it has while it takes requests; and the number of backends for each name.
        self._known: dict[BackendAddress, frozenset[Name]] = {}
        self._ready: dict[BackendAddress, frozenset[Name]] = {}
        self._num_known: Counter[Name] = Counter()
        self._num_ready: Counter[Name] = Counter()

    def note(self, where: BackendAddress, model: str | None, adapters: Iterable[str], *, is_ready: bool) -> None:
        """Note a backend as it is now: its model, None where there is none, and its adapters. The time depends on their
        number alone."""
        names = _NONE if model is None else frozenset((model, adapter) for adapter in ("", *adapters))
        forgotten = _change(self._known, self._num_known, where, names)
        lost = _change(self._ready, self._num_ready, where, names if is_ready else _NONE)
        for name in self._ready.get(where, ()):
            self._since.pop(name, None)
        # An adapter that was unloaded, and a model that no backend has any more, are not expected back.
        for name in forgotten:
            self._since.pop(name, None)
        self._since.update(dict.fromkeys(lost - forgotten, self._clock()))

    def since(self, model: str, adapter: str) -> float | None:
        """Return the time at which the last ready backend of these went; None: there is one, or never was."""
        return self._since.get((model, adapter))


def _change(
    of: dict[BackendAddress, frozenset[Name]], count: Counter[Name], where: BackendAddress, names: frozenset[Name]
) -> set[Name]:
    """Put a backend's names in place of those before; return the names that no backend has any more."""
    before = of.pop(where, _NONE)
    if names:
        of[where] = names
    count.update(names - before)
    gone = before - names
    count.subtract(gone)
    last = {name for name in gone if not count[name]}
    for name in last:
        del count[name]
    return last
