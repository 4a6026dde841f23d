"""Blame for the crashes of backends: who ran where, and what became of the process."""

from __future__ import annotations

from penstock.router.backends.crash_log import Blame, CrashLog
from penstock.router.requests.suspect import Crash, Suspect


class Ledger:
    """Crash log with a clock that moves by one at each crash."""

    def __init__(self) -> None:
        self.now, self.judged = 10.0, 0
        self.crashes = CrashLog(self._note, clock=lambda: self.now)

    def _note(self) -> None:
        self.judged += 1

    def note(self, *suspects: Suspect) -> Crash:
        self.now += 1.0
        return self.crashes.note(suspects)

    def crash(self, *suspects: Suspect) -> Crash:
        crash = self.note(*suspects)
        self.crashes.resolve(crash, is_confirmed=True)
        return crash


def test_one_crash_is_bad_luck() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    assert ledger.crashes.blame(one) is Blame.NONE
    ledger.crash(one)
    assert ledger.crashes.blame(one) is Blame.SUSPECTED


def test_two_crashes_alone_are_its_own() -> None:
    ledger, one, other = Ledger(), Suspect(0.0), Suspect(0.0)
    ledger.crash(one, other)
    ledger.crash(one)
    assert ledger.crashes.blame(one) is Blame.OWN
    assert ledger.crashes.blame(other) is Blame.SUSPECTED
    ledger.crashes.mark_poison(one)
    assert ledger.crashes.blame(other) is Blame.NONE


def test_nothing_is_held_against_it_before_it_is_known() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    crashes = [ledger.note(one), ledger.note(one)]
    assert ledger.crashes.blame(one) is Blame.OPEN
    ledger.crashes.resolve(crashes[0], is_confirmed=True)
    assert ledger.crashes.blame(one) is Blame.OPEN
    ledger.crashes.resolve(crashes[1], is_confirmed=False)
    assert ledger.crashes.blame(one) is Blame.SUSPECTED
    ledger.crashes.resolve(crashes[1], is_confirmed=True)
    assert ledger.crashes.blame(one) is Blame.OWN
    assert ledger.judged == 3


def test_several_share_it_until_one_was_there_alone() -> None:
    ledger, killer, beside = Ledger(), Suspect(0.0), [Suspect(0.0) for _ in range(4)]
    ledger.crash(killer, *beside)
    ledger.crash(killer, *beside)
    assert {ledger.crashes.blame(one) for one in (killer, *beside)} == {Blame.SHARED}
    newcomer = Suspect(12.5)
    ledger.crash(killer, newcomer)
    assert ledger.crashes.blame(killer) is Blame.OWN
    ledger.crashes.mark_poison(killer)
    assert {ledger.crashes.blame(one) for one in (newcomer, *beside)} == {Blame.NONE}


def test_crashes_without_it_take_one_more() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    ledger.crash(one)
    ledger.crash(Suspect(0.0))
    ledger.crash(one)
    assert ledger.crashes.blame(one) is Blame.SUSPECTED
    ledger.crash(one)
    assert ledger.crashes.blame(one) is Blame.OWN


def test_crashes_before_it_came_are_not_counted() -> None:
    ledger = Ledger()
    ledger.crash(Suspect(0.0))
    one = Suspect(ledger.now + 0.5)
    ledger.crash(one)
    ledger.crash(one)
    assert ledger.crashes.blame(one) is Blame.OWN


def test_a_request_that_was_there_twice_is_there_once() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    crash = ledger.crash(one)
    ledger.crashes.add(crash, [one, one])
    assert len(one.crashes) == 1
