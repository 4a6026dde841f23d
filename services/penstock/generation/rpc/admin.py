"""GenerationAdminService: load, cache and lifecycle of the process."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.stats import EngineLoad
from penstock.generation.engine.step_watch import StepView
from penstock.generation.service import GenerationCore, Lifecycle
from penstock.generation.startup.load import LoadedModel
from penstock.generation.wire import convert
from penstock.v1 import admin_pb2, admin_pb2_grpc

# Number of a field that ClearCacheRequest no longer has. Who still sends it means less than the whole cache.
_RETIRED_REQUEST_IDS = 1
Context = grpc.aio.ServicerContext[Any, Any]
MAX_DUMP_WAIT_SECONDS = 3600.0
DEFAULT_INTERVAL_SECONDS, MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.1, 0.01, 3600.0


class AdminServicer(admin_pb2_grpc.GenerationAdminServiceServicer):
    """GenerationAdminService over one Lifecycle."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def GetLoad(self, request: admin_pb2.GetLoadRequest, context: Context) -> admin_pb2.GetLoadResponse:
        """Return the load of the process, also while it loads the model."""
        return admin_pb2.GetLoadResponse(load=self._load())

    async def WatchLoad(self, request: admin_pb2.WatchLoadRequest, context: Context) -> None:  # type: ignore[override]
        """Send the load at once, then on change, at most once per interval. It waits for an event and never polls."""
        interval = _interval(request)
        async for load in self._changes(interval):
            await context.write(admin_pb2.WatchLoadResponse(load=load))

    async def _changes(self, interval: float) -> AsyncIterator[admin_pb2.Load]:
        hub = self._lifecycle.loaded().hub
        changed = hub.watch()
        try:
            last = None
            while not hub.closing:
                changed.clear()
                load = self._load()
                if load != last:
                    last = load
                    yield load
                    await asyncio.sleep(interval)
                await changed.wait()
        finally:
            hub.unwatch(changed)

    async def GetPoolStats(
        self, request: admin_pb2.GetPoolStatsRequest, context: Context
    ) -> admin_pb2.GetPoolStatsResponse:
        """Return counters of the KV pool since the start."""
        core = self._lifecycle.loaded()
        return convert.from_pool_stats(self._load(), core.stats)

    async def ClearCache(self, request: admin_pb2.ClearCacheRequest, context: Context) -> admin_pb2.ClearCacheResponse:
        """Forget every reusable prefix that no running request holds."""
        unknown: Any = UnknownFieldSet(request)
        if any(field.field_number == _RETIRED_REQUEST_IDS for field in unknown):
            raise InvalidArgument("request_ids", "is no field any more: the cache is cleared as a whole")
        core = self._lifecycle.loaded()
        cleared = await asyncio.wrap_future(core.loop.run_on_engine(lambda engine: engine.clear_cache()))
        # The engine publishes its load after carrying out commands, so the next one sees it published.
        await asyncio.wrap_future(core.loop.run_on_engine(lambda _: None))
        core.hub.notify()
        return admin_pb2.ClearCacheResponse(blocks_cleared=cleared)

    async def WarmUp(self, request: admin_pb2.WarmUpRequest, context: Context) -> admin_pb2.WarmUpResponse:
        """Run the model once, as at start-up, while nothing else runs; the prefix cache is empty afterwards."""
        core = self._lifecycle.accepting()
        begin = time.monotonic()
        await asyncio.wrap_future(core.loop.run_on_engine(lambda engine: _warm_up(engine, core.loaded)))
        return admin_pb2.WarmUpResponse(kv_bytes_available=core.loaded.kv.num_bytes, seconds=time.monotonic() - begin)

    async def DumpState(self, request: admin_pb2.DumpStateRequest, context: Context) -> admin_pb2.DumpStateResponse:
        """Return the engine's state, also when its thread hangs."""
        wait = request.wait_seconds if request.HasField("wait_seconds") else None
        # NaN fails every comparison.
        if wait is not None and not 0 <= wait <= MAX_DUMP_WAIT_SECONDS:
            raise InvalidArgument("wait_seconds", f"must be in [0, {MAX_DUMP_WAIT_SECONDS:g}]")
        dump = await self._lifecycle.loaded().loop.dump(wait)
        return admin_pb2.DumpStateResponse(state=convert.from_dump(dump))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Refuse new work and wait for live requests. Once the grace is over they are aborted."""
        core = self._lifecycle.loaded()
        grace = request.grace_seconds if request.HasField("grace_seconds") else None
        if grace is not None and not (math.isfinite(grace) and grace >= 0):
            raise InvalidArgument("grace_seconds", "must be finite and >= 0")
        self._lifecycle.start_drain()
        await self._lifecycle.show_health()
        await _finish(core, grace)
        return admin_pb2.DrainResponse(running_requests=core.hub.num_live)

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        """Take new work again after Drain."""
        self._lifecycle.loaded()
        self._lifecycle.resume()
        await self._lifecycle.show_health()
        return admin_pb2.ResumeResponse()

    def _load(self) -> admin_pb2.Load:
        core = self._lifecycle.core
        if core is None:
            return convert.from_load(EngineLoad(), StepView(), self._lifecycle.state.value, 0, self._lifecycle.start_id)
        config, view = core.loaded.engine_config, core.loop.step_in_progress
        if view.seconds < config.heartbeat_seconds:
            # Else a watcher would be told of every step that is under way.
            view = StepView()
        limit, start_id = config.max_queued_requests, self._lifecycle.start_id
        load = core.loop.load
        # The engine does not know those that are prepared yet, and a router takes what nobody counts for forgotten.
        load = load._replace(waiting_requests=load.waiting_requests + core.hub.num_prepared)
        return convert.from_load(load, view, self._lifecycle.state.value, limit, start_id)


def _interval(request: admin_pb2.WatchLoadRequest) -> float:
    if not request.HasField("min_interval_seconds"):
        return DEFAULT_INTERVAL_SECONDS
    interval = request.min_interval_seconds
    # NaN fails every comparison.
    if not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        raise InvalidArgument(
            "min_interval_seconds", f"must be in [{MIN_INTERVAL_SECONDS:g}, {MAX_INTERVAL_SECONDS:g}]"
        )
    return interval


def _warm_up(engine: Engine, loaded: LoadedModel) -> None:
    """Warm up, on the engine's thread. It writes into blocks of the pool, so none may be in use or cached."""
    if engine.has_work:
        raise FailedPrecondition("requests are live: warm up while there are none", reason="BUSY")
    engine.clear_cache()
    loaded.warm_up()


async def _finish(core: GenerationCore, grace: float | None) -> None:
    """Wait for live requests. After `grace` seconds abort them and wait for their last words."""
    try:
        await asyncio.wait_for(core.hub.wait_idle(), grace)
    except TimeoutError:
        core.hub.abort(core.hub.live_ids())
        await core.hub.wait_idle()
