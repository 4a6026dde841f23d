"""Adapters of stores on disk: by digest, within a bound, the least recently used leave, and stores that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories.servers.s3_server import ObjectStore, running_object_store
from penstock.common.errors import FailedPrecondition, InvalidArgument, PenstockError, ResourceExhausted, Unavailable
from penstock.generation.adapters.adapter_disk import FOLDER, AdapterDisk
from penstock.generation.adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from penstock.generation.adapters.adapter_source import S3Source

SIZE = 1000


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with running_object_store() as running:
        yield running


def files(seed: int, size: int = SIZE) -> dict[str, bytes]:
    return {CONFIG_FILE: b"{}", WEIGHTS_FILE: bytes([seed]) * size}


def disk_of(root: Path, store: ObjectStore, max_bytes: int = 1 << 20, seconds: float = 60.0) -> AdapterDisk:
    return AdapterDisk(root, max_bytes=max_bytes, seconds=seconds, environment=store.environment)


def place(name: str) -> S3Source:
    return S3Source("bucket", name)


def never() -> bool:
    return False


def folders(root: Path) -> set[str]:
    return {one.name for one in (root / FOLDER).iterdir() if one.is_dir()}


def test_an_adapter_comes_once_and_again_when_it_has_changed(tmp_path: Path, store: ObjectStore) -> None:
    disk = disk_of(tmp_path, store)
    store.put("bucket/a", files(1))
    folder = disk.bring(place("a"), never)
    assert (folder / WEIGHTS_FILE).read_bytes() == bytes([1]) * SIZE
    assert folder.is_relative_to(tmp_path / FOLDER)
    assert disk_of(tmp_path, store).bring(place("a"), never) == folder
    assert store.sent == [f"bucket/a/{CONFIG_FILE}", f"bucket/a/{WEIGHTS_FILE}"]
    store.put("bucket/a", files(2))
    assert disk.bring(place("a"), never) != folder
    store.put("bucket/same", files(1))
    assert disk.bring(place("same"), never) == folder
    assert len(folders(tmp_path)) == 2


def test_the_least_recently_used_that_nobody_holds_leaves(tmp_path: Path, store: ObjectStore) -> None:
    disk = disk_of(tmp_path, store, max_bytes=3 * SIZE)
    brought = {}
    for seed, name in enumerate("abcd"):
        store.put(f"bucket/{name}", files(seed))
    for name in "ab":
        brought[name] = disk.bring(place(name), never)
    disk.release(brought["a"])
    disk.release(brought["b"])
    disk.release(disk.bring(place("a"), never))
    brought["c"] = disk.bring(place("c"), never)
    assert folders(tmp_path) == {brought["a"].name, brought["c"].name}
    # Another process knows it.
    other = disk_of(tmp_path, store, max_bytes=3 * SIZE)
    other.bring(place("a"), never)
    with pytest.raises(ResourceExhausted) as caught:
        disk.bring(place("d"), never)
    assert caught.value.reason == "ADAPTER_DISK_FULL"
    assert folders(tmp_path) == {brought["a"].name, brought["c"].name}

    def give_up() -> bool:
        disk.release(brought["c"])
        return True

    brought["d"] = disk.bring(place("d"), give_up)
    assert folders(tmp_path) == {brought["a"].name, brought["d"].name}
    other.close()


def test_what_is_held_for_two_stays_until_both_let_it_go(tmp_path: Path, store: ObjectStore) -> None:
    disk = disk_of(tmp_path, store, max_bytes=SIZE + 100)
    store.put("bucket/a", files(1))
    store.put("bucket/b", files(2))
    folder = disk.bring(place("a"), never)
    disk.bring(place("a"), never)
    disk.release(folder)
    with pytest.raises(ResourceExhausted):
        disk.bring(place("b"), never)
    disk.release(folder)
    disk.release(folder)
    disk.bring(place("b"), never)
    assert not folder.exists()


def test_one_that_is_too_large_is_refused_before_it_comes(tmp_path: Path, store: ObjectStore) -> None:
    store.put("bucket/a", files(1))
    with pytest.raises(ResourceExhausted) as caught:
        disk_of(tmp_path, store, max_bytes=SIZE).bring(place("a"), never)
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_DISK_FULL", "path")
    # Under another name: the store may write down late what it sent of the first.
    store.put("bucket/b", {**files(1), CONFIG_FILE: b"x" * (2 << 20)})
    with pytest.raises(InvalidArgument, match=CONFIG_FILE):
        disk_of(tmp_path, store, max_bytes=64 << 20).bring(place("b"), never)
    assert folders(tmp_path) == set()
    assert f"b/{WEIGHTS_FILE}" not in "".join(store.sent)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (404, InvalidArgument, "ADAPTER_PATH"),
        (403, FailedPrecondition, "ADAPTER_STORE_DENIED"),
        (503, Unavailable, "ADAPTER_STORE_DOWN"),
        (200, Unavailable, "ADAPTER_STORE_DOWN"),
    ],
)
def test_a_refusal_is_told_and_leaves_nothing(
    tmp_path: Path, store: ObjectStore, status: int, kind: type[PenstockError], reason: str
) -> None:
    store.put("bucket/a", files(1))
    if status == 200:
        store.breaks_after = 10
    else:
        store.status = status
    with pytest.raises(kind) as caught:
        disk_of(tmp_path, store).bring(place("a"), never)
    assert caught.value.reason == reason
    assert folders(tmp_path) == set()


def test_a_store_leads_nowhere_else(tmp_path: Path, store: ObjectStore) -> None:
    store.put("bucket/a", files(1))
    with running_object_store() as inner:
        inner.put("bucket/a", files(2))
        store.redirect = f"http://{inner.address}/bucket/a/{CONFIG_FILE}"
        with pytest.raises(FailedPrecondition):
            disk_of(tmp_path, store).bring(place("a"), never)
        assert inner.sent == []


def test_wrong_keys_are_refused_by_the_signature(tmp_path: Path, store: ObjectStore) -> None:
    store.put("bucket/a", files(1))
    wrong = {**store.environment, "AWS_SECRET_ACCESS_KEY": "another"}
    half = {name: value for name, value in store.environment.items() if name != "AWS_SECRET_ACCESS_KEY"}
    for environment in (wrong, half):
        disk = AdapterDisk(tmp_path, max_bytes=1 << 20, seconds=60.0, environment=environment)
        with pytest.raises(FailedPrecondition) as caught:
            disk.bring(place("a"), never)
        assert caught.value.reason == "ADAPTER_STORE_DENIED"


def test_what_came_before_serves_while_its_store_is_away(tmp_path: Path, store: ObjectStore) -> None:
    store.put("bucket/a", files(1))
    disk = disk_of(tmp_path, store)
    folder = disk.bring(place("a"), never)
    store.status = 503
    assert disk.bring(place("a"), never) == folder
    with pytest.raises(Unavailable):
        disk.bring(place("b"), never)


def test_a_root_that_cannot_be_written_is_told(tmp_path: Path, store: ObjectStore) -> None:
    store.put("bucket/a", files(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceExhausted) as caught:
        disk_of(tmp_path / "file", store).bring(place("a"), never)
    assert caught.value.reason == "ADAPTER_DISK_FULL"


def test_leftovers_of_a_killed_process_go(tmp_path: Path, store: ObjectStore) -> None:
    (tmp_path / FOLDER / "part-x").mkdir(parents=True)
    (tmp_path / FOLDER / "part-x" / WEIGHTS_FILE).write_bytes(b"x")
    (tmp_path / FOLDER / "sources.json").write_text("[1]")
    store.put("bucket/a", files(1))
    folder = disk_of(tmp_path, store).bring(place("a"), never)
    assert folders(tmp_path) == {folder.name}


def test_one_adapter_comes_at_a_time_and_the_wait_has_an_end(tmp_path: Path, store: ObjectStore) -> None:
    store.put("bucket/a", files(1, 3 * SIZE))
    store.put("bucket/b", files(2))
    began, go_on = threading.Event(), threading.Event()

    def hold() -> bool:
        began.set()
        assert go_on.wait(60)
        return False

    disk = disk_of(tmp_path, store, max_bytes=4 * SIZE)
    disk.bring(place("b"), never)
    failed: list[PenstockError] = []

    def first() -> None:
        try:
            disk.bring(place("a"), hold)
        except PenstockError as error:
            failed.append(error)

    store.put("bucket/a", files(1, 4 * SIZE - 10))
    thread = threading.Thread(target=first)
    thread.start()
    assert began.wait(60)
    with pytest.raises(Unavailable):
        disk_of(tmp_path, store, seconds=0.1).bring(place("b"), never)
    go_on.set()
    thread.join()
    assert [error.reason for error in failed] == ["ADAPTER_DISK_FULL"]
