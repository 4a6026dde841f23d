"""Cancel, deadline, abort, slow readers, drain, a full queue and a broken engine: nothing is lost or leaked."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.step_gate import held_after
from factories.servers.generation import PATIENCE_SECONDS, Client, generation_service, request, text_checkpoint
from factories.servers.sessions import Session
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from penstock.generation import running
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.runner.model_runner import ModelRunner
from penstock.v1 import admin_pb2, common_pb2, generation_pb2, model_pb2
from prometheus_client import generate_latest

pytestmark = pytest.mark.asyncio(loop_scope="module")
MANY_STEPS = 4000
LONG = {"max_new_tokens": MANY_STEPS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder) as running:
        yield running


async def started(client: Client, **fields: Any) -> Any:
    """A long request that has its first token."""
    call = client.generation.Generate(request(config=LONG, **fields))
    first = await call.read()
    assert first.HasField("started")
    return call


async def rest(call: Any) -> list[Any]:
    """Remaining messages of a call begun by `started`. Raises its status."""
    events = []
    # grpc.aio.EOF is falsy, and no event of ours is.
    while event := await call.read():
        events.append(event)
    return events


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
async def test_a_services_engine_gives_way_to_event_loops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    step = ModelRunner.execute

    def noted(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return step(self, *args, **kwargs)

    async with generation_service(folder) as running:
        monkeypatch.setattr(ModelRunner, "execute", noted)
        assert (await running.generate(request())).error is None
    assert seen == {os.getpriority(os.PRIO_PROCESS, 0) + 4}


async def health(client: Client) -> int:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest())
    status: int = response.status
    return status


async def test_cancelling_frees_the_blocks(client: Client) -> None:
    call = await started(client)
    begun = await client.load()
    assert begun.kv_blocks_used > 0
    call.cancel()
    ended = await client.until_idle()
    assert ended.step - begun.step < MANY_STEPS // 2, "it ended long before its own end"


async def test_a_process_tells_itself_from_another(client: Client, folder: Path) -> None:
    own = (await client.load()).process_start_id
    assert len(own) == 16
    assert (await client.until_idle()).process_start_id == own
    async with generation_service(folder) as another:
        assert (await another.load()).process_start_id not in ("", own)


async def test_a_client_whose_connection_is_gone_frees_its_blocks(client: Client) -> None:
    async with grpc.aio.insecure_channel(
        client.running.address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as own:
        await started(Client(client.running, own))
    await client.until_idle()


async def test_a_deadline_ends_the_request_and_frees_its_blocks(client: Client) -> None:
    outcome = await client.generate(request(config=LONG), timeout=0.3)
    assert isinstance(outcome.error, DeadlineExceeded)
    assert len(outcome.deltas) < MANY_STEPS
    await client.until_idle()


async def test_a_deadline_that_passed_in_the_queue_is_never_prefilled(folder: Path) -> None:
    # No forecast refuses it before.
    async with generation_service(folder, max_running_sequences=1, deadline_headroom=0.01) as client:
        with held_after(1):
            running = await started(client)
            outcome = await client.generate(request(), timeout=0.2)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert outcome.deltas == []
        load = await client.until(lambda load: load.waiting_requests == 0)
        assert load.running_requests == 1
        running.cancel()


async def test_max_time_finishes_with_its_own_reason(client: Client) -> None:
    outcome = await client.generate(request(config={**LONG, "max_time": 0.2}))
    assert outcome.error is None
    assert outcome.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_MAX_TIME


async def test_abort_finishes_the_request_aborted(client: Client) -> None:
    with held_after(1):
        call = await started(client, request_id="mine")
        answer = await client.generation.Abort(generation_pb2.AbortRequest(request_ids=["mine", "nobody"]))
    assert list(answer.request_ids) == ["mine"]
    events = await rest(call)
    assert events[-1].finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert await call.code() is grpc.StatusCode.OK
    await client.until_idle()


async def test_abort_all(client: Client) -> None:
    with held_after(0):
        calls = [client.generation.Generate(request(config=LONG, request_id=name)) for name in "ab"]
        await client.until(lambda load: load.waiting_requests == 2)
        answer = await client.generation.Abort(generation_pb2.AbortRequest(all=True))
    assert sorted(answer.request_ids) == ["a", "b"]
    for call in calls:
        assert (await rest(call))[-1].HasField("finished")


async def test_a_full_queue_refuses_at_once_with_pushback(folder: Path) -> None:
    async with generation_service(folder, max_running_sequences=1, max_queued_requests=1) as client:
        with held_after(1):
            running = await started(client)
            queued = client.generation.Generate(request(config=LONG))
            await client.until(lambda load: load.waiting_requests == 1)
            call = client.generation.Generate(request())
            with pytest.raises(grpc.RpcError) as refusal:
                await call.read()
        error = from_rpc_error(refusal.value)
        assert (type(error), error.reason) == (ResourceExhausted, "QUEUE_FULL")
        assert error.retry_after_seconds is not None
        assert "grpc-retry-pushback-ms" in dict(await call.trailing_metadata())
        running.cancel()
        assert (await queued.read()).HasField("started")
        queued.cancel()
        await client.until_idle()


async def test_a_reader_that_is_too_far_behind_is_cut_off(folder: Path) -> None:
    # A window that does not grow with the traffic.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with (
        generation_service(folder, max_pending_messages=8) as client,
        grpc.aio.insecure_channel(client.running.address, options=options) as narrow,
    ):
        call = Client(client.running, narrow).generation.Generate(request(config=LONG, output={"top_logprobs": 20}))
        await client.until(lambda load: load.step > 0 and not load.running_requests)
        with pytest.raises(grpc.RpcError) as cut:
            await rest(call)
        error = from_rpc_error(cut.value)
        assert (type(error), error.reason) == (ResourceExhausted, "SLOW_READER")
        assert "penstock_slow_readers_total" in generate_latest(client.running.registry).decode()
        await client.until_idle()


async def test_drain_refuses_new_work_finishes_the_old_and_resume_undoes_it(client: Client) -> None:
    with held_after(1):
        live = asyncio.create_task(client.generate(request(config={"max_new_tokens": 40})))
        await client.until(lambda load: load.running_requests == 1)
        drain = client.admin.Drain(admin_pb2.DrainRequest())
        await client.until(lambda load: load.draining)
        assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = await client.generate(request())
        assert isinstance(refused.error, Unavailable)
        assert refused.error.reason == "DRAINING"
    assert (await drain).running_requests == 0
    assert (await live).finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    await client.admin.Resume(admin_pb2.ResumeRequest())
    assert await health(client) == health_pb2.HealthCheckResponse.SERVING
    assert (await client.generate(request())).error is None


async def test_drain_with_a_grace_aborts_what_is_left(client: Client) -> None:
    call = await started(client)
    await client.admin.Drain(admin_pb2.DrainRequest(grace_seconds=0))
    assert (await rest(call))[-1].finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
    await client.admin.Resume(admin_pb2.ResumeRequest())


def overwrite(folder: Path, source: Path) -> None:
    """Put the weights of `source` into `folder`, as a deployment does: by renaming."""
    shutil.copy(source / "model.safetensors", folder / "new")
    (folder / "new").rename(folder / "model.safetensors")


async def test_a_reload_serves_the_new_weights_and_counts_on(tmp_path: Path) -> None:
    folder, other = text_checkpoint(tmp_path / "model"), text_checkpoint(tmp_path / "other", seed=5)
    prompt = range(5, 60)
    async with generation_service(other) as client:
        theirs = (await client.generate(request(prompt))).ids()
    async with generation_service(folder) as client:
        remembering = {"ngram_memory_num_tokens": 4}
        ours = (await client.generate(request(prompt, config=remembering))).ids()
        assert ours != theirs
        before, session = await client.load(), Session(client)
        await session.submit(request(prompt, request_id="before"))
        while "finished" not in session.kinds("before"):
            await session.next()
        overwrite(folder, other)
        answer = await client.admin.Reload(admin_pb2.ReloadRequest())
        assert answer.seconds > 0
        assert answer.weights_bytes > 0
        assert answer.aborted_requests == 0
        assert await health(client) == health_pb2.HealthCheckResponse.SERVING
        # On the same session: no prefix that the old weights computed is reused, and no output of theirs is drafted.
        await session.submit(request(prompt, request_id="after"))
        while "finished" not in session.kinds("after"):
            await session.next()
        assert session.ids("before") == ours
        assert session.ids("after") == theirs
        again = await client.generate(request(prompt, config=remembering))
        assert again.ids() == theirs
        assert (await client.load()).step > before.step
        assert (await client.load()).process_start_id == before.process_start_id
        await client.until_idle()


async def test_after_a_reload_the_draft_models_files_are_watched_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[set[Path]] = []

    async def watch(files: Any, seconds: float) -> None:
        watched.append({one.path for one in files})
        await asyncio.Event().wait()

    monkeypatch.setattr(running, "weights_written", watch)
    served, draft = (text_checkpoint(tmp_path / name) for name in ("model", "draft"))
    async with generation_service(served, assistant_model=str(draft), kernels="torch", dtype="float32") as client:
        await client.generate(request())
        await client.admin.Reload(admin_pb2.ReloadRequest())
        await client.generate(request())
    assert {path.parent for path in watched[0]} == {served, draft}
    assert watched[1:] == watched[:1]


async def test_a_reload_waits_for_live_requests_or_aborts_them(client: Client) -> None:
    expected = (await client.generate(request(config={"max_new_tokens": 40}))).ids()
    with held_after(1):
        live = asyncio.create_task(client.generate(request(config={"max_new_tokens": 40})))
        await client.until(lambda load: load.running_requests == 1)
        reload = asyncio.ensure_future(client.admin.Reload(admin_pb2.ReloadRequest()))
        await client.until(lambda load: load.draining)
        assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
        for refused in (client.admin.Reload(admin_pb2.ReloadRequest()), client.admin.Resume(admin_pb2.ResumeRequest())):
            with pytest.raises(grpc.RpcError) as busy:
                await refused
            assert from_rpc_error(busy.value).reason == "BUSY"
    assert (await live).ids() == expected
    assert (await reload).aborted_requests == 0
    call = await started(client)
    assert (await client.admin.Reload(admin_pb2.ReloadRequest(grace_seconds=0))).aborted_requests == 1
    assert (await rest(call))[-1].finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert (await client.generate(request(config={"max_new_tokens": 40}))).ids() == expected
    await client.until_idle()


async def test_a_process_that_was_drained_stays_so_after_a_reload(client: Client) -> None:
    await client.admin.Drain(admin_pb2.DrainRequest())
    await client.admin.Reload(admin_pb2.ReloadRequest())
    assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
    await client.admin.Resume(admin_pb2.ResumeRequest())
    with held_after(1):
        call = await started(client)
        reload = asyncio.ensure_future(client.admin.Reload(admin_pb2.ReloadRequest(grace_seconds=60)))
        await client.until(lambda load: load.draining)
        drain = asyncio.ensure_future(client.admin.Drain(admin_pb2.DrainRequest(grace_seconds=0)))
    await asyncio.gather(reload, drain)
    await rest(call)
    assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
    await client.admin.Resume(admin_pb2.ResumeRequest())
    assert await health(client) == health_pb2.HealthCheckResponse.SERVING


async def test_a_caller_that_leaves_does_not_end_a_reload(client: Client) -> None:
    with held_after(1):
        call = await started(client)
        reload = client.admin.Reload(admin_pb2.ReloadRequest())
        await client.until(lambda load: load.draining)
        reload.cancel()
    call.cancel()
    await client.until(lambda load: not load.draining)
    assert (await client.generate(request())).error is None


@pytest.mark.parametrize("what", ["shape", "tokenizer", "truncated", "gone"])
async def test_weights_that_cannot_be_used_are_refused_and_the_old_ones_serve_on(tmp_path: Path, what: str) -> None:
    folder = text_checkpoint(tmp_path / "model")
    async with generation_service(folder) as client:
        expected = (await client.generate(request())).ids()
        weights = folder / "model.safetensors"
        if what == "shape":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        elif what == "tokenizer":
            (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
        elif what == "truncated":
            (folder / "new").write_bytes(weights.read_bytes()[:-1000])
            (folder / "new").rename(weights)
        else:
            weights.unlink()
        with pytest.raises(grpc.RpcError) as refused:
            await client.admin.Reload(admin_pb2.ReloadRequest())
        error = from_rpc_error(refused.value)
        assert (type(error), error.reason) == (FailedPrecondition, "RELOAD_FAILED")
        assert await health(client) == health_pb2.HealthCheckResponse.SERVING
        assert (await client.generate(request())).ids() == expected


async def test_stopping_the_process_lets_streams_finish_and_ends_idle_sessions(folder: Path) -> None:
    async with generation_service(folder) as client:
        session = Session(client)
        await session.submit(request(request_id="over"))
        while "finished" not in session.kinds("over"):
            await session.next()
        watch = client.admin.WatchLoad(admin_pb2.WatchLoadRequest())
        assert (await watch.read()).load.state == common_pb2.MODEL_STATE_READY
        with held_after(1):
            live = asyncio.create_task(client.generate(request(config={"max_new_tokens": 40})))
            await client.until(lambda load: load.running_requests == 1)
            stop = asyncio.create_task(client.running.stop())
            await asyncio.sleep(0)
        assert (await live).finished.usage.completion_tokens == 40
        assert await session.call.code() is grpc.StatusCode.OK
        await rest(watch)
        assert await watch.code() is grpc.StatusCode.OK
        await stop


async def test_a_stream_that_outlives_the_grace_ends_aborted_and_not_unavailable(folder: Path) -> None:
    async with generation_service(folder, drain_grace_seconds=0.05) as client:
        with held_after(1):
            call = await started(client)
            stop = asyncio.create_task(client.running.stop())
            await asyncio.sleep(0)
        with pytest.raises(grpc.RpcError) as cut:
            await rest(call)
        error = from_rpc_error(cut.value)
        assert (type(error), error.reason) == (Aborted, "DRAIN_GRACE_OVER")
        await stop


async def test_a_watch_reports_at_once_and_on_change_only(client: Client) -> None:
    await client.until_idle()
    watch = client.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=0.01))
    first = (await watch.read()).load
    assert (first.running_requests, first.max_queued_requests) == (0, 1024)
    quiet = asyncio.create_task(watch.read())
    done, _ = await asyncio.wait([quiet], timeout=0.2)
    assert not done
    await client.generate(request())
    assert (await quiet).load != first
    watch.cancel()


async def test_the_cache_can_be_cleared(client: Client) -> None:
    prompt = range(200, 260)
    await client.generate(request(prompt))
    cleared = await client.admin.ClearCache(admin_pb2.ClearCacheRequest())
    assert cleared.blocks_cleared >= 3
    assert (await client.load()).kv_blocks_evictable == 0
    assert (await client.generate(request(prompt))).started.cached_tokens == 0
    stats = await client.admin.GetPoolStats(admin_pb2.GetPoolStatsRequest())
    assert stats.prefix_lookups_tokens > 0
    assert stats.load.kv_blocks_total == stats.load.kv_blocks_free + stats.load.kv_blocks_evictable


async def test_a_caller_that_names_what_to_clear_does_not_lose_the_whole_cache(client: Client) -> None:
    """The field that named requests is gone; what an old caller sends in it is not a field any more."""
    prompt = range(300, 360)
    await client.generate(request(prompt))
    with pytest.raises(grpc.RpcError) as refused:
        await client.admin.ClearCache(admin_pb2.ClearCacheRequest.FromString(b"\x0a\x04that"))
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == "request_ids"
    assert (await client.generate(request(prompt))).started.cached_tokens > 0


async def test_the_cache_of_a_live_request_can_be_released(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes again what it lost, and its ids are what they would have been."""
    asked, run_on_engine = threading.Event(), EngineLoop.run_on_engine

    def noted(loop: EngineLoop, call: Callable[[Any], Any]) -> Any:
        future = run_on_engine(loop, call)
        asked.set()
        return future

    message = request(range(100, 160), config={"max_new_tokens": 40})
    wanted = (await client.generate(message)).ids()
    await client.admin.ClearCache(admin_pb2.ClearCacheRequest())
    before = (await client.admin.GetPoolStats(admin_pb2.GetPoolStatsRequest())).preemptions
    message.request_id = "mine"
    with held_after(3) as gate:
        call = client.generation.Generate(message)
        events = [await call.read(), await call.read()]
        monkeypatch.setattr(EngineLoop, "run_on_engine", noted)
        clearing = asyncio.create_task(_cleared(client, "mine"))
        # The engine has it before the step that is held: a fast one would be through with the request else.
        assert await asyncio.to_thread(asked.wait, PATIENCE_SECONDS)
        gate.open()
        assert await clearing >= 4
    events += await rest(call)
    ids = [one for event in events if event.HasField("delta") for one in event.delta.token_ids]
    assert ids == wanted
    assert (await client.admin.GetPoolStats(admin_pb2.GetPoolStatsRequest())).preemptions == before + 1
    for named in (["mine"], ["", "other"]):
        with pytest.raises(grpc.RpcError) as unknown:
            await client.admin.ClearCache(admin_pb2.ClearCacheRequest(live_request_ids=named))
        error = from_rpc_error(unknown.value)
        assert (type(error), error.reason, error.field) == (NotFound, "REQUEST_NOT_FOUND", "live_request_ids[0]")
    with pytest.raises(grpc.RpcError) as many:
        await client.admin.ClearCache(admin_pb2.ClearCacheRequest(live_request_ids=["a"] * 1025))
    assert from_rpc_error(many.value).field == "live_request_ids"


