"""Adapters of stores that a service knows: which folders it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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
    """Stands for AdapterStore: something else happens while it loads, or just after."""

    def __init__(self) -> None:
        self.known: dict[str, Path] = {}
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], object] | None = None

    def check(self, name: str, *, replace: bool) -> None:
        pass

    def load(self, name: str, path: Path, *, root: Path, replace: bool) -> None:
        before, self.before = self.before, None
        after, self.after = self.after, None
        if before is not None:
            before()
        self.known[name] = path
        if after is not None:
            after()

    def infos(self) -> list[Any]:
        return [SimpleNamespace(name=name, path=path) for name, path in self.known.items()]


class Loads:
    """A store, a disk, and what loads from the one to the other."""

    def __init__(self) -> None:
        self.store: Any = InterruptedStore()
        self.disk: Any = HeldFolders()
        self.remote = RemoteAdapters(self.store, self.disk, AllowedStores(()))

    def load(self, source: S3Source, name: str = "a") -> None:
        self.remote.load(name, source, ROOT, replace=True, on_given_up=lambda: None)

    def unload(self, name: str = "a") -> None:
        del self.store.known[name]
        self.remote.settle()

    def load_folder(self, name: str = "a") -> None:
        self.store.known[name] = Path("elsewhere")
        self.remote.settle()

    def held(self) -> dict[str, int]:
        return {name: count for name, count in self.disk.held.items() if count}


@pytest.mark.parametrize("meanwhile", ["load", "unload", "load_folder"])
def test_each_folder_is_released_once_whatever_ends_before_a_load(meanwhile: str) -> None:
    made = Loads()
    made.load(OLD)
    # The same files under another name.
    made.load(OLD, "beside")
    made.store.before = (lambda: made.load(NEW)) if meanwhile == "load" else getattr(made, meanwhile)
    made.load(NEWER)
    assert made.held() == {"old": 1, "newer": 1}
    assert made.remote.source_of("a", ROOT / "newer") == NEWER


@pytest.mark.parametrize("meanwhile", ["load", "unload", "load_folder"])
def test_a_load_that_others_overtook_at_its_end_holds_nothing(meanwhile: str) -> None:
    made = Loads()
    made.load(OLD)
    made.store.after = (lambda: made.load(NEW)) if meanwhile == "load" else getattr(made, meanwhile)
    made.load(NEWER)
    assert made.held() == ({"new": 1} if meanwhile == "load" else {})
    assert made.remote.source_of("a", ROOT / "newer") is None


def test_the_same_files_again_are_held_once() -> None:
    made = Loads()
    made.load(OLD)
    made.load(OLD)
    assert made.held() == {"old": 1}
    made.unload()
    assert made.held() == {}
