"""Blame for the deaths of backends: who ran where, and what became of the process."""

from __future__ import annotations

from penstock.router.backends.deaths import Blame, Deaths
from penstock.router.requests.suspect import Death, Suspect


class Ledger:
    """Deaths with a clock that moves by one at each of them."""

    def __init__(self) -> None:
        self.now, self.judged = 10.0, 0
        self.deaths = Deaths(self._note, clock=lambda: self.now)

    def _note(self) -> None:
        self.judged += 1

    def doubt(self, *suspects: Suspect) -> Death:
        self.now += 1.0
        return self.deaths.doubt(suspects)

    def death(self, *suspects: Suspect) -> Death:
        death = self.doubt(*suspects)
        self.deaths.judge(death, is_death=True)
        return death


def test_one_death_is_bad_luck() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    assert ledger.deaths.blame(one) is Blame.NONE
    ledger.death(one)
    assert ledger.deaths.blame(one) is Blame.SUSPECTED


def test_two_deaths_alone_are_its_own() -> None:
    ledger, one, other = Ledger(), Suspect(0.0), Suspect(0.0)
    ledger.death(one, other)
    ledger.death(one)
    assert ledger.deaths.blame(one) is Blame.OWN
    assert ledger.deaths.blame(other) is Blame.SUSPECTED
    ledger.deaths.convict(one)
    assert ledger.deaths.blame(other) is Blame.NONE


def test_nothing_is_held_against_it_before_it_is_known() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    doubts = [ledger.doubt(one), ledger.doubt(one)]
    assert ledger.deaths.blame(one) is Blame.OPEN
    ledger.deaths.judge(doubts[0], is_death=True)
    assert ledger.deaths.blame(one) is Blame.OPEN
    ledger.deaths.judge(doubts[1], is_death=False)
    assert ledger.deaths.blame(one) is Blame.SUSPECTED
    ledger.deaths.judge(doubts[1], is_death=True)
    assert ledger.deaths.blame(one) is Blame.OWN
    assert ledger.judged == 3


def test_several_share_it_until_one_was_there_alone() -> None:
    ledger, killer, beside = Ledger(), Suspect(0.0), [Suspect(0.0) for _ in range(4)]
    ledger.death(killer, *beside)
    ledger.death(killer, *beside)
    assert {ledger.deaths.blame(one) for one in (killer, *beside)} == {Blame.SHARED}
    newcomer = Suspect(12.5)
    ledger.death(killer, newcomer)
    assert ledger.deaths.blame(killer) is Blame.OWN
    ledger.deaths.convict(killer)
    assert {ledger.deaths.blame(one) for one in (newcomer, *beside)} == {Blame.NONE}


def test_deaths_without_it_take_one_more() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    ledger.death(one)
    ledger.death(Suspect(0.0))
    ledger.death(one)
    assert ledger.deaths.blame(one) is Blame.SUSPECTED
    ledger.death(one)
    assert ledger.deaths.blame(one) is Blame.OWN


def test_deaths_before_it_came_are_not_counted() -> None:
    ledger = Ledger()
    ledger.death(Suspect(0.0))
    one = Suspect(ledger.now + 0.5)
    ledger.death(one)
    ledger.death(one)
    assert ledger.deaths.blame(one) is Blame.OWN


def test_a_request_that_was_there_twice_is_there_once() -> None:
    ledger, one = Ledger(), Suspect(0.0)
    death = ledger.death(one)
    ledger.deaths.add(death, [one, one])
    assert len(one.deaths) == 1
