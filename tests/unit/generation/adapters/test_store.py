"""The store of adapters: bounds, who leaves for whom, and requests that go on with what they began with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest
from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.store import AdapterStore

PATH = Path("adapter")


@dataclass
class Weights:
    num_bytes: int


@dataclass
class Folders:
    """Folders of adapters that are not there: the size of each by its name, and how often they were read."""

    sizes: dict[str, int] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def open(self, path: Path, root: Path | None) -> Files:
        if path.name in self.broken:
            raise InvalidArgument("path", "is broken", reason="ADAPTER_BROKEN")
        return Files(self, path.name)


@dataclass
class Files:
    folders: Folders
    name: str
    rank: int = 8
    targets: tuple[str, ...] = ("q_proj",)

    @property
    def num_bytes(self) -> int:
        return self.folders.sizes.get(self.name, 10)

    @property
    def depends_on_weights(self) -> bool:
        return self.name.startswith("saved")

    def digest(self) -> str:
        return self.name

    def read(self) -> Weights:
        self.folders.reads.append(self.name)
        return Weights(self.num_bytes)


def make_store(**limits: int) -> tuple[AdapterStore, Folders]:
    folders = Folders()
    return AdapterStore(AdapterLimits(**limits), folders.open, reserved="model"), folders


def loaded(store: AdapterStore) -> list[str]:
    return [info.name for info in store.infos() if info.is_loaded]


def test_names_are_known_until_they_are_unloaded() -> None:
    store, _ = make_store()
    for name in ("a", "b"):
        store.load(name, PATH)
    assert store.names() == ("a", "b")
    assert "a" in store
    store.unload("a")
    assert store.names() == ("b",)
    assert "a" not in store
    for call in (store.get, store.bring, store.unload):
        with pytest.raises(NotFound) as caught:
            call("a")
        assert caught.value.reason == "ADAPTER_NOT_FOUND"


def test_a_name_is_taken_once_unless_it_is_replaced() -> None:
    store, _ = make_store()
    first = store.load("a", PATH)
    with pytest.raises(InvalidArgument) as caught:
        store.load("a", PATH)
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_EXISTS", "name")
    second = store.load("a", PATH, replace=True)
    assert store.get("a") is second
    assert first.generation != second.generation


@pytest.mark.parametrize("name", ["", "x" * 257, "new\nline", "model"])
def test_names_that_no_adapter_may_have(name: str) -> None:
    store, folders = make_store()
    with pytest.raises(InvalidArgument) as caught:
        store.load(name, PATH)
    assert caught.value.field == "name"
    assert not folders.reads


def test_the_one_used_longest_ago_leaves_and_comes_back() -> None:
    store, folders = make_store(max_adapters=2)
    old = store.load("a", Path("a"))
    store.load("b", Path("b"))
    store.get("a")
    store.load("c", Path("c"))
    assert loaded(store) == ["a", "c"]
    assert store.names() == ("a", "b", "c")
    assert store.get("b") is None
    store.bring("b")
    assert loaded(store) == ["b", "c"]
    again = store.bring("a")
    assert again.generation != old.generation
    assert folders.reads == ["a", "b", "c", "b", "a"]
    assert store.bring("a") is again
    figures = store.figures()
    assert (figures.known, figures.loaded, figures.loads, figures.evictions) == (3, 2, 5, 3)


def test_nobody_leaves_while_a_request_uses_it() -> None:
    store, _ = make_store(max_adapters=2)
    a, b = store.load("a", PATH), store.load("b", PATH)
    store.acquire(a)
    store.acquire(b)
    with pytest.raises(ResourceExhausted) as caught:
        store.load("c", PATH)
    assert caught.value.reason == "ADAPTER_SLOTS_FULL"
    assert caught.value.retry_after_seconds is not None
    assert "--max-adapters 2" in caught.value.message
    assert store.names() == ("a", "b")
    store.acquire(b)
    store.release(b)
    with pytest.raises(ResourceExhausted):
        store.load("c", PATH)
    store.release(b)
    store.load("c", PATH)
    assert loaded(store) == ["a", "c"]


def test_an_unloaded_adapter_takes_its_place_until_the_last_request_ends() -> None:
    store, _ = make_store(max_adapters=1)
    a = store.load("a", PATH)
    store.acquire(a)
    store.unload("a")
    assert store.figures().num_bytes == 10
    with pytest.raises(ResourceExhausted):
        store.load("b", PATH)
    store.release(a)
    assert store.figures().num_bytes == 0
    store.load("b", PATH)


def test_replacing_keeps_the_old_one_for_its_requests() -> None:
    store, _ = make_store(max_adapters=2)
    old = store.load("a", PATH)
    store.acquire(old)
    new = store.load("a", PATH, replace=True)
    assert store.get("a") is new
    assert store.figures().loaded == 2
    store.release(old)
    assert store.figures().loaded == 1


def test_bytes_are_bounded() -> None:
    store, folders = make_store(max_bytes=100)
    folders.sizes = {"small": 40, "large": 70, "huge": 101}
    store.load("a", Path("small"))
    store.load("b", Path("small"))
    store.load("c", Path("large"))
    assert loaded(store) == ["c"]
    assert store.figures().num_bytes == 70
    with pytest.raises(ResourceExhausted) as caught:
        store.load("d", Path("huge"))
    assert caught.value.reason == "ADAPTER_MEMORY_FULL"
    assert loaded(store) == ["c"]
    held = store.get("c")
    assert held is not None
    store.acquire(held)
    with pytest.raises(ResourceExhausted) as caught:
        store.bring("a")
    assert caught.value.reason == "ADAPTER_MEMORY_FULL"


def test_names_are_bounded() -> None:
    store, _ = make_store(max_known_adapters=2)
    store.load("a", PATH)
    store.load("b", PATH)
    with pytest.raises(ResourceExhausted) as caught:
        store.load("c", PATH)
    assert "--max-known-adapters 2" in caught.value.message
    store.load("b", PATH, replace=True)


def test_none_may_be_loaded_where_there_are_no_places() -> None:
    store, _ = make_store(max_adapters=0)
    with pytest.raises(ResourceExhausted) as caught:
        store.load("a", PATH)
    assert "--max-adapters 0" in caught.value.message


def test_a_failed_load_leaves_names_as_they_were() -> None:
    store, folders = make_store()
    a = store.load("a", Path("good"))
    folders.broken = {"bad"}
    for name in ("a", "b"):
        with pytest.raises(InvalidArgument):
            store.load(name, Path("bad"), replace=True)
    assert store.names() == ("a",)
    assert store.get("a") is a


def test_what_fits_only_the_models_weights_is_read_again_for_others() -> None:
    store, folders = make_store()
    for name in ("plain", "saved"):
        store.load(name, Path(name))
    old = store.get("saved")
    store.open_by(folders.open)
    assert (loaded(store), store.get("saved")) == (["plain"], None)
    again = store.bring("saved")
    assert folders.reads == ["plain", "saved", "saved"]
    assert old is not None
    assert again.generation != old.generation


def test_a_folder_that_takes_long_to_check_holds_up_no_other() -> None:
    store, folders = make_store()
    began, go_on = Event(), Event()

    def opened(path: Path, root: Path | None) -> Files:
        if path.name == "slow":
            began.set()
            assert go_on.wait(60)
        return folders.open(path, root)

    store.open_by(opened)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.load, "slow", Path("slow"))
        assert began.wait(60)
        store.load("other", PATH)
        assert store.names() == ("other",)
        go_on.set()
        assert slow.result(60).name == "slow"


def test_a_folder_that_was_checked_for_another_model_is_checked_again() -> None:
    store, folders = make_store()
    checks: list[str] = []

    def of_the_new_model(path: Path, root: Path | None) -> Files:
        checks.append("new")
        return folders.open(path, root)

    def of_the_old_model(path: Path, root: Path | None) -> Files:
        checks.append("old")
        store.open_by(of_the_new_model)
        return folders.open(path, root)

    store.open_by(of_the_old_model)
    store.load("a", PATH)
    assert checks == ["old", "new"]
