"""A router with the endpoints of a Kubernetes service as backends, by a scripted API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.kubernetes_api import ScriptedApi, endpoint_slice, scripted_api
from factories.servers.router import PATIENCE_SECONDS, Router, backend, collect, generate, running_router
from factories.servers.scripted_engine import ScriptedEngine
from penstock.common.errors import StartupError

TARGET = "k8s://models/generation:grpc"


def slice_of(one: EmittingBackend, name: str, *, is_ready: bool = True) -> dict[str, Any]:
    host, _, port = one.address.rpartition(":")
    return endpoint_slice(*([host] if is_ready else []), unready=() if is_ready else (host,), name=name, port=int(port))


@asynccontextmanager
async def with_endpoints(api: ScriptedApi) -> AsyncIterator[Router]:
    """A router that looks names up so rarely that the watch alone tells what changes."""
    settings = {"kubernetes_api": f"http://127.0.0.1:{api.port}", "resolve_interval_seconds": 3600.0}
    async with running_router(backend=(TARGET,), resolver=_no_names, **settings) as router:
        yield router


async def use_until(router: Router, condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await collect(router.stub.Generate(generate()))


async def test_endpoints_are_backends_as_they_come_and_go() -> None:
    async with (
        backend() as one,
        backend() as two,
        scripted_api(slice_of(one, "a")) as api,
        with_endpoints(api) as router,
    ):
        await use_until(router, lambda: bool(one.submitted))
        api.put(slice_of(two, "b"))
        await router.until("backend_up", 2, backend=TARGET)
        await use_until(router, lambda: bool(two.submitted))
        api.put(slice_of(one, "a", is_ready=False))
        await router.until("backend_up", 1, backend=TARGET)
        seen = len(one.submitted)
        count = len(two.submitted)
        await use_until(router, lambda: len(two.submitted) > count + 10)
        assert len(one.submitted) == seen


async def test_a_service_without_endpoints_keeps_the_last_ones() -> None:
    async with backend() as one, scripted_api(slice_of(one, "a")) as api, with_endpoints(api) as router:
        await use_until(router, lambda: bool(one.submitted))
        api.remove("a")
        api.put(endpoint_slice(name="c", unready=("10.0.0.1",)))
        assert (await collect(router.stub.Generate(generate()))).finished
        assert router.metric("backend_up", backend=TARGET) == 1


async def test_endpoints_of_a_vllm_are_spoken_to_in_its_protocol() -> None:
    async with ScriptedEngine() as engine, scripted_api(endpoint_slice("127.0.0.1", port=engine.port)) as api:
        settings = {"kubernetes_api": f"http://127.0.0.1:{api.port}", "engine_poll_seconds": 0.01}
        async with running_router(backend=(f"vllm+{TARGET}",), resolver=_no_names, **settings) as router:
            assert (await collect(router.stub.Generate(generate()))).finished
            assert len(engine.requests) == 1


async def test_outside_a_cluster_the_router_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartupError, match="KUBERNETES_SERVICE_HOST is not set") as caught:
        async with running_router(backend=(TARGET,), resolver=_no_names):
            pass
    assert caught.value.flag == "--backend"


async def _no_names(targets: Any) -> dict[str, Any]:
    assert list(targets) == []
    return {}
