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
        # Name -> place, and the folder of its files.
        self._known: dict[str, tuple[Source, Path]] = {}
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
            # Only now: another load of the name, or an unload, may have ended meanwhile.
            before = self._known.get(name)
            self._known[name] = source, folder
        if before is not None:
            self._disk.release(before[1])

    def source_of(self, name: str) -> Source | None:
        """Return the place of a known adapter; None: it is from no store."""
        found = self._known.get(name)
        return None if found is None else found[0]

    def forget(self, name: str) -> None:
        """Let an adapter's files go: its name is forgotten, or stands for another one."""
        with self._lock:
            found = self._known.pop(name, None)
        if found is not None:
            self._disk.release(found[1])

    def close(self) -> None:
        """Let all files go."""
        with self._lock:
            self._known.clear()
        self._disk.close()

    def _forget_oldest(self) -> bool:
        """Forget the least recently used adapter that no request uses; False: there is none."""
        idle = [one for one in self._store.infos() if one.name in self._known and not one.num_requests]
        if not idle:
            return False
        name = min(idle, key=lambda one: one.used_at).name
        # It may be unloaded meanwhile.
        with contextlib.suppress(NotFound):
            self._store.unload(name)
        self.forget(name)
        _log.info("adapter left: another one needs its room on disk", adapter=name)
        return True
