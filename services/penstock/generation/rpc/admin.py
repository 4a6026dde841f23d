"""GenerationAdminService: load, cache and lifecycle of the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_access import AdapterAccess
from penstock.generation.adapters.figures import AdapterInfo
from penstock.generation.engine.block_commands import BlockCommands
from penstock.generation.engine.prefix_log import PrefixReader
from penstock.generation.engine.stats import EngineLoad
from penstock.generation.engine.step_watch import StepView
from penstock.generation.lifecycle import Lifecycle
from penstock.generation.options.kinds import check_count
from penstock.generation.service import WarmUpSize
from penstock.generation.wire import convert
from penstock.generation.wire.load_model import to_grace
from penstock.v1 import admin_pb2, admin_pb2_grpc

# Number of a removed field of ClearCacheRequest. A caller that still sends it means less than the whole cache.
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
        """Send the load at once, then on change, at most once per interval. It waits for an event and never polls.

        With `prefixes` also what the pools keep: all of it in the first reports, then what has changed.
        """
        interval = _interval(request)
        async for response in self._changes(interval, with_prefixes=request.prefixes):
            await context.write(response)

    async def _changes(self, interval: float, *, with_prefixes: bool) -> AsyncIterator[admin_pb2.WatchLoadResponse]:
        core = self._lifecycle.loaded()
        hub, log = core.hub, core.loop.prefix_log
        reader = PrefixReader(log) if with_prefixes and log is not None else None
        changed = hub.watch()
        try:
            last = None
            while not hub.closing:
                changed.clear()
                load, prefixes = self._load(), reader.take() if reader is not None else None
                if load != last or prefixes is not None:
                    last = load
                    yield convert.from_report(load, prefixes)
                    await hub.pause(interval)
                # What does not fit one report is told without a change.
                if reader is None or not reader.has_more:
                    await changed.wait()
        finally:
            hub.unwatch(changed)

    async def GetPoolStats(
        self, request: admin_pb2.GetPoolStatsRequest, context: Context
    ) -> admin_pb2.GetPoolStatsResponse:
        """Return counters of the KV pool since the start."""
        core = self._lifecycle.loaded()
        return convert.from_pool_stats(self._load(), core.stats, core.loaded.pools.kv.bytes_per_block)

    async def CopyBlocks(self, request: admin_pb2.CopyBlocksRequest, context: Context) -> admin_pb2.CopyBlocksResponse:
        """Copy blocks of the pool that no request holds, between two steps."""
        pairs = [(pair.source, pair.destination) for pair in request.pairs]
        seconds = await self._command(lambda commands: commands.copy(pairs))
        return admin_pb2.CopyBlocksResponse(blocks=len(pairs), seconds=seconds)

    async def SwapBlocks(self, request: admin_pb2.SwapBlocksRequest, context: Context) -> admin_pb2.SwapBlocksResponse:
        """Copy blocks that no request holds between the pool and the host pool, between two steps."""
        swaps = [(swap.kind, swap.source, swap.destination) for swap in request.swaps]
        seconds = await self._command(lambda commands: commands.swap(swaps))
        return admin_pb2.SwapBlocksResponse(blocks=len(swaps), seconds=seconds)

    async def _command(self, run: Callable[[BlockCommands], float]) -> float:
        core = self._lifecycle.loaded()
        seconds = await asyncio.wrap_future(core.loop.run_on_engine(lambda engine: run(BlockCommands(engine))))
        # As for ClearCache: prefixes may be gone.
        await asyncio.wrap_future(core.loop.run_on_engine(lambda _: None))
        core.hub.notify()
        return seconds

    async def ClearCache(self, request: admin_pb2.ClearCacheRequest, context: Context) -> admin_pb2.ClearCacheResponse:
        """Forget every reusable prefix that no running request holds, or the computed blocks of the named requests."""
        unknown: Any = UnknownFieldSet(request)
        if any(field.field_number == _RETIRED_REQUEST_IDS for field in unknown):
            raise InvalidArgument("request_ids", "is not a field any more: live_request_ids names live requests")
        core = self._lifecycle.loaded()
        ids = request.live_request_ids
        # Each is a command for the engine's thread: no more of them than may be live.
        check_count("live_request_ids", ids, core.loaded.engine.config.max_queued_requests)
        return admin_pb2.ClearCacheResponse(blocks_cleared=await core.clear_cache(tuple(ids)))

    async def WarmUp(self, request: admin_pb2.WarmUpRequest, context: Context) -> admin_pb2.WarmUpResponse:
        """Run the model as at start-up, or as asked, while nothing else runs; the prefix cache is empty afterwards."""
        core = self._lifecycle.accepting()
        begin = time.monotonic()
        asked = {field.name: value for field, value in request.ListFields()}
        await core.warm_up(WarmUpSize(**asked) if asked else None)
        return admin_pb2.WarmUpResponse(
            kv_bytes_available=core.loaded.pools.kv.num_bytes, seconds=time.monotonic() - begin
        )

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
        grace = to_grace(request)
        self._lifecycle.start_drain()
        await self._lifecycle.show_health()
        await core.finish(grace)
        return admin_pb2.DrainResponse(running_requests=core.hub.num_live)

    async def Pause(self, request: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        """Refuse new work and hold the engine's steps; live requests keep their blocks."""
        core = self._lifecycle.loaded()
        most = core.loaded.engine.config.max_pause_seconds
        seconds = request.max_seconds if request.HasField("max_seconds") else most
        # NaN fails every comparison.
        if not 0 < seconds <= most:
            raise InvalidArgument("max_seconds", f"must be above 0 and at most {most:g} (--max-pause-seconds)")
        await self._lifecycle.pause(seconds)
        return admin_pb2.PauseResponse(live_requests=core.hub.num_live, max_seconds=seconds)

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        """Take new work again after Drain, and go on after Pause."""
        self._lifecycle.loaded()
        self._lifecycle.resume()
        await self._lifecycle.show_health()
        return admin_pb2.ResumeResponse()

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Load an adapter; requests that come after the answer may name it."""
        access = self._lifecycle.accepting().adapter_access
        seconds = await access.load(request.name, request.path, replace=request.replace)
        # Raises where another call has unloaded it meanwhile.
        adapter = _adapter(access.info(request.name), access)
        return admin_pb2.LoadAdapterResponse(adapter=adapter, version=access.version, seconds=seconds)

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """Forget an adapter; requests that have it go on."""
        access = self._lifecycle.loaded().adapter_access
        live = access.unload(request.name)
        return admin_pb2.UnloadAdapterResponse(version=access.version, live_requests=live)

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        """Return facts of every adapter that is known."""
        access = self._lifecycle.loaded().adapter_access
        found = [_adapter(info, access) for info in access.infos()]
        return admin_pb2.ListAdaptersResponse(adapters=found, version=access.version)

    async def Reload(self, request: admin_pb2.ReloadRequest, context: Context) -> admin_pb2.ReloadResponse:
        """Read the model's weights again, between a drain and a resume."""
        result = await self._lifecycle.reload(to_grace(request))
        weights = self._lifecycle.loaded().loaded.weights.model.num_bytes
        return admin_pb2.ReloadResponse(seconds=result.seconds, weights_bytes=weights, aborted_requests=result.aborted)

    def _load(self) -> admin_pb2.Load:
        core = self._lifecycle.core
        if core is None:
            return convert.from_load(EngineLoad(), StepView(), self._lifecycle.state.value, 0, self._lifecycle.start_id)
        config, view = core.loaded.engine.config, core.loop.step_in_progress
        if view.seconds < config.heartbeat_seconds:
            # Otherwise a watcher would hear of every current step.
            view = StepView()
        limit, start_id = config.max_queued_requests, self._lifecycle.start_id
        version = core.adapter_access.version
        # Requests in preparation count, too: a router takes uncounted requests for forgotten.
        state, paused = self._lifecycle.state.value, self._lifecycle.paused_seconds
        return convert.from_load(core.load, view, state, limit, start_id, version, paused)


def _adapter(info: AdapterInfo, access: AdapterAccess) -> admin_pb2.Adapter:
    return convert.from_adapter(info, access.shown_path(info))


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
