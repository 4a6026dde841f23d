"""Connection to a Penstock generation service: its RPCs as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from penstock.common.errors import PenstockError
from penstock.router.config import RouterConfig
from penstock.serving.channels import until_serving, watch_health
from penstock.serving.transport import Channel, StreamCall
from penstock.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

if TYPE_CHECKING:
    from penstock.v1.generation_pb2_grpc import GenerationServiceAsyncStub

GENERATION_NAME = "penstock.v1.GenerationService"


class OwnConnection:
    """Connection to a generation service. Implements BackendConnection."""

    keeps_salts = True

    def __init__(self, channel: Channel, config: RouterConfig) -> None:
        self._channel = channel
        self._config = config
        self.calls: GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(channel.for_stubs)

    async def until_serving(self, on_starting: Callable[[], object]) -> bool:
        return await until_serving(self._channel.for_stubs, GENERATION_NAME, on_starting)

    async def model_info(self) -> model_pb2.GetModelInfoResponse:
        stub = model_pb2_grpc.ModelServiceStub(self._channel.for_stubs)
        return await stub.GetModelInfo(model_pb2.GetModelInfoRequest(), timeout=self._config.connect_timeout_seconds)

    async def open_session(self) -> StreamCall[generation_pb2.SessionResponse]:
        parse = generation_pb2.SessionResponse.FromString
        # Messages that wait are parsed as one: a message is a list of events, and merging joins the lists.
        return await self._channel.open_stream(f"/{GENERATION_NAME}/Session", parse, joins=True)

    async def watch_loads(self) -> AsyncGenerator[admin_pb2.WatchLoadResponse]:
        stub = admin_pb2_grpc.GenerationAdminServiceStub(self._channel.for_stubs)
        request = admin_pb2.WatchLoadRequest(
            min_interval_seconds=self._config.load_interval_seconds, prefixes=self._config.prefix_reports
        )
        reports = stub.WatchLoad(request)
        try:
            async for response in reports:
                yield response
        finally:
            reports.cancel()

    def watch_health(self) -> AsyncGenerator[bool]:
        return watch_health(self._channel.for_stubs, GENERATION_NAME)

    def refusal(self, request: generation_pb2.GenerateRequest, *, resumes: bool) -> PenstockError | None:
        """Return None: a generation service judges its requests itself."""
        return None

    def lacks_call(self, method: str) -> PenstockError | None:
        """Return None: it has all of them."""
        return None

    async def close(self) -> None:
        """Do nothing: an ended session ends its requests."""
