"""Adapters of stores that a service knows: which folders it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.generation.adapters.adapter_source import AllowedStores, S3Source
from penstock.generation.adapters.remote_adapters import RemoteAdapters

ROOT = Path("root")
OLD, NEW, NEWER = (S3Source("bucket", name) for name in ("old", "new", "newer"))


class HeldFolders:
    """Stands for AdapterDisk: counts what is held."""

    def __init__(self) -> None:
        self.held = Counter[str]()

    def bring(self, source: S3Source, give_up: Callable[[], bool]) -> Path:
        self.held[source.prefix] += 1
        return ROOT / source.prefix

    def release(self, path: Path) -> None:
        self.held[path.name] -= 1


class InterruptedStore:
    """Stands for AdapterStore: something else happens while it loads."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] | None = None

    def check(self, name: str, *, replace: bool) -> None:
        pass

    def load(self, name: str, path: Path, *, root: Path, replace: bool) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_each_folder_is_released_once_whatever_ends_meanwhile() -> None:
    for forgets in (False, True):
        store: Any = InterruptedStore()
        disk: Any = HeldFolders()
        remote = RemoteAdapters(store, disk, AllowedStores(()))

        def load(source: S3Source, name: str = "a", remote: RemoteAdapters = remote) -> None:
            remote.load(name, source, ROOT, replace=True, on_given_up=lambda: None)

        load(OLD)
        # The same files under another name.
        load(OLD, "beside")
        store.meanwhile = (lambda remote=remote: remote.forget("a")) if forgets else (lambda load=load: load(NEW))
        load(NEWER)
        assert {name: count for name, count in disk.held.items() if count} == {"old": 1, "newer": 1}
        assert remote.source_of("a") == NEWER
