"""A launcher's ranks meet: each comes once, and nobody else holds up the start or stays open after it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from factories.servers.stack import free_port
from penstock.common.errors import StartupError
from penstock.generation.parallel import launch
from penstock.generation.parallel import meeting as meeting_file
from penstock.generation.parallel.launch import Rendezvous
from penstock.generation.parallel.meeting import Meeting, _key, meet_rank_0
from penstock.generation.parallel.rank_group import PATIENCE
from penstock.generation.parallel.rank_messages import REFUSED

# To notice a wait that would have no end.
BOUND = 30.0


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process be several ranks, whose folders are in an empty one."""
    monkeypatch.setattr(launch, "_used", set())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@pytest.fixture
def store() -> Any:
    """The store of a launcher, which outlives its ranks."""
    distributed: Any = dist
    return distributed.TCPStore(
        "127.0.0.1", free_port(), None, True, PATIENCE, wait_for_workers=False, multi_tenant=True
    )


def rendezvous_of(count: int, store: Any = None) -> Rendezvous:
    port = free_port() if store is None else store.port
    return Rendezvous(0, count, "127.0.0.1", port, is_store_there=store is not None)


def connected(meeting: Meeting) -> Connection:
    link = socket.socket(socket.AF_UNIX)
    link.connect(f"{meeting._folder}/ranks")
    return Connection(link.detach())


def come(meeting: Meeting, number: int) -> Connection:
    """Come as another process would."""
    connection = connected(meeting)
    connection.send_bytes(struct.pack("<I", number))
    return connection


def test_ranks_come_in_any_order_and_leave_nothing_open(folders: Path, pool: ThreadPoolExecutor) -> None:
    rendezvous = rendezvous_of(3)
    meeting = Meeting(rendezvous)
    second, first = (pool.submit(meet_rank_0, replace(rendezvous, rank=rank)) for rank in (2, 1))
    for rank, coming in ((1, first), (2, second)):
        process, connection = meeting.take(rank, {"rank": rank})
        theirs, pid = coming.result(BOUND)
        assert process.pid == pid == os.getpid()
        assert json.loads(theirs.recv_bytes()) == {"rank": rank}
        connection.close()
    assert not [*folders.iterdir()]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((rendezvous.address, rendezvous.port))
    meeting.close()


def test_who_says_nothing_holds_up_nobody(pool: ThreadPoolExecutor) -> None:
    meeting = Meeting(rendezvous_of(3))
    silent, short, gone = (connected(meeting) for _ in range(3))
    os.write(short.fileno(), b"\0\0")
    gone.close()
    theirs = come(meeting, 1)
    assert pool.submit(meeting.take, 1, {}).result(BOUND)
    assert json.loads(theirs.recv_bytes()) == {}
    waiting = pool.submit(meeting.take, 2, {})
    meeting.close()
    with pytest.raises(StartupError, match="the start was given up"):
        waiting.result(BOUND)
    for one in (silent, theirs):
        with pytest.raises((EOFError, ConnectionError)):
            one.recv_bytes()


def test_a_meeting_that_ends_leaves_nothing(folders: Path) -> None:
    rendezvous = rendezvous_of(2)
    meeting = Meeting(rendezvous)
    theirs = come(meeting, 1)
    meeting.close()
    meeting.close()
    assert not [*folders.iterdir()]
    with pytest.raises((EOFError, ConnectionError)):
        theirs.recv_bytes()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((rendezvous.address, rendezvous.port))


def test_two_processes_of_one_rank_are_refused(pool: ThreadPoolExecutor) -> None:
    meeting = Meeting(rendezvous_of(3))
    first = come(meeting, 1)
    meeting.take(1, {})
    assert json.loads(first.recv_bytes()) == {}
    second = come(meeting, 1)
    with pytest.raises(StartupError, match="two processes of the launcher have RANK 1") as caught:
        pool.submit(meeting.take, 2, {}).result(BOUND)
    assert caught.value.flag == "RANK"
    assert REFUSED in json.loads(second.recv_bytes())
    meeting.close()


