"""Pause: steps are held, live requests keep their blocks, and it ends by itself at last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.step_gate import held_after
from factories.servers.generation import Client, generation_service, request, text_checkpoint
from factories.servers.router import collect, generate, running_router
from factories.servers.sessions import Session
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import DeadlineExceeded, InvalidArgument, Unavailable, from_rpc_error
from penstock.v1 import admin_pb2, common_pb2, config_pb2, text_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = {"max_new_tokens": 64}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with generation_service(text_checkpoint(tmp_path_factory.mktemp("m"))) as running:
        yield running


async def health(client: Client) -> int:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest())).status
    return status


async def pause(client: Client, **fields: Any) -> admin_pb2.PauseResponse:
    paused: admin_pb2.PauseResponse = await client.admin.Pause(admin_pb2.PauseRequest(**fields))
    return paused


async def begun(client: Client, **fields: Any) -> asyncio.Task[Any]:
    """Begin a request and pause it after a few of its steps."""
    with held_after(3) as gate:
        live = asyncio.create_task(client.generate(request(**{"config": LONG, **fields})))
        await client.until(lambda load: load.running_requests == 1 and gate.is_spent)
        pausing = asyncio.create_task(pause(client))
        await client.until(lambda load: load.draining)
    assert (await pausing).live_requests == 1
    return live


async def scraped(client: Client) -> tuple[float, ...]:
    """Read from the metrics: 1 while it is paused, and the pauses so far."""
    samples = [sample for metric in client.running.registry.collect() for sample in metric.samples]
    names = ("penstock_engine_paused", "penstock_engine_pauses_total")
    return tuple(next(sample.value for sample in samples if sample.name == name) for name in names)


async def resume(client: Client) -> None:
    await client.admin.Resume(admin_pb2.ResumeRequest())


async def test_ids_after_a_pause_are_those_without_one(client: Client) -> None:
    whole = (await client.generate(request(config=LONG))).ids()
    _, pauses = await scraped(client)
    live = await begun(client)
    load = await client.load()
    assert (load.running_requests, load.state) == (1, common_pb2.MODEL_STATE_DRAINING)
    assert load.HasField("paused_seconds")
    assert load.kv_blocks_used > 0
    assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
    refused = (await client.generate(request())).error
    assert isinstance(refused, Unavailable)
    assert refused.reason == "DRAINING"
    assert await scraped(client) == (1.0, pauses + 1)
    later = await client.load()
    assert (later.step, later.kv_blocks_used) == (load.step, load.kv_blocks_used)
    assert later.paused_seconds > load.paused_seconds
    await resume(client)
    outcome = await live
    assert outcome.ids() == whole
    assert outcome.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert await health(client) == health_pb2.HealthCheckResponse.SERVING
    assert not (await client.load()).HasField("paused_seconds")
    assert await scraped(client) == (0.0, pauses + 1)


async def test_a_deadline_passes_and_a_caller_leaves_in_a_pause(client: Client) -> None:
    late = await begun(client, timeout_seconds=1.0)
    outcome = await late
    assert isinstance(outcome.error, DeadlineExceeded)
    assert (await client.load()).HasField("paused_seconds")
    await resume(client)
    gone = await begun(client)
    gone.cancel()
    load = await client.until(lambda load: load.running_requests == 0)
    assert load.HasField("paused_seconds")
    assert load.kv_blocks_used == 0
    await resume(client)


async def test_a_session_gets_heartbeats_in_a_pause(client: Client) -> None:
    """A router takes a silent session with requests for lost."""
    session = Session(client)
    await session.submit(request(config={"max_new_tokens": 4000}, request_id="a"))
    while not session.ids("a"):
        await session.next()
    await pause(client)
    heard = 0
    while heard < 3:
        heard += (await session.next()).heartbeat
    await session.abort("a")
    while session.kinds("a")[-1] != "finished":
        await session.next()
    session.call.cancel()
    assert (await client.load()).HasField("paused_seconds")
    await resume(client)


async def test_a_pause_that_is_forgotten_ends_and_work_is_taken_again(client: Client) -> None:
    paused = await pause(client, max_seconds=0.3)
    assert paused.live_requests == 0
    assert paused.max_seconds == pytest.approx(0.3)
    await client.until(lambda load: not load.draining)
    assert await health(client) == health_pb2.HealthCheckResponse.SERVING
    assert (await client.generate(request())).error is None


async def test_a_drain_lets_those_that_are_paused_end(client: Client) -> None:
    live = await begun(client)
    await client.admin.Drain(admin_pb2.DrainRequest())
    assert (await live).finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    await resume(client)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 601.0, float("nan"), float("inf")])
async def test_a_pause_has_a_bound(client: Client, seconds: float) -> None:
    with pytest.raises(Exception, match="max_seconds") as caught:
        await pause(client, max_seconds=seconds)
    assert isinstance(from_rpc_error(caught.value), InvalidArgument)  # type: ignore[arg-type]
    assert not (await client.load()).draining


async def test_a_router_sends_new_requests_elsewhere_and_keeps_those_that_are_held() -> None:
    few = config_pb2.GenerationConfig(max_new_tokens=400)
    async with (
        generation_service(demo_folder(), kv_memory="16MiB") as service,
        running_router(backend=(service.running.address,), stall_timeout_seconds=1.0) as router,
    ):
        whole = (await collect(router.stub.Generate(generate(config=few)))).text()
        live = asyncio.ensure_future(collect(router.stub.Generate(generate(config=few))))
        await service.until(lambda load: load.running_requests == 1)
        await pause(service)
        await router.until("backend_up", 0.0, backend=service.running.address)
        # Longer than a silent session would live.
        await asyncio.sleep(2.5)
        load = await service.load()
        assert (load.running_requests, live.done()) == (1, False)
        await resume(service)
        answer = await live
        assert (answer.text(), answer.finished.attempts) == (whole, 1)
        await router.until("backend_up", 1.0, backend=service.running.address)


async def test_a_router_waits_for_calls_with_one_answer_that_a_pause_holds() -> None:
    """It must not take the backend for lost: all streams there would move."""
    score = text_pb2.ScoreTextRequest(
        items=[text_pb2.ScoreTextItem(prompt=f"{number} " * 40, continuation=" more") for number in range(8)]
    )
    async with (
        generation_service(demo_folder(), kv_memory="16MiB", max_batch_tokens=64) as service,
        running_router(backend=(service.running.address,), stall_timeout_seconds=1.0) as router,
    ):
        with held_after(1) as gate:
            call = asyncio.ensure_future(router.stub.Score(score))
            await service.until(lambda load: load.running_requests > 0 and gate.is_spent)
            pausing = asyncio.create_task(pause(service))
            await service.until(lambda load: load.draining)
        await pausing
        await asyncio.sleep(2.5)
        load = await service.load()
        assert load.HasField("paused_seconds")
        assert (load.waiting_requests + load.running_requests > 0, call.done()) == (True, False)
        assert router.metric("backend_losses_total", backend=service.running.address) == 0
        await resume(service)
        assert len((await call).results) == len(score.items)


async def test_deadlines_and_cancels_of_a_routers_callers_are_carried_out_in_a_pause() -> None:
    few = config_pb2.GenerationConfig(max_new_tokens=400)
    async with (
        generation_service(demo_folder(), kv_memory="16MiB") as service,
        running_router(backend=(service.running.address,)) as router,
    ):
        late, left = (
            asyncio.ensure_future(collect(call))
            for call in (
                router.stub.Generate(generate(config=few), timeout=3.0),
                router.stub.Generate(generate(config=few)),
            )
        )
        await service.until(lambda load: load.running_requests == 2)
        paused = await pause(service)
        assert paused.live_requests == 2
        left.cancel()
        await service.until(lambda load: load.running_requests == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        load = await service.until(lambda load: load.running_requests == 0)
        assert (load.HasField("paused_seconds"), load.kv_blocks_used) == (True, 0)
        await resume(service)
