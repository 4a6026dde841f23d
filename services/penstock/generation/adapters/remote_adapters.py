"""Adapters of stores that a service knows: loaded from their files on disk, and forgotten when others need the room."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.common.errors import NotFound
from penstock.common.logging import get_logger
from penstock.generation.adapters.adapter_disk import AdapterDisk
from penstock.generation.adapters.adapter_source import AllowedStores, Source
from penstock.generation.adapters.store import AdapterStore

_log = get_logger("penstock.generation")


class RemoteAdapters:
    """Adapters of the allowed stores. Thread-safe; `load` blocks."""

    def __init__(self, store: AdapterStore, disk: AdapterDisk, stores: AllowedStores) -> None:
        """`store` has their names, and those of other adapters."""
        self.stores = stores
        self._store, self._disk = store, disk
        # Name and folder -> place. Names are the store's to give and to take: what it has under one now may be of
        # another load, which ended later. So a folder is held as long as the store has the name with this folder.
        self._known: dict[tuple[str, Path], Source] = {}
        self._lock = threading.Lock()

    def load(self, name: str, source: Source, root: Path, *, replace: bool, on_given_up: Callable[[], object]) -> None:
        """Make an adapter known as `name`. `on_given_up` is called when another name was forgotten for it.

        Raises as AdapterDisk.bring and AdapterStore.load.
        """

        def give_up() -> bool:
            if not self._forget_oldest():
                return False
            on_given_up()
            return True

        # Before anything is fetched.
        self._store.check(name, replace=replace)
        folder = self._disk.bring(source, give_up)
        try:
            self._store.load(name, folder, root=root, replace=replace)
        except BaseException:
            self._disk.release(folder)
            raise
        with self._lock:
            was_known = (name, folder) in self._known
            self._known[name, folder] = source
        if was_known:
            self._disk.release(folder)
        self.settle()

    def source_of(self, name: str, path: Path) -> Source | None:
        """Return the place of an adapter of the store's; None: it is from no other."""
        return self._known.get((name, path))

    def settle(self) -> None:
        """Let files go that the store has no name for any more: it was unloaded, or stands for others."""
        with self._lock:
            here = {(one.name, one.path) for one in self._store.infos()}
            gone = [one for one in self._known if one not in here]
            for one in gone:
                del self._known[one]
        for _, folder in gone:
            self._disk.release(folder)

    def close(self) -> None:
        """Let all files go."""
        with self._lock:
            self._known.clear()
        self._disk.close()

    def _forget_oldest(self) -> bool:
        """Forget the least recently used adapter that no request uses; False: there is none."""
        idle = [one for one in self._store.infos() if (one.name, one.path) in self._known and not one.num_requests]
        if not idle:
            return False
        name = min(idle, key=lambda one: one.used_at).name
        # It may be unloaded meanwhile.
        with contextlib.suppress(NotFound):
            self._store.unload(name)
        self.settle()
        _log.info("adapter left: another one needs its room on disk", adapter=name)
        return True
