"""Slot for a model on demand: a generation service without a model, which loads and unloads one when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import grpc

from penstock.common.errors import PenstockError, StartupError, Unavailable, from_rpc_error
from penstock.router.config import RouterConfig
from penstock.router.models_file import ModelEntry
from penstock.serving.transport import Channel, StreamCall, make_transport
from penstock.v1 import common_pb2, model_pb2, model_pb2_grpc

# Seconds for which a slot that did not answer is passed over.
_AWAY_SECONDS = 10.0
_LOAD = "/penstock.v1.ModelService/LoadModel"
# States in which a process has a model.
_HAS_MODEL = (common_pb2.MODEL_STATE_READY, common_pb2.MODEL_STATE_DRAINING)


class ModelSlot:
    """One such process, by its address. Belongs to one event loop."""

    def __init__(self, address: str, config: RouterConfig) -> None:
        self.address = address
        self._config = config
        self._transport = make_transport(config)
        # A time of time.monotonic(): it did not answer lately.
        self._away_until = 0.0

    @property
    def is_away(self) -> bool:
        """True for a while after it did not answer."""
        return time.monotonic() < self._away_until

    async def loaded_name(self) -> str:
        """Ask for the name of its model; empty when it has none. Raises PenstockError when it does not answer."""
        try:
            async with self._reached() as channel:
                stub = model_pb2_grpc.ModelServiceStub(channel.for_stubs)
                request = model_pb2.GetModelInfoRequest()
                info = await stub.GetModelInfo(request, timeout=self._config.connect_timeout_seconds)
        except PenstockError:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            raise
        self._away_until = 0.0
        return info.model if info.state in _HAS_MODEL else ""

    async def load(self, entry: ModelEntry, note_percent: Callable[[float], None]) -> None:
        """Make it load a model of its --model-root. Raises the service's PenstockError."""
        options = None if entry.options is None else model_pb2.LoadModelOptions(**entry.options)
        start = model_pb2.LoadModelStart(name=entry.name, path=entry.path, options=options)
        async with self._reached() as channel:
            call: StreamCall[model_pb2.LoadModelResponse] = await channel.open_stream(
                _LOAD, model_pb2.LoadModelResponse.FromString
            )
            try:
                await call.write(model_pb2.LoadModelRequest(start=start))
                await call.done_writing()
                while (message := await call.receive()) is not None:
                    progress = message.progress
                    if progress.stage == "load_weights" and progress.total_bytes:
                        note_percent(100.0 * progress.done_bytes / progress.total_bytes)
            finally:
                # A caller that leaves ends the load: the call is the load.
                call.cancel()

    async def unload(self, grace_seconds: float) -> None:
        """Make it unload its model; requests that are left have `grace_seconds`. Raises the service's PenstockError."""
        async with self._reached() as channel:
            stub = model_pb2_grpc.ModelServiceStub(channel.for_stubs)
            await stub.UnloadModel(model_pb2.UnloadModelRequest(grace_seconds=grace_seconds))

    @contextlib.asynccontextmanager
    async def _reached(self) -> AsyncIterator[Channel]:
        """Give a channel. Errors of its calls are PenstockErrors."""
        timeout = self._config.connect_timeout_seconds
        try:
            async with self._transport.open_channel(
                self.address, self._config, connect_timeout_seconds=timeout
            ) as channel:
                yield channel
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:
            raise Unavailable("the slot was lost", reason="BACKEND_LOST") from error
        except StartupError as error:
            raise Unavailable("the router cannot read its credentials for a slot", reason="NO_BACKEND") from error
