"""Start, health, discovery and drain: when the router takes requests, and its errors when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.router import (
    PATIENCE_SECONDS,
    Answer,
    backend,
    collect,
    generate,
    running_router,
    tokenizer_fingerprint,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.errors import StartupError, from_rpc_error
from penstock.router.backends.discovery import BackendAddress, resolve
from penstock.router.config import RouterConfig
from penstock.v1 import common_pb2, text_pb2

SERVICE = "penstock.v1.TextService"


async def wait_health(address: str, wanted: int) -> None:
    """Return once TextService reports `wanted`."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(PATIENCE_SECONDS):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for update in stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
            if update.status == wanted:
                return


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), from_rpc_error(caught.value).reason


async def start_and_stop(*backends: EmittingBackend, **settings: Any) -> None:
    async with running_router(*backends, **settings):
        pass


async def test_start_without_a_tokenizer_names_its_flag() -> None:
    with pytest.raises(StartupError) as caught:
        await start_and_stop(tokenizer="127.0.0.1:1", backend=("127.0.0.1:2",), start_timeout_seconds=0.3)
    assert caught.value.flag == "--tokenizer"
    assert "127.0.0.1:1" in caught.value.message


async def test_start_without_a_backend_names_its_flag() -> None:
    seconds, flag = 0.25, None
    while flag in (None, "--tokenizer"):  # which a busy machine may not reach in time
        seconds *= 2
        with pytest.raises(StartupError) as caught:
            await start_and_stop(backend=("127.0.0.1:2",), start_timeout_seconds=seconds)
        flag = caught.value.flag
    assert flag == "--backend"
    assert "127.0.0.1:2" in caught.value.message


async def test_start_with_a_model_of_another_tokenizer_fails_at_once() -> None:
    async with backend(fingerprint="0" * 64) as other:
        with pytest.raises(StartupError, match="do not belong together") as caught:
            await start_and_stop(other)
        assert caught.value.flag == "--backend"


async def test_backend_with_another_tokenizer_is_not_used() -> None:
    async with backend(fingerprint="0" * 64) as other, backend() as one, running_router(other, one) as router:
        for _ in range(4):
            await collect(router.stub.Generate(generate()))
        assert len(one.submitted) == 4
        assert not other.submitted


async def test_backend_that_comes_back_with_another_tokenizer_is_failed_precondition() -> None:
    async with backend() as one, running_router(one, return_wait_seconds=0.0) as router:
        await one.stop()
        one.fingerprint = "0" * 64
        await wait_health(router.server.address, health_pb2.HealthCheckResponse.NOT_SERVING)
        await one.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                code, reason = await code_of(router.stub.Generate(generate()))
                if code is not grpc.StatusCode.UNAVAILABLE:
                    break
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")