def test_a_process_that_comes_beside_the_last_rank_is_told(store: Any) -> None:
    rendezvous = rendezvous_of(2, store)
    meeting = Meeting(rendezvous)
    path = store.get(_key(rendezvous))
    first, second = come(meeting, 1), come(meeting, 1)
    meeting.take(1, {"rank": 1})
    assert json.loads(first.recv_bytes()) == {"rank": 1}
    assert second.poll(BOUND)
    assert REFUSED in json.loads(second.recv_bytes())
    # One that comes later still reads the path.
    assert store.get(_key(rendezvous)) == path
    with pytest.raises(StartupError, match="has another process as rank 1"):
        meet_rank_0(replace(rendezvous, rank=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_comes_after_the_last_rank_is_refused_at_once(pool: ThreadPoolExecutor, rank: int) -> None:
    """Case of a store that rank 0 had, and that is closed by then: nobody waits for it."""
    rendezvous = rendezvous_of(2)
    with closing(Meeting(rendezvous)) as meeting:
        first = come(meeting, 1)
        meeting.take(1, {})
        late = replace(rendezvous, rank=rank, attempt=1)
        with pytest.raises(StartupError, match=f"two processes have RANK {rank}") as caught:
            pool.submit(meet_rank_0 if rank else Meeting, late).result(BOUND)
        assert caught.value.flag == "RANK"
        assert json.loads(first.recv_bytes()) == {}
    # The place is free again.
    Meeting(replace(rendezvous, attempt=2)).close()


def test_a_rank_that_comes_before_rank_0_tries_again(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, has_tried, has_all = [], threading.Event(), meeting_file._has_all

    def looked(rendezvous: Rendezvous) -> bool:
        looks.append(rendezvous)
        if len(looks) > 2:
            has_tried.set()
        return has_all(rendezvous)

    monkeypatch.setattr(meeting_file, "_TRY", timedelta(milliseconds=50))
    monkeypatch.setattr(meeting_file, "_has_all", looked)
    rendezvous = rendezvous_of(2)
    coming = pool.submit(meet_rank_0, replace(rendezvous, rank=1))
    assert has_tried.wait(BOUND)
    with closing(Meeting(rendezvous)) as meeting:
        meeting.take(1, {"rank": 1})
        theirs, _ = coming.result(BOUND)
        assert json.loads(theirs.recv_bytes()) == {"rank": 1}


def test_ranks_of_one_attempt_find_each_other(store: Any, pool: ThreadPoolExecutor) -> None:
    rendezvous = rendezvous_of(2, store)
    Meeting(rendezvous).close()
    again = replace(rendezvous, attempt=1)
    # It may come before rank 0 has told its new place.
    coming = pool.submit(meet_rank_0, replace(again, rank=1))
    with closing(Meeting(again)) as meeting:
        pool.submit(meeting.take, 1, {"rank": 1}).result(BOUND)
    theirs, _ = coming.result(BOUND)
    assert json.loads(theirs.recv_bytes()) == {"rank": 1}


def test_a_long_folder_is_no_matter(folders: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    long = folders / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    rendezvous = rendezvous_of(2)
    meeting = Meeting(rendezvous)
    coming = pool.submit(meet_rank_0, replace(rendezvous, rank=1))
    meeting.take(1, {})
    assert coming.result(BOUND)


def test_a_folder_that_cannot_be_made_names_its_variable(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folders / "none"))
    with pytest.raises(StartupError, match="TMPDIR") as caught:
        Meeting(rendezvous_of(2))
    assert caught.value.flag == "TMPDIR"


def test_a_rank_that_dies_after_its_number_is_named() -> None:
    meeting = Meeting(rendezvous_of(2))
    come(meeting, 1).close()
    with pytest.raises(StartupError, match="rank 1 of 2 has ended before it got its part") as caught:
        meeting.take(1, {})
    assert caught.value.flag == "RANK"
    meeting.close()


def test_a_process_that_has_thousands_of_files_open_meets_its_ranks(pool: ThreadPoolExecutor) -> None:
    """select() knows no descriptor above 1,023; a server that connections keep busy has such."""
    rendezvous = rendezvous_of(2)
    with ExitStack() as held:
        while held.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        meeting = held.enter_context(closing(Meeting(rendezvous)))
        coming = pool.submit(meet_rank_0, replace(rendezvous, rank=1))
        process, _ = meeting.take(1, {})
        assert coming.result(BOUND)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)


def test_a_port_that_another_program_has_is_waited_for_and_named(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = rendezvous_of(2)
    with socket.create_server(("127.0.0.1", rendezvous.port)) as other:
        coming = pool.submit(Meeting, rendezvous)
        with pytest.raises(TimeoutError):
            coming.result(0.3)
        other.close()
        coming.result(BOUND).close()
    monkeypatch.setattr(meeting_file, "_PORT_SECONDS", 0.3)
    rendezvous = rendezvous_of(2)
    with (
        socket.create_server(("127.0.0.1", rendezvous.port)),
        pytest.raises(StartupError, match=f"MASTER_PORT {rendezvous.port}, cannot be opened: another") as caught,
    ):
        Meeting(rendezvous)
    assert caught.value.flag == "MASTER_PORT"


def test_a_place_that_is_not_rank_0s_is_refused(store: Any, folders: Path) -> None:
    rendezvous = rendezvous_of(2, store)
    others = folders / "penstock-meeting-of-others"
    others.mkdir()
    others.chmod(0o777)
    for attempt, path in enumerate((f"{others}/ranks", "/etc/ranks", "penstock-meeting-1/ranks", f"{others}/other")):
        own = replace(rendezvous, rank=1, attempt=attempt)
        store.set(_key(own), path)
        with pytest.raises(StartupError) as caught:
            meet_rank_0(own)
        assert caught.value.flag == "MASTER_ADDR"


def test_a_process_is_a_rank_of_one_model() -> None:
    rendezvous = rendezvous_of(2)
    Meeting(rendezvous).close()
    with pytest.raises(StartupError, match="an earlier model of this process") as caught:
        Meeting(rendezvous)
    assert caught.value.flag == "RANK"
