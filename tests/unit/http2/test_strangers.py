"""Connections without credentials share little work, and who asks for least is served first."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest
from factories.wire.http2 import LIMITS, Socket
from penstock.http2 import frames, server_connection
from penstock.http2.server_connection import Connection
from penstock.http2.strangers import Strangers, network_of


class Stranger:
    """A connection that notes what happens to it."""

    def __init__(self, *, is_busy: bool = False, network: str = "") -> None:
        self.work = self.worked_at = 0.0
        self.network = network
        self.is_busy = is_busy
        self.is_evicted = False
        self.went_on = asyncio.Event()

    def evict(self) -> None:
        self.is_evicted = True

    def go_on(self) -> None:
        self.went_on.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def some(strangers: Strangers, count: int) -> list[Stranger]:
    made = [Stranger() for _ in range(count)]
    for one in made:
        strangers.add(one)
    return made


async def test_nobody_waits_while_all_ask_for_little(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1)
    for one in some(strangers, 5) * 20:
        assert strangers.may_go_on(one)
        strangers.spend(one, 0.004)
        clock[0] += 0.05
        await asyncio.sleep(0)
    assert not strangers.are_many


async def test_a_turn_of_the_loop_has_little_of_their_work(clock: list[float]) -> None:
    strangers = Strangers(10, 0.5)
    at_work = some(strangers, 5)
    for one in at_work:
        strangers.spend(one, 0.0005)
    # What they may in a turn is used up, though no share of a processor is.
    assert not any(strangers.may_go_on(one) for one in at_work)
    # One that has asked for nothing does not wait.
    (fresh,) = some(strangers, 1)
    assert strangers.may_go_on(fresh)
    turns: list[int] = []
    for number, one in enumerate(at_work):

        def go_on(one: Stranger = one, number: int = number) -> None:
            strangers.spend(one, 0.0005)
            turns.append(number)

        one.go_on = go_on  # type: ignore[method-assign]
    for number in range(5):
        assert turns == list(range(number))
        await asyncio.sleep(0)


async def test_one_that_fails_holds_up_no_other(clock: list[float]) -> None:
    strangers = Strangers(10, 0.5)
    at_work = some(strangers, 3)
    for one in at_work:
        strangers.spend(one, 0.0005)
        assert not strangers.may_go_on(one)

    def fail() -> None:
        raise RuntimeError

    at_work[0].go_on = fail  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: None)
    async with asyncio.timeout(60):
        await at_work[2].went_on.wait()


async def test_a_flood_of_one_network_pushes_out_itself(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1, most_of_network=3)
    lone = Stranger(network="there")
    strangers.add(lone)
    flood = [Stranger(network="here") for _ in range(100)]
    for one in flood:
        strangers.add(one)
    assert not lone.is_evicted
    assert [one.is_evicted for one in flood] == [True] * 97 + [False] * 3
    for one in flood:
        strangers.discard(one)
    assert len(strangers) == 1


async def test_the_bound_of_all_networks_evicts_the_oldest(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1, most_of_network=3)
    made = [Stranger(network=str(number)) for number in range(12)]
    for one in made:
        strangers.add(one)
    assert [one.is_evicted for one in made] == [True] * 2 + [False] * 10


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("10.0.0.7", 1), "10.0.0.7"),
        (("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "20010db800010002"),
        (("fe80::1%eth0", 1, 0, 2), "fe80000000000000"),
        ("", ""),
        (None, ""),
    ],
)
def test_networks(peer: object, network: str) -> None:
    transport = SimpleNamespace(get_extra_info=lambda _: peer)
    assert network_of(cast("asyncio.BaseTransport", transport)) == network


async def test_who_asks_for_most_waits_and_others_do_not(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1)
    loud, quiet = some(strangers, 2)
    strangers.spend(loud, 1.0)
    assert strangers.are_many
    assert strangers.may_go_on(quiet)
    assert not strangers.may_go_on(loud)
    assert strangers.may_go_on(quiet)


async def test_those_that_wait_go_on_one_after_the_other(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1)
    loud = some(strangers, 3)
    for one in loud:
        strangers.spend(one, 0.4)
    for one in loud:
        assert not strangers.may_go_on(one)
    clock[0] += 1.15
    for place, one in enumerate(loud):
        strangers._next()
        assert [other.went_on.is_set() for other in loud] == [at <= place for at in range(3)]
        # Its work delays the next.
        strangers.spend(one, 0.5)
        assert strangers.are_many


async def test_a_flood_is_not_paid_for_by_those_who_come_later(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1)
    (loud,) = some(strangers, 1)
    for _ in range(100):
        strangers.spend(loud, 1.0)
    clock[0] += 1.0
    assert not strangers.are_many


async def test_work_is_forgotten_with_time(clock: list[float]) -> None:
    strangers = Strangers(10, 0.1)
    (loud,) = some(strangers, 1)
    strangers.spend(loud, 0.5)
    assert not strangers.may_go_on(loud)
    clock[0] += 10
    await asyncio.sleep(0)
    assert strangers.may_go_on(loud)


async def test_one_that_is_slow_to_go_keeps_no_other_from_going() -> None:
    """A connection that does not read is there for a while after it was hung up on."""
    strangers = Strangers(2, 0.1)
    made = some(strangers, 5)
    assert [one.is_evicted for one in made] == [True, True, True, False, False]
    assert len(strangers) == 2


async def test_one_that_has_to_go_and_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "_STRANGERS_LINGER_SECONDS", 0.01)
    strangers, sockets = Strangers(1, 0.1), [Socket(), Socket()]
    for socket in sockets:
        connection = Connection(LIMITS, _nobody, _nobody, _nobody, strangers=strangers)
        connection.connection_made(socket)
        connection.data_received(frames.PREFACE + frames.settings(()))
    assert [socket.is_closed for socket in sockets] == [True, False]
    # Less than its keepalive takes.
    async with asyncio.timeout(40):
        while not sockets[0].is_aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def _nobody(_: object) -> None:
    """Take a connection or a call, and do nothing."""


async def test_of_too_many_the_oldest_without_calls_goes_and_then_the_oldest() -> None:
    strangers = Strangers(2, 0.1)
    busy, idle = Stranger(is_busy=True), Stranger()
    strangers.add(busy)
    strangers.add(idle)
    third = Stranger(is_busy=True)
    strangers.add(third)
    assert (busy.is_evicted, idle.is_evicted) == (False, True)
    strangers.discard(idle)
    strangers.add(Stranger())
    assert busy.is_evicted
    assert not third.is_evicted
