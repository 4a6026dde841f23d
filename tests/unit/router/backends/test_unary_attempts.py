"""Calls with a single answer, when the connections of the backends that they are sent to end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from penstock.common.errors import Internal, Unavailable
from penstock.router.backends.attempts import Attempts
from penstock.router.backends.crash_log import CrashLog
from penstock.router.backends.policy import Policy, PolicyConfig
from penstock.router.backends.unary_attempts import UnaryAttempts
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from prometheus_client import CollectorRegistry


@dataclass
class Load:
    """A load with room, and knobs."""

    requests: float = 0.0
    pressing: float = 0.0
    kv_pressure: float = 0.0
    is_full: bool = False

    def standing(self, *, is_idle_only: bool) -> float:
        return self.requests if is_idle_only else self.pressing


class Backends:
    """Backends that lose every call until the last of `losses`; each loss is a crash or is not."""

    def __init__(self, losses: list[bool]) -> None:
        self.crashes = CrashLog(lambda: None)
        self.calls = 0
        # Backends in the order of their calls.
        self.called: list[str] = []
        self._losses = losses
        self._all: list[Any] = [
            SimpleNamespace(
                key=key,
                call=partial(self.call, key),
                load=Load(),
                in_flight=0,
                match=lambda _: 0,
                suspects=list,
            )
            for key in "abcd"
        ]

    are_all_own = True

    def usable(self, *_: str) -> list[Any]:
        return self._all

    def to_probe(self, *_: str) -> None:
        return None

    def ready(self, *_: str) -> list[Any]:
        return self._all

    def is_any_starting(self, _: str) -> bool:
        return False

    def wake(self) -> None:
        """Nobody waits."""

    async def call(self, key: str, _: Any, __: Any, ___: Any, suspect: Any, probe: Any, **____: Any) -> str:
        assert probe is None
        self.called.append(key)
        self.calls += 1
        if self.calls > len(self._losses):
            return "answer"
        self.crashes.resolve(self.crashes.note([suspect]), is_confirmed=self._losses[self.calls - 1])
        raise Unavailable("the backend was lost", reason="BACKEND_LOST")


async def answer(backends: Any, **fields: Any) -> Any:
    config, metrics = RouterConfig(), RouterMetrics(CollectorRegistry())
    policy: Policy[Any] = Policy(PolicyConfig())
    attempts = Attempts(backends, policy, config, metrics)
    call: Any = None
    return await UnaryAttempts(backends, attempts, config, metrics).run(
        call, model="", hashes=(), deadline=None, **fields
    )


async def test_connections_that_end_are_no_crashes() -> None:
    backends = Backends([False, False])
    assert await answer(backends) == "answer"


async def test_two_crashes_are_not_followed_by_a_third_try() -> None:
    backends = Backends([True, True])
    with pytest.raises(Internal) as caught:
        await answer(backends)
    assert caught.value.reason == "POISON"
    assert backends.calls == 2


async def test_calls_of_idle_capacity_go_where_they_wait_for_the_fewest_also_after_a_loss() -> None:
    chosen = []
    for fields in ({}, {"is_idle_only": True}):
        backends = Backends([False])
        for one, (requests, pressing) in zip(backends.usable(), ((9, 0), (1, 1), (2, 2), (9, 0)), strict=True):
            one.load.requests, one.load.pressing = requests, pressing
        assert await answer(backends, **fields) == "answer"
        chosen.append(sorted(backends.called))
    assert chosen == [["a", "d"], ["b", "c"]]


class Together:
    """Two backends that lose all calls together, twice; then each answers, alone."""

    def __init__(self, count: int) -> None:
        self.crashes = CrashLog(lambda: None)
        self.running = {"a": 0, "b": 0}
        self.most = 0
        self._tries: dict[Any, int] = {}
        self._losing: list[Any] = []
        self._lost = asyncio.Event()
        self._count = count
        self._all: list[Any] = [
            SimpleNamespace(
                key=key,
                call=partial(self._call, key),
                load=Load(),
                in_flight=0,
                suspects=list,
            )
            for key in self.running
        ]

    are_all_own = True

    def usable(self, *_: str) -> list[Any]:
        return self._all

    def to_probe(self, *_: str) -> None:
        return None

    def ready(self, *_: str) -> list[Any]:
        return self._all

    def is_any_starting(self, _: str) -> bool:
        return False

    def wake(self) -> None:
        """Nobody sleeps."""

    async def changed(self, _: float) -> bool:
        await asyncio.sleep(0)
        return True

    async def _call(self, key: str, _: Any, __: Any, ___: Any, suspect: Any, ____: Any, **_____: Any) -> str:
        tries = self._tries[suspect] = self._tries.get(suspect, 0) + 1
        if tries <= 2:
            await self._lose(suspect)
        self.running[key] += 1
        self.most = max(self.most, self.running[key])
        for _turn in range(5):
            await asyncio.sleep(0)
        self.running[key] -= 1
        return "answer"

    async def _lose(self, suspect: Any) -> None:
        self._losing.append(suspect)
        lost = self._lost
        if len(self._losing) == self._count:
            self.crashes.resolve(self.crashes.note(self._losing), is_confirmed=True)
            self._losing, self._lost = [], asyncio.Event()
            lost.set()
        await lost.wait()
        raise Unavailable("the backend was lost", reason="BACKEND_LOST")


async def test_calls_that_share_the_blame_run_apart() -> None:
    backends: Any = Together(6)
    config, metrics = RouterConfig(), RouterMetrics(CollectorRegistry())
    policy: Policy[Any] = Policy(PolicyConfig())
    calls = UnaryAttempts(backends, Attempts(backends, policy, config, metrics), config, metrics)
    call: Any = None
    answers = await asyncio.gather(*(calls.run(call, model="", hashes=(), deadline=None) for _ in range(6)))
    assert answers == ["answer"] * 6
    assert backends.most == 1
    assert metrics.poisoned._value.get() == 0


async def test_three_losses_are_the_last() -> None:
    backends = Backends([False, False, False])
    with pytest.raises(Unavailable) as caught:
        await answer(backends)
    assert caught.value.reason == "BACKEND_LOST"
