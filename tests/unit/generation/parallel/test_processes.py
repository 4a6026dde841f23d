"""Rank 0's side of the other ranks: what an error leaves, and which error each caller gets."""

from __future__ import annotations

import gc
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from penstock.common.errors import InvalidArgument, ResourceExhausted, StartupError, Unavailable
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.layers.lora import LoraPart
from penstock.generation.parallel import processes
from penstock.generation.parallel.adapter_loads import AdapterLoads
from penstock.generation.parallel.begun import BegunRank, BegunRanks
from penstock.generation.parallel.meeting import LaunchedProcess
from penstock.generation.parallel.processes import RankLost, Ranks
from penstock.generation.parallel.rank_messages import (
    FAILED,
    NO_MEMORY,
    READY,
    MessageKind,
    decode_adapter,
    decode_forget,
    kind_of,
)

SITES = {0: [LoraPart(0, torch.randn(2, 3), torch.randn(4, 2), 1.0)]}


class Peers(BegunRanks):
    """Ranks that only sleep, and their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Connection] = []

    def take(self) -> BegunRank:
        ours, theirs = Pipe()
        self.ends.append(theirs)
        return BegunRank(subprocess.Popen(["sleep", "600"]), ours)


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def ranks(peers: Peers) -> Iterator[Ranks]:
    """Two further ranks."""
    made = Ranks(3, CPUDevice())
    made.start({}, peers)
    for end in peers.ends:
        end.recv_bytes()
    yield made
    made.close()


def seen(ranks: Ranks, load: Callable[[], Future[Any]]) -> StartupError | Unavailable:
    with pytest.raises(RankLost) as caught:
        load().result(30)
    return ranks.as_seen(caught.value)


def test_an_exception_in_a_message_ends_the_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[RankLost] = []
    is_lost = threading.Event()

    def on_loss(error: RankLost) -> None:
        lost.append(error)
        is_lost.set()

    ranks.on_loss = on_loss

    class Interrupted:
        def send_bytes(self, message: bytes) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    whole: Any = ranks._ranks[1]
    ranks._ranks[1] = processes._Rank(whole.number, whole.process, Interrupted())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        ranks.send(b"a step")
    for rank in ranks._ranks:
        assert rank.process.wait(30) == -9
    with pytest.raises(RankLost):
        ranks.send(b"the next step")
    # As any loss: the process ends.
    assert is_lost.wait(30)


def test_a_rank_that_ends_while_it_gets_an_adapter_at_the_start_is_named(ranks: Ranks, peers: Peers) -> None:
    second = ranks._ranks[1].process
    second.terminate()
    second.wait()
    peers.ends[0].send_bytes(READY)
    peers.ends[1].close()
    error = seen(ranks, lambda: ranks.load_adapter(SITES, None))
    assert isinstance(error, StartupError)
    assert error.flag == "--tensor-parallel"
    assert error.message.startswith("rank 2 of --tensor-parallel ended with code -15 while it loaded")


def test_a_launched_program_that_goes_on_after_its_rank_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection has ended: rank 0 would wait for it for ever."""
    monkeypatch.setattr(processes, "_LEAVE_SECONDS", 0.01)
    with subprocess.Popen(["sleep", "600"]) as program, Pipe()[0] as connection:
        error = processes._ended(processes._Rank(1, LaunchedProcess(program.pid), connection))
        assert program.wait(30) == -9
    assert error.message.startswith("rank 1 of --tensor-parallel ended while it loaded")


