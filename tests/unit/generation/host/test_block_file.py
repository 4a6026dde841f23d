"""The file of blocks: restarts, other processes, kills in the middle, other people's files, and damage of each kind."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.common.errors import StartupError
from penstock.generation.core.block_store import StoredBlock, StoreEvent
from penstock.generation.host.block_file import BlockFile, Found
from penstock.generation.host.block_file_store import BlockFileStore

# Of a block: not a whole page, and in two parts.
PARTS = (5000, 300)
BLOCK = sum(PARTS)
SLOT = 8192
# Rooms for some blocks, in one set of places.
SIZE = 2 * 4096 + 10 * (SLOT + 72)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def block(number: int) -> list[memoryview]:
    return [memoryview(bytearray((number * 7 + part) % 251 for _ in range(size))) for part, size in enumerate(PARTS)]


def empty() -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in PARTS]


def read(file: BlockFile, number: int) -> tuple[Found, bool]:
    """Read a block into buffers of its own; is it the one that was written?"""
    into = empty()
    return file.read(key(number), into), into == block(number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def file(path: Path) -> Iterator[BlockFile]:
    made = BlockFile(path, BLOCK, SIZE)
    yield made
    made.close()


def test_blocks_survive_the_process(path: Path, file: BlockFile) -> None:
    for number in range(5):
        assert file.write(key(number), block(number)).is_new
    assert not file.write(key(3), block(3)).is_new
    assert path.stat().st_size <= SIZE
    assert path.stat().st_mode & 0o777 == 0o600
    file.close()
    again = BlockFile(path, BLOCK, SIZE)
    assert [read(again, number) for number in range(5)] == [(Found.READ, True)] * 5
    assert read(again, 9)[0] is Found.ABSENT
    assert (again.num_blocks, again.num_kept()) == (10, 5)
    again.close()


def test_two_that_use_it_see_each_others_blocks(path: Path, file: BlockFile) -> None:
    other = BlockFile(path, BLOCK, SIZE)
    file.write(key(1), block(1))
    assert other.has(key(1))
    assert read(other, 1) == (Found.READ, True)
    other.forget(key(1))
    assert not file.has(key(1))
    file.write(key(2), block(2))
    other.clear()
    assert file.num_kept() == 0
    other.close()


def test_what_was_used_the_longest_ago_gives_way(file: BlockFile) -> None:
    for number in range(file.num_blocks):
        assert not file.write(key(number), block(number)).evicted
    assert read(file, 0)[0] is Found.READ
    assert file.write(key(100), block(100)).evicted
    assert [number for number in range(10) if not file.has(key(number))] == [1]
    assert read(file, 100) == (Found.READ, True)


def test_a_large_file_has_sets_and_keeps_to_its_size(path: Path) -> None:
    size = 4 << 20
    file = BlockFile(path, BLOCK, size)
    assert file.num_blocks > 400
    for number in range(3 * file.num_blocks):
        file.write(key(number), block(number))
    assert file.num_kept() == file.num_blocks
    assert path.stat().st_size <= size
    newest = range(3 * file.num_blocks - file.num_blocks // 2, 3 * file.num_blocks)
    assert all(read(file, number) == (Found.READ, True) for number in newest if file.has(key(number)))
    # Sets of 64: nearly the order of use in the whole file.
    assert sum(file.has(key(number)) for number in newest) > 0.99 * len(newest)
    file.close()


@pytest.mark.parametrize("part", ["block", "checksum"])
def test_a_block_with_a_wrong_byte_is_refused_once_and_forgotten(path: Path, file: BlockFile, part: str) -> None:
    for number in range(3):
        file.write(key(number), block(number))
    data = bytearray(path.read_bytes())
    checksum = hashlib.sha256(key(1) + b"".join(block(1))).digest()
    at = data.index(bytes(block(1)[0])) + 4321 if part == "block" else data.index(checksum)
    with path.open("r+b") as damaged:
        damaged.seek(at)
        damaged.write(bytes([data[at] ^ 1]))
    assert read(file, 1)[0] is Found.REFUSED
    assert read(file, 1)[0] is Found.ABSENT
    assert [read(file, number) for number in (0, 2)] == [(Found.READ, True)] * 2
    assert file.write(key(1), block(1)).is_new
    assert read(file, 1) == (Found.READ, True)


def test_a_block_in_the_place_of_another_is_refused(path: Path, file: BlockFile) -> None:
    file.write(key(0), block(0))
    data = path.read_bytes()
    with path.open("r+b") as damaged:
        damaged.seek(data.index(key(0)))
        damaged.write(key(1))
    assert read(file, 1)[0] is Found.REFUSED


@pytest.mark.parametrize("length", [0, 100, 4096, 4096 + 500, 60_000])
def test_a_file_that_is_cut_short_ends_nothing(path: Path, length: int) -> None:
    file = BlockFile(path, BLOCK, SIZE)
    for number in range(10):
        file.write(key(number), block(number))
    os.truncate(path, length)
    for number in range(10):
        found, is_whole = read(file, number)
        assert is_whole if found is Found.READ else found in (Found.REFUSED, Found.ABSENT)
    assert file.write(key(20), block(20)).is_new
    assert read(file, 20) == (Found.READ, True)
    file.close()
    if length:
        again = BlockFile(path, BLOCK, SIZE)
        assert read(again, 20) == (Found.READ, True)
        again.close()
    else:
        # Without its head nothing tells whose it is.
        with pytest.raises(StartupError, match="no file of blocks"):
            BlockFile(path, BLOCK, SIZE)


def test_a_damaged_head_makes_it_anew(path: Path, file: BlockFile) -> None:
    file.write(key(0), block(0))
    file.close()
    with path.open("r+b") as damaged:
        damaged.seek(20)
        damaged.write(b"\xff")
    again = BlockFile(path, BLOCK, SIZE)
    assert read(again, 0)[0] is Found.ABSENT
    again.close()


def test_another_geometry_makes_it_anew_unless_somebody_uses_it(path: Path, file: BlockFile) -> None:
    file.write(key(0), block(0))
    with pytest.raises(StartupError, match="a file of its own") as caught:
        BlockFile(path, 2 * BLOCK, SIZE)
    assert caught.value.flag == "--kv-disk"
    assert read(file, 0) == (Found.READ, True)
    file.close()
    other = BlockFile(path, 2 * BLOCK, SIZE)
    assert other.num_kept() == 0
    other.close()


def test_a_file_of_somebody_else_is_left_alone(path: Path) -> None:
    path.write_bytes(b"a thesis")
    with pytest.raises(StartupError, match="no file of blocks") as caught:
        BlockFile(path, BLOCK, SIZE)
    assert caught.value.flag == "--kv-disk"
    assert path.read_bytes() == b"a thesis"


def test_a_file_that_cannot_be_had_names_its_flag(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "none" / "blocks"):
        with pytest.raises(StartupError) as caught:
            BlockFile(wrong, BLOCK, SIZE)
        assert caught.value.flag == "--kv-disk"
    with pytest.raises(StartupError, match="holds no block") as caught:
        BlockFile(tmp_path / "blocks", BLOCK, 8192)
    assert caught.value.flag == "--kv-disk-size"


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from unit.generation.host.test_block_file import BLOCK, SIZE, BlockFile, block, key
file = BlockFile(Path(sys.argv[1]), BLOCK, SIZE)
for number in range(10**9):
    file.write(key(number), block(number))
    if number == 10:
        print("full", flush=True)
"""


