"""Suspects come back one by one, the likeliest first, and what a probation proves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from penstock.router.backends import probation_queue
from penstock.router.backends.crash_log import Blame, CrashLog
from penstock.router.backends.patience import Patience
from penstock.router.backends.probation_queue import ProbationQueue, SuspectTurn
from penstock.router.config import RouterConfig
from penstock.router.requests.probation import StreamProbation
from penstock.router.requests.suspect import Suspect


class Stream:
    """A stream that was lost after some tokens."""

    def __init__(self, tokens: int, received_at: float = 0.0) -> None:
        self.suspect = Suspect(received_at)
        self.suspect.longest_attempt = self.num_tokens = tokens
        self.attempts, self.attempt, self.finished, self.closed = 1, None, None, False

    def start(self) -> None:
        self.attempts, self.attempt = self.attempts + 1, object()  # type: ignore[assignment]

    def make(self, tokens: int) -> None:
        self.num_tokens += tokens


@dataclass
class Place:
    """A backend, and who came back to it. `in_flight`: two, with others that nobody suspects."""

    key: str
    in_flight: int = 2
    load: Any = field(default_factory=lambda: SimpleNamespace(is_full=False))
    back: list[Suspect] = field(default_factory=list)
    looks: int = 0

    def suspects(self) -> list[Suspect]:
        self.looks += 1
        return self.back


class World:
    """Backends that are all idle, a crash log, and a queue before them."""

    def __init__(self, *keys: str, **settings: Any) -> None:
        self.backends = [Place(key) for key in keys]
        self.woken = asyncio.Event()
        self.pool: Any = SimpleNamespace(
            usable=lambda *_: self.backends, changed=self._changed, wake=self.woken.set, is_any_starting=lambda _: False
        )
        self.crashes = CrashLog(self.woken.set)
        self.config = RouterConfig(**{"isolation_wait_seconds": 3600.0, **settings})
        self.probations = ProbationQueue(self.pool, self.config)
        # In the order in which they came back.
        self.back: list[Stream] = []

    async def _changed(self, seconds: float) -> bool:
        self.woken.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.woken.wait()
        except TimeoutError:
            return False
        return True

    def crash(self, *streams: Stream) -> None:
        self.crashes.resolve(self.crashes.note([one.suspect for one in streams]), is_confirmed=True)

    def blame(self, stream: Stream) -> Blame:
        return self.crashes.blame(stream.suspect)

    async def come_back(self, stream: Stream) -> Any:
        state: Any = stream
        turn = SuspectTurn(
            stream.suspect,
            ("m", ""),
            lambda free: free[0],
            lambda now: StreamProbation(state, self.config.isolation_tokens, now),
            lambda: stream.closed,
        )
        patience = Patience(self.pool, self.config, "m", stream.suspect)
        backend = await self.probations.wait(turn, lambda: self.blame(stream), patience)
        if backend is not None:
            stream.start()
            backend.back.append(stream.suspect)  # type: ignore[attr-defined]
        self.back.append(stream)
        return backend

    async def until_back(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.back) < count:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_the_likeliest_comes_first_and_the_next_when_it_has_passed() -> None:
    world = World("b")
    old, young, fresh, newest = Stream(40), Stream(5), Stream(0, 1.0), Stream(0, 2.0)
    world.crash(old, young, fresh, newest)
    waits = [asyncio.ensure_future(world.come_back(one)) for one in (old, young, fresh, newest)]
    for count, (one, needed) in enumerate(((newest, 1), (fresh, 1), (young, 6), (old, 4)), 1):
        await world.until_back(count)
        assert world.back[-1] is one
        one.make(needed - 1)
        assert world.probations.taken() == {"b"}
        one.make(1)
    await asyncio.gather(*waits)


async def test_all_that_wait_look_at_a_backend_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a busy machine wakes them in many turns of the loop, each with a look of its own.
    monkeypatch.setattr(probation_queue, "_LOOK_SECONDS", 0.0)
    world = World("a", "b")
    streams = [Stream(tokens) for tokens in range(100, 0, -1)]
    world.crash(*streams)
    waits = [asyncio.ensure_future(world.come_back(one)) for one in streams]
    await world.until_back(2)
    assert all(place.looks < 10 for place in world.backends)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_the_poison_is_known_at_its_second_crash_and_frees_the_others() -> None:
    world = World("b")
    poison, one, two = Stream(0, 1.0), Stream(7), Stream(9)
    world.crash(poison, one, two)
    waits = [asyncio.ensure_future(world.come_back(each)) for each in (one, two, poison)]
    await world.until_back(1)
    stranger = Stream(3)
    world.crash(poison, stranger)
    poison.attempt = None
    assert world.blame(poison) is Blame.OWN
    world.crashes.mark_poison(poison.suspect)
    world.woken.set()
    assert {await wait for wait in waits[:2]} == {None}
    assert {world.blame(each) for each in (one, two, stranger)} == {Blame.NONE}
    assert (one.suspect.excused, stranger.suspect.excused) == (1, 1)


async def test_who_passed_does_not_hide_the_poison() -> None:
    world = World("b")
    poison, one = Stream(20), Stream(7)
    world.crash(poison, one)
    waits = [asyncio.ensure_future(world.come_back(each)) for each in (one, poison)]
    await world.until_back(1)
    one.make(9)
    await world.until_back(2)
    world.crash(poison, one)
    assert world.blame(poison) is Blame.OWN
    assert world.blame(one) is Blame.SUSPECTED
    await asyncio.gather(*waits)


async def test_who_passed_alone_or_is_where_it_was_lost_may_still_be_the_one() -> None:
    for company, made in ((1, 9), (2, 20)):
        world = World("b")
        maybe, other = Stream(21), Stream(30)
        world.crash(maybe, other)
        waits = [asyncio.ensure_future(world.come_back(each)) for each in (maybe, other)]
        world.backends[0].in_flight = company
        await world.until_back(1)
        maybe.make(made)
        await world.until_back(2)
        world.crash(maybe, other)
        assert (world.blame(maybe), world.blame(other)) == (Blame.SHARED, Blame.SHARED)
        await asyncio.gather(*waits)


async def test_the_next_is_not_beside_one_that_passed_alone_where_there_is_another_place() -> None:
    world = World("a", "b")
    alone, other, poison = Stream(0, 2.0), Stream(0, 1.0), Stream(5)
    world.crash(alone, other, poison)
    world.backends[0].in_flight = 1
    waits = [asyncio.ensure_future(world.come_back(each)) for each in (alone, other, poison)]
    await world.until_back(2)
    alone.make(1)
    assert world.probations.taken() == {"b"}
    # Whoever was woken by that has had its turn.
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.back == [alone, other]
    other.make(1)
    assert not world.probations.taken()
    assert await waits[2] is world.backends[1]
    # It is beside one that was cleared, so that two crashes tell.
    world.crash(other, poison)
    assert world.blame(poison) is Blame.OWN
    await asyncio.gather(*waits)


async def test_where_each_place_has_one_that_passed_alone_nobody_waits() -> None:
    world = World("a", "b")
    one, two, three = Stream(0, 2.0), Stream(0, 1.0), Stream(5)
    world.crash(one, two, three)
    waits = [asyncio.ensure_future(world.come_back(each)) for each in (one, two, three)]
    for backend in world.backends:
        backend.in_flight = 1
    await world.until_back(2)
    one.make(1)
    two.make(1)
    assert not world.probations.taken()
    assert await waits[2] is world.backends[0]
    await asyncio.gather(*waits)


async def until_one_passed_alone_and_one_is_on_probation(world: World, *streams: Stream) -> list[asyncio.Task[Any]]:
    """Let these come back, until the first has passed alone at `a` and the second is on probation at `b`."""
    world.backends[0].in_flight = 1
    waits = [asyncio.ensure_future(world.come_back(each)) for each in streams]
    await world.until_back(2)
    assert world.back == list(streams[:2])
    streams[0].make(1)
    assert world.probations.taken() == {"b"}
    return waits


async def test_one_that_waited_in_vain_for_a_better_place_takes_a_free_one() -> None:
    world = World("a", "b", isolation_wait_seconds=0.2)
    alone, slow, last = Stream(0, 2.0), Stream(0, 1.0), Stream(5)
    world.crash(alone, slow, last)
    waits = await until_one_passed_alone_and_one_is_on_probation(world, alone, slow, last)
    assert await waits[2] is world.backends[0]
    assert last.suspect.probation is not None
    assert world.probations.taken() == {"a", "b"}
    await asyncio.gather(*waits)


async def test_nobody_waits_for_a_trial_that_will_clear_nobody() -> None:
    world = World("a", "b")
    world.backends[1].in_flight = 1
    alone, slow, last = Stream(0, 2.0), Stream(0, 1.0), Stream(5)
    world.crash(alone, slow, last)
    waits = await until_one_passed_alone_and_one_is_on_probation(world, alone, slow, last)
    assert await waits[2] is world.backends[0]
    assert world.probations.taken() == {"a", "b"}
    await asyncio.gather(*waits)


async def test_one_that_waits_for_a_better_place_keeps_none_from_the_free_one() -> None:
    world = World("a", "b")
    alone, slow, picky, other = Stream(0, 2.0), Stream(0, 1.0), Stream(5), Stream(9)
    world.crash(alone, slow, picky)
    world.crash(other)
    waits = await until_one_passed_alone_and_one_is_on_probation(world, alone, slow, picky, other)
    assert await waits[3] is world.backends[0]
    assert world.back == [alone, slow, other]
    slow.make(1)
    assert world.probations.taken() == {"a"}
    assert await waits[2] is world.backends[1]
    await asyncio.gather(*waits)


async def test_one_that_is_near_to_where_it_was_lost_goes_past_it() -> None:
    world = World("b")
    poison, one = Stream(20), Stream(6)
    world.crash(poison, one)
    waits = [asyncio.ensure_future(world.come_back(each)) for each in (one, poison)]
    await world.until_back(1)
    one.make(6)
    assert world.probations.taken() == {"b"}
    one.make(1)
    await world.until_back(2)
    world.crash(poison, one)
    assert world.blame(poison) is Blame.OWN
    await asyncio.gather(*waits)


async def test_one_that_passed_is_no_poison_by_a_second_crash_without_a_probation() -> None:
    world = World("b")
    alone = Stream(30)
    world.crash(alone)
    world.backends[0].in_flight = 1
    await world.come_back(alone)
    alone.make(5)
    assert not world.probations.taken()
    world.crash(alone)
    assert world.blame(alone) is Blame.SHARED


async def test_nobody_waits_for_longer_than_the_limit() -> None:
    world = World("b", isolation_wait_seconds=0.0)
    first, second = Stream(1), Stream(2)
    world.crash(first, second)
    backends = await asyncio.gather(world.come_back(first), world.come_back(second))
    assert [one is not None for one in backends] == [True, False]


async def test_a_connection_that_ended_frees_those_who_wait() -> None:
    world = World("b")
    first, second = Stream(1), Stream(2)
    crash = world.crashes.note([first.suspect, second.suspect])
    waits = [asyncio.ensure_future(world.come_back(each)) for each in (first, second)]
    await world.until_back(1)
    world.crashes.resolve(crash, is_confirmed=False)
    assert await waits[1] is None
    assert not world.probations.taken()
