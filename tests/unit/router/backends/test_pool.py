"""The set of backends: who is ready and usable after every change, and what a change costs with many names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from penstock.router.backends.adapter_list import AdapterList
from penstock.router.backends.backend import Backend
from penstock.router.backends.discovery import BackendAddress
from penstock.router.backends.outliers import Outcome
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.v1 import admin_pb2, model_pb2, tokenizer_pb2
from prometheus_client import CollectorRegistry


def addresses(count: int) -> tuple[str, ...]:
    return tuple(f"10.0.{number // 200}.{number % 200 + 1}:50052" for number in range(count))


def make_pool(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[BackendPool, CollectorRegistry]:
    """A pool of backends that never connect, each the only one of its name."""

    def never_connects(_: object, work: Any) -> asyncio.Task[None]:
        work.close()
        return asyncio.ensure_future(asyncio.sleep(0))

    monkeypatch.setattr(BackendPool, "_spawn", never_connects)
    registry, detokenizer = CollectorRegistry(), None
    pool = BackendPool(
        RouterConfig(backend=addresses(count)),
        detokenizer,  # type: ignore[arg-type]
        RouterMetrics(registry),
        tokenizer=tokenizer_pb2.GetTokenizerResponse,
        on_change=lambda: None,
        on_failure=lambda error: None,
        on_kept=lambda backend, names: None,
    )
    pool._apply({one: {BackendAddress(one, one)} for one in addresses(count)})
    return pool, registry


def become_ready(backend: Backend, model: str = "m") -> None:
    backend.link._info = model_pb2.GetModelInfoResponse(model=model)
    backend.link.show(takes_work=True)


async def test_ready_backends_are_known_after_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = make_pool(4, monkeypatch)
    one, two, three, four = pool.backends
    assert pool.ready() == pool.ready("m") == []
    become_ready(one)
    become_ready(two)
    become_ready(three, "other")
    assert pool.ready() == [one, two, three]
    assert pool.ready("m") == pool.usable("m") == [one, two]
    assert pool.ready("other") == [three]
    assert pool.ready("none") == []
    two.link.show(takes_work=False)
    assert pool.ready("m") == [one]
    become_ready(four)
    assert pool.ready("m") == pool.usable("m") == [one, four]
    one.link.show_lost()
    assert pool.ready("m") == [four]
    # A name resolves to nothing any more.
    pool._apply({four.where.target: set()})
    assert pool.ready("m") == []
    assert pool.ready() == [three]
    pool._apply({four.where.target: {four.where}})
    assert four not in pool.backends
    pool._drop((three.where.target,))
    assert pool.backends == [three]


async def test_an_ejected_backend_is_used_last_and_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = make_pool(3, monkeypatch)
    for backend in pool.backends:
        become_ready(backend)
    one, two, three = pool.backends
    assert pool.to_probe("m") is None
    assert pool.usable("m") == [one, two, three]
    pool.outliers.note(two.key, Outcome.PROTOCOL)
    assert pool.usable("m") == [one, three]
    assert pool.ready("m") == [one, two, three]
    pool.outliers._records[two.key].ejected_until = 0.0
    assert pool.to_probe("m") is two
    pool.outliers.forget(two.key)
    assert pool.usable("m") == [one, two, three]
    assert pool.to_probe("m") is None


async def test_a_change_looks_at_its_own_backend_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, registry = make_pool(60, monkeypatch)
    looks: list[AdapterList] = []
    monkeypatch.setattr(AdapterList, "names", property(lambda self: looks.append(self) or ()))
    for backend in pool.backends[:50]:
        become_ready(backend)
    assert looks == [backend.adapters.known for backend in pool.backends[:50]]
    up = [registry.get_sample_value("penstock_router_backend_up", {"backend": target}) for target in addresses(60)]
    assert up == [1.0] * 50 + [0.0] * 10


def loaded(name: str, version: int) -> admin_pb2.LoadAdapterResponse:
    return admin_pb2.LoadAdapterResponse(adapter=admin_pb2.Adapter(name=name, path=name), version=version)


async def test_backends_with_an_adapter_are_looked_for_once_until_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = make_pool(3, monkeypatch)
    one, two, three = pool.backends
    for backend in (one, two):
        become_ready(backend)
    assert pool.ready("m", "sql") == pool.usable("m", "sql") == []
    assert not pool.has_adapter("m", "sql")
    one.adapters.note_loaded(loaded("sql", 1))
    two.adapters.note_loaded(loaded("sql", 1))
    assert pool.ready("m", "sql") == pool.usable("m", "sql") == [one, two]
    # Two requests get one list, which a policy knows again.
    assert pool.ready("m", "sql") is pool.ready("m", "sql")
    assert pool.usable("m", "sql") is pool.usable("m", "sql")
    pool.outliers.note(one.key, Outcome.PROTOCOL)
    assert (pool.ready("m", "sql"), pool.usable("m", "sql")) == ([one, two], [two])
    assert pool.usable("m", "sql") is pool.usable("m", "sql")
    two.adapters.note_missing("sql", 2)
    assert pool.ready("m", "sql") == pool.usable("m", "sql") == [one]
    one.link.show_lost()
    assert pool.ready("m", "sql") == []
    # It is expected back with what it had.
    assert pool.has_adapter("m", "sql")
    become_ready(three)
    assert pool.choose_model("", "sql") == ("m", "sql")
    assert pool.choose_model("sql") == ("m", "sql")


async def test_the_facts_of_a_model_are_those_of_a_backend_that_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, registry = make_pool(3, monkeypatch)
    one, two, three = pool.backends
    become_ready(one)
    become_ready(two)
    # Whatever else changes.
    one.adapters.note_loaded(loaded("sql", 1))
    assert pool.models["m"] is two.link.info
    two.link.show_lost()
    assert pool.models["m"] is one.link.info
    become_ready(three, "other")
    assert set(pool.models) == {"m", "other"}
    # A model that its only backend serves no more is forgotten, one that is lost is not.
    become_ready(three, "third")
    three.link.show(takes_work=False)
    become_ready(three, "third")
    one.link.show_lost()
    assert (set(pool.models), pool.ready("m")) == ({"m", "third"}, [])
    pool.follow((three.where.target,))
    pool._drop((three.where.target,))
    assert pool.backends == [three]
    up = {one: registry.get_sample_value("penstock_router_backend_up", {"backend": one}) for one in addresses(3)}
    assert list(up.values()) == [0.0, 0.0, 1.0]