async def _cleared(client: Client, name: str) -> int:
    answer = await client.admin.ClearCache(admin_pb2.ClearCacheRequest(live_request_ids=[name]))
    return int(answer.blocks_cleared)


async def test_a_warm_up_of_a_size(client: Client) -> None:
    await client.until_idle()
    everything = {"prefill_tokens": 4096, "sequence_tokens": 2560, "input_tokens": 128, "iterations": 3}
    for size in (
        everything,
        {"iterations": 2**32 - 1},
        dict.fromkeys(everything, 2**32 - 1),
        dict.fromkeys(everything, 1),
    ):
        answer = await client.admin.WarmUp(admin_pb2.WarmUpRequest(**size))
        assert answer.kv_bytes_available > 0
    for name in everything:
        with pytest.raises(grpc.RpcError) as refused:
            await client.admin.WarmUp(admin_pb2.WarmUpRequest(**{name: 0}))
        assert from_rpc_error(refused.value).field == name
    assert (await client.generate(request())).error is None


async def test_warming_up_needs_an_idle_engine(client: Client) -> None:
    call = await started(client)
    with pytest.raises(grpc.RpcError) as busy:
        await client.admin.WarmUp(admin_pb2.WarmUpRequest())
    assert isinstance(from_rpc_error(busy.value), FailedPrecondition)
    call.cancel()
    await client.until_idle()
    assert (await client.admin.WarmUp(admin_pb2.WarmUpRequest())).kv_bytes_available > 0
    assert (await client.generate(request())).error is None


async def test_a_broken_engine_ends_every_stream_internal_and_fails_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with generation_service(folder) as client:

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        calls = [await started(client), await started(client)]
        session = client.generation.Session()
        monkeypatch.setattr(ModelRunner, "execute", broken)
        for call in calls:
            with pytest.raises(grpc.RpcError) as failure:
                await rest(call)
            error = from_rpc_error(failure.value)
            assert isinstance(error, Internal)
            assert "device" not in error.message
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert isinstance(await client.running.service.failed, RuntimeError)
        assert await session.code() is not None
        assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = await client.generate(request())
        assert isinstance(refused.error, Unavailable)
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert info.state == common_pb2.MODEL_STATE_UNAVAILABLE


async def test_a_process_that_stops_cannot_be_resumed(folder: Path) -> None:
    async with generation_service(folder) as client:
        call = await started(client)
        stopping = asyncio.create_task(client.running.service.drain())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.admin.Resume(admin_pb2.ResumeRequest())
        assert isinstance(from_rpc_error(refused.value), Unavailable)
        assert isinstance((await client.generate(request())).error, Unavailable)
        call.cancel()
        await stopping
