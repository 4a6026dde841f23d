"""Crashes of one backend's process: an end that was told of is one crash, and a process that is still there is none."""

from __future__ import annotations

import asyncio

from penstock.router.backends.crash_log import Blame, CrashLog
from penstock.router.backends.crash_watch import CrashWatch
from penstock.router.requests.suspect import Suspect


class Process:
    """A connected backend, whose process has reported as "one", and the watch over it."""

    def __init__(self, verdict_seconds: float = 1000.0) -> None:
        self.running: list[Suspect] = []
        self.takes_work = True
        self.confirmed = asyncio.Event()
        self.log = CrashLog(self.confirmed.set)
        self.watch = CrashWatch(
            self.log, verdict_seconds, suspects=lambda: self.running, takes_work=lambda: self.takes_work
        )
        self.connect("one", 5)

    def connect(self, start_id: str, step: int) -> bool:
        """Begin a connection and report; True when it is another process."""
        self.watch.connect()
        return self.watch.take_report(start_id, step)


def confirmed(suspect: Suspect) -> list[bool | None]:
    return [crash.is_confirmed for crash in suspect.crashes]


async def test_a_connection_that_ends_and_its_engines_last_word_are_one_crash() -> None:
    """Of calls that end together some may be read before the one that tells why."""
    process, culprit, beside = Process(), Suspect(0.0), Suspect(0.0)
    process.running = [culprit, beside]
    process.watch.note_broken_call()
    process.watch.note_failed_step(culprit)
    # Nothing more is said against those that end after it.
    process.watch.note_broken_call()
    assert not process.watch.disconnect(may_be_crash=True), "its engine has told"
    assert process.connect("two", 0)
    assert (confirmed(culprit), confirmed(beside)) == ([False, True], [False])
    assert process.log.blame(culprit) is Blame.SUSPECTED


async def test_requests_of_one_step_share_its_crash() -> None:
    process, one, two = Process(), Suspect(0.0), Suspect(0.0)
    process.watch.note_failed_step(one)
    process.watch.note_failed_step(two)
    assert one.crashes == two.crashes
    assert len(one.crashes) == 1


async def test_a_process_that_told_of_its_end_and_lives_on_may_crash_again() -> None:
    process, first, later = Process(verdict_seconds=0.0), Suspect(0.0), Suspect(0.0)
    process.watch.note_failed_step(first)
    await process.confirmed.wait()
    assert confirmed(first) == [False]
    process.running = [later]
    process.watch.note_broken_call()
    assert confirmed(later) == [None]


async def test_a_process_that_told_of_its_end_and_takes_no_work_has_crashed() -> None:
    process, suspect = Process(verdict_seconds=0.0), Suspect(0.0)
    process.takes_work = False
    process.watch.note_failed_step(suspect)
    await process.confirmed.wait()
    assert confirmed(suspect) == [True]


async def test_a_process_that_cannot_be_reached_has_crashed_until_it_answers() -> None:
    process, suspect = Process(verdict_seconds=0.0), Suspect(0.0)
    process.running = [suspect]
    assert process.watch.disconnect(may_be_crash=True)
    await process.confirmed.wait()
    assert confirmed(suspect) == [True]
    assert not process.connect("one", 6)
    assert confirmed(suspect) == [False]


async def test_another_process_confirms_what_the_same_one_clears() -> None:
    for start_id, is_other in (("one", False), ("two", True)):
        process, suspect = Process(), Suspect(0.0)
        process.running = [suspect]
        process.watch.disconnect(may_be_crash=True)
        assert process.connect(start_id, 5) is is_other
        assert confirmed(suspect) == [is_other]


async def test_a_process_without_an_id_is_another_one_by_fewer_steps() -> None:
    process = Process()
    process.connect("", 7)
    process.watch.disconnect(may_be_crash=False)
    assert not process.connect("", 8)
    process.watch.disconnect(may_be_crash=False)
    assert process.connect("", 2)


async def test_a_connection_that_ends_without_work_says_nothing() -> None:
    process, suspect = Process(), Suspect(0.0)
    process.running = [suspect]
    assert not process.watch.disconnect(may_be_crash=False)
    assert confirmed(suspect) == []
