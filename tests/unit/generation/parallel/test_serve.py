"""A rank in the place of a program leaves it as it was, and tells rank 0's leaving from a failure."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
from penstock.common.errors import StartupError
from penstock.generation.parallel import worker
from penstock.generation.parallel.rank_messages import READY, REFUSED
from penstock.generation.parallel.worker import serve

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def own_handlers() -> Iterator[list[Any]]:
    """A program's own handlers of signals."""
    before = [signal.signal(number, lambda *_: None) for number in SIGNALS]
    yield [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_a_program_has_its_signals_back(ends: tuple[Connection, Connection], own_handlers: list[Any]) -> None:
    ours, theirs = ends
    ours.close()
    assert serve(theirs, os.getpid()) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == own_handlers


def test_a_process_that_is_no_rank_says_why(ends: tuple[Connection, Connection], own_handlers: list[Any]) -> None:
    ours, theirs = ends
    ours.send_bytes(json.dumps({REFUSED: "rank 0 has all of its ranks"}).encode())
    with pytest.raises(StartupError, match="has all of its ranks") as caught:
        serve(theirs, os.getpid())
    assert caught.value.flag == "RANK"
    assert [signal.getsignal(number) for number in SIGNALS] == own_handlers


class Broken:
    """A rank whose collective fails."""

    def __init__(self, order: dict[str, Any], answer: Any) -> None:
        pass

    def do(self, message: bytes) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("has_left", [True, False])
def test_a_collective_that_rank_0_leaves_is_no_failure(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch, has_left: bool
) -> None:
    ours, theirs = ends

    class Leaving(Broken):
        def do(self, message: bytes) -> None:
            # Nothing of it is read any more.
            assert ours.recv_bytes() == READY
            if has_left:
                ours.close()
            super().do(message)

    monkeypatch.setattr(worker, "Worker", Leaving)
    for _ in range(2):
        ours.send_bytes(b"a step")
    if has_left:
        assert worker._work(theirs, {}) == 0
    else:
        with pytest.raises(RuntimeError, match="closed by peer"):
            worker._work(theirs, {})