async def test_without_backends_requests_are_unavailable_until_one_returns() -> None:
    async with backend() as one, running_router(one, return_wait_seconds=0.1) as router:
        await one.stop()
        await wait_health(router.server.address, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await code_of(router.stub.Generate(generate())) == (grpc.StatusCode.UNAVAILABLE, "NO_BACKEND")
        models = await router.stub.ListModels(text_pb2.ListModelsRequest())
        assert models.models[0].state == common_pb2.MODEL_STATE_UNAVAILABLE
        await one.start()
        await wait_health(router.server.address, health_pb2.HealthCheckResponse.SERVING)
        assert (await collect(router.stub.Generate(generate()))).finished


async def test_a_new_request_waits_for_the_last_backend_that_is_restarted() -> None:
    async with backend() as one, running_router(one, return_wait_seconds=PATIENCE_SECONDS) as router:
        await one.stop()
        await wait_health(router.server.address, health_pb2.HealthCheckResponse.NOT_SERVING)
        streams = [asyncio.ensure_future(collect(router.stub.Generate(generate()))) for _ in range(3)]
        await router.until("num_requests_running", 3)
        await one.start()
        assert all([(await stream).finished for stream in streams])


async def test_a_wait_for_the_last_backend_ends_at_the_deadline() -> None:
    async with backend() as one, running_router(one, return_wait_seconds=PATIENCE_SECONDS) as router:
        await one.stop()
        await wait_health(router.server.address, health_pb2.HealthCheckResponse.NOT_SERVING)
        code, _ = await code_of(router.stub.Generate(generate(), timeout=0.3))
        assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        await router.until("num_requests_running", 0)


async def test_draining_backend_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with backend(script=count_up(20), allowance=2) as one, backend() as two:
        two.extra_load = 100
        async with running_router(one, two) as router:
            first = asyncio.ensure_future(collect(router.stub.Generate(generate())))
            await one.until(lambda: one.running == 1)
            one.draining = True
            await one.set_serving(False)
            await router.until("backend_up", 0, backend=one.address)
            await collect(router.stub.Generate(generate()))
            await one.allow(None)
            await first
            assert (len(one.submitted), len(two.submitted)) == (1, 1)


async def test_a_name_that_resolves_to_several_addresses_is_several_backends() -> None:
    async with backend() as one, backend() as two, backend() as three:
        known: list[EmittingBackend] = [one, two]

        async def resolver(targets: Iterable[str]) -> dict[str, set[BackendAddress]]:
            return {target: {BackendAddress(one.address, target) for one in known} for target in targets}

        settings = {"backend": ("generation:50052",), "resolve_interval_seconds": 0.05}
        async with running_router(resolver=resolver, **settings) as router:
            await use_until(router, lambda: bool(one.submitted and two.submitted))
            known[:] = [two, three]
            await use_until(router, lambda: bool(three.submitted))
            seen = len(one.submitted)
            await use_until(router, lambda: len(two.submitted) + len(three.submitted) > 20)
            assert len(one.submitted) == seen
            assert router.metric("backend_up", backend="generation:50052") == 2


async def use_until(router: Any, condition: Any) -> None:
    """Send requests until `condition` holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await collect(router.stub.Generate(generate()))


async def test_drain_refuses_new_streams_and_finishes_live_ones() -> None:
    async with backend(script=count_up(20), allowance=2) as one, running_router(one) as router:
        first = asyncio.ensure_future(collect(router.stub.Generate(generate())))
        await one.until(lambda: one.running == 1)
        drain = asyncio.ensure_future(router.server.service.drain())
        await asyncio.sleep(0)
        assert await code_of(router.stub.Generate(generate())) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not drain.done()
        await one.allow(None)
        assert (await first).finished
        await asyncio.wait_for(drain, PATIENCE_SECONDS)


async def test_models_are_listed() -> None:
    async with backend() as one, running_router(one) as router:
        (model,) = (await router.stub.ListModels(text_pb2.ListModelsRequest())).models
        assert (model.name, model.state, model.backends) == ("penstock-demo", common_pb2.MODEL_STATE_READY, 1)
        assert model.max_context_tokens == one.max_context
        answer = await router.stub.GetModel(text_pb2.GetModelRequest(name="penstock-demo"))
        assert answer.model == model
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.GetModel(text_pb2.GetModelRequest(name="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("targets", [(), ("nohost",), ("host:0",), ("host:x",)])
def test_bad_addresses_name_the_flag(targets: tuple[str, ...]) -> None:
    with pytest.raises(StartupError) as caught:
        RouterConfig(backend=targets).validate()
    assert caught.value.flag == "--backend"


async def test_model_must_be_named_when_there_are_several() -> None:
    async with backend(model="a") as one, backend(model="b") as two, running_router(one, two) as router:
        assert await code_of(router.stub.Generate(generate())) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        answer = await collect(router.stub.Generate(generate(model="b")))
        assert (answer.started.model, len(one.submitted)) == ("b", 0)


async def test_stream_is_never_moved_to_another_model() -> None:
    async with backend(model="a", script=count_up(20), allowance=2) as one, backend(model="b") as two:
        known = [one]

        async def resolver(targets: Iterable[str]) -> dict[str, set[BackendAddress]]:
            return {target: {BackendAddress(one.address, target) for one in known} for target in targets}

        settings = {"backend": ("generation:50052",), "resolve_interval_seconds": 0.05, "failover_wait_seconds": 0.2}
        async with running_router(resolver=resolver, **settings) as router:
            code = asyncio.ensure_future(code_of(router.stub.Generate(generate())))
            await one.until(lambda: one.allowance == 0)
            known.append(two)
            await router.until("backend_up", 2, backend="generation:50052")
            await one.stop()
            assert (await code)[0] in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
            assert not two.submitted


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "."])
async def test_name_that_dns_cannot_hold_is_a_name_not_resolved(host: str) -> None:
    assert await resolve([f"{host}:50052"]) == {}


def test_defaults_are_valid() -> None:
    RouterConfig().validate()


async def test_backend_that_is_loading_is_asked_once_it_serves() -> None:
    async with backend(fingerprint="", serving=False) as one:
        start = asyncio.ensure_future(collect_one(one))
        await one.until(lambda: one.health_watches > 0)
        one.fingerprint = tokenizer_fingerprint()
        await one.set_serving(True)
        assert (await start).finished
        assert one.info_calls == 1


async def collect_one(one: EmittingBackend) -> Answer:
    """An answer from a router that starts now."""
    async with running_router(one) as router:
        return await collect(router.stub.Generate(generate()))