def test_a_kill_in_the_middle_leaves_whole_blocks_only(path: Path, file: BlockFile) -> None:
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parents[3])], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"full\n"
            # Beside the writer: what is found is whole, and what gives way meanwhile is absent.
            for number in range(200):
                found, is_whole = read(file, number)
                assert is_whole if found is Found.READ else found is Found.ABSENT
            writer.send_signal(signal.SIGKILL)
        again = BlockFile(path, BLOCK, SIZE)
        assert again.num_kept() >= again.num_blocks - 1
        # Its locks ended with it.
        assert again.write(key(-1), block(-1)).is_new
        assert read(again, -1) == (Found.READ, True)
        again.forget(key(-1))
        again.close()


def test_a_write_that_ends_in_the_middle_leaves_the_place_empty(
    path: Path, file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(file.num_blocks):
        file.write(key(number), block(number))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        file.write(key(50), block(50))
    monkeypatch.undo()
    assert not file.has(key(50))
    assert file.num_kept() == file.num_blocks - 1
    assert not file.write(key(50), block(50)).evicted


def test_threads_that_write_the_same_set_do_not_mix(path: Path) -> None:
    files = [BlockFile(path, BLOCK, SIZE) for _ in range(2)]

    def work(file: BlockFile, begin: int) -> None:
        for number in range(begin, begin + 60):
            file.write(key(number % 40), block(number % 40))

    threads = [threading.Thread(target=work, args=(file, 13 * place)) for place, file in enumerate(files * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [read(files[0], number) for number in range(40)]
    assert found.count((Found.READ, True)) == files[0].num_kept() == 10
    assert Found.REFUSED not in [one for one, _ in found]
    for file in files:
        file.close()


def wait_for(store: BlockFileStore) -> list[StoreEvent]:
    events: list[StoreEvent] = []
    while not events:
        store.wait(10.0)
        events = store.events()
    return events


def test_the_store_carries_out_orders_beside_its_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = [block(number) for number in range(4)]
    store = BlockFileStore(BlockFile(path, BLOCK, SIZE), b"model", host.__getitem__)
    store.save(1, [StoredBlock(key(number), number) for number in range(3)])
    assert wait_for(store) == [StoreEvent(1, (True, True, True))]
    assert [store.has(key(number)) for number in range(4)] == [True, True, True, False]
    store.fetch(2, [StoredBlock(key(2), 0), StoredBlock(key(3), 1)])
    assert wait_for(store) == [StoreEvent(2, (True, False))]
    assert host[0] == block(2)
    figures = store.figures()
    assert (figures.written_blocks, figures.read_blocks, figures.queued_blocks) == (3, 1, 0)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(os, "pwritev", broken)
        broken_disk.setattr(os, "preadv", broken)
        store.save(3, [StoredBlock(key(5), 3)])
        assert wait_for(store) == [StoreEvent(3, (False,))]
        store.fetch(4, [StoredBlock(key(2), 0)])
        assert wait_for(store) == [StoreEvent(4, (False,))]
    assert store.figures().failed_blocks == 2
    store.forget([key(0)])
    store.save(5, [StoredBlock(key(1), 1)])
    wait_for(store)
    assert [store.has(key(number)) for number in range(3)] == [False, True, True]
    store.close()


def test_what_is_to_be_forgotten_is_not_there_and_does_not_outlive_the_store(path: Path) -> None:
    file = BlockFile(path, BLOCK, SIZE)
    store, writes, go_on = BlockFileStore(file, b"model", lambda _: block(0)), threading.Event(), threading.Event()
    store.save(1, [StoredBlock(key(0), 0), StoredBlock(key(1), 0)])
    wait_for(store)

    def slow(_: int) -> list[memoryview]:
        writes.set()
        assert go_on.wait(60)
        return block(0)

    store._buffers = slow
    store.save(2, [StoredBlock(key(2), 0)])
    assert writes.wait(60)
    store.forget([key(0)])
    assert not store.has(key(0))
    # The order waits behind the write that closing waits for.
    ending = threading.Thread(target=store.close)
    ending.start()
    go_on.set()
    ending.join()
    again = BlockFile(path, BLOCK, SIZE)
    assert [again.has(key(number)) for number in range(3)] == [False, True, True]
    again.close()


def test_a_closed_store_has_ended_its_threads(path: Path) -> None:
    store = BlockFileStore(BlockFile(path, BLOCK, SIZE), b"model", lambda _: block(0))
    store.save(1, [StoredBlock(key(number), number) for number in range(8)])
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-disk")]
    # What was written is there, and whole.
    again = BlockFile(path, BLOCK, SIZE)
    for number in range(8):
        into = empty()
        assert again.read(key(number), into) in (Found.READ, Found.ABSENT)
    again.close()