def test_ranks_that_go_on_are_waited_for_together(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Noted(LaunchedProcess):
        def wait(self, timeout: float | None = None) -> None:
            waits.append(timeout)
            super().wait(timeout)

    started = [rank.process for rank in ranks._ranks]
    ranks._ranks[:] = [processes._Rank(one.number, Noted(one.process.pid), one.connection) for one in ranks._ranks]
    monkeypatch.setattr(processes, "_LEAVE_SECONDS", 0.3)
    ranks.close()
    assert waits[0] is not None
    assert waits[1] is not None
    assert waits[1] < waits[0]
    for process in started:
        process.kill()
        process.wait()


def test_a_rank_that_ends_later_is_a_failed_engine(ranks: Ranks, peers: Peers) -> None:
    ranks._has_pools = True
    for end in peers.ends:
        end.close()
    error = seen(ranks, lambda: ranks.load_adapter(SITES, None))
    assert isinstance(error, Unavailable)
    assert (error.reason, error.message) == (
        "ENGINE_FAILED",
        "the adapter was not loaded: a rank of this model has ended",
    )


def test_ranks_that_are_closed_end_every_load(ranks: Ranks, peers: Peers) -> None:
    loads = [ranks.load_adapter(SITES, None) for _ in range(3)]
    # As their processes would be; the first load waits for its answers.
    threading.Timer(0.2, lambda: [end.close() for end in peers.ends]).start()
    ranks.close()
    for load in (*(lambda one=one: one for one in loads), lambda: ranks.load_adapter(SITES, None)):
        error = seen(ranks, load)
        assert isinstance(error, Unavailable)
        assert error.reason == "ENGINE_STOPPED"


class Sent:
    """Messages that were sent, and answers to come."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = list(answers)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.complete: list[int] = []
        self.forgotten: list[int] = []
        self.changed = threading.Condition()
        self.threads: set[str] = set()
        self.loads = AdapterLoads(self.send, self.answer)
        self.loads.start()

    def send(self, message: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        kind, body = kind_of(message)
        if kind is MessageKind.ADAPTER:
            self.complete.append(decode_adapter(body))
        elif kind is MessageKind.FORGET:
            with self.changed:
                self.forgotten.extend(decode_forget(body))
                self.changed.notify_all()

    def answer(self) -> list[bytes]:
        assert self.may_answer.wait(30)
        return self.answers.pop(0)

    def has_forgotten(self, *numbers: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.forgotten == [*numbers], 30)


def test_an_adapter_is_forgotten_with_its_last_holder_and_no_message_after_it() -> None:
    sent = Sent([READY, READY], [READY, READY])
    one, two = (sent.loads.load(SITES, None).result(30) for _ in range(2))
    assert (one.number, two.number, sent.complete) == (0, 1, [0, 1])
    assert not sent.forgotten
    del one
    gc.collect()
    assert sent.has_forgotten(0)
    del two
    gc.collect()
    assert sent.has_forgotten(0, 1)
    assert sent.threads == {"rank adapters"}
    sent.loads.stop()


def test_a_load_that_nobody_waits_for_is_forgotten() -> None:
    sent = Sent([READY])
    sent.may_answer.clear()
    load = sent.loads.load(SITES, None)
    with pytest.raises(TimeoutError):
        load.result(0.1)
    # As after an interrupt.
    del load
    sent.may_answer.set()
    assert sent.has_forgotten(0)
    sent.loads.stop()


@pytest.mark.parametrize(
    ("answers", "kind", "reason", "words"),
    [
        ([READY, NO_MEMORY], ResourceExhausted, "ADAPTER_MEMORY_FULL", "rank 2 has no memory"),
        ([FAILED, READY], InvalidArgument, "ADAPTER_BROKEN", "rank 1 could not take"),
    ],
)
def test_an_adapter_that_one_rank_refuses_is_forgotten_in_all(
    answers: list[bytes], kind: type[ResourceExhausted | InvalidArgument], reason: str, words: str
) -> None:
    sent = Sent(answers, [READY, READY])
    with pytest.raises(kind, match=words) as caught:
        sent.loads.load(SITES, None).result(30)
    assert (caught.value.reason, caught.value.field) == (reason, "path")
    assert sent.has_forgotten(0)
    assert sent.loads.load(SITES, None).result(30).number == 1
    sent.loads.stop()
