"""Connection to one backend's process, whatever protocol it speaks: the seam between the router and engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from penstock.common.errors import PenstockError
from penstock.serving.transport import StreamCall
from penstock.v1 import admin_pb2, generation_pb2, model_pb2


class BackendCalls(Protocol):
    """Calls with a single answer, as GenerationService's stub has them. They raise grpc.aio.AioRpcError, and
    PenstockError for what the backend lacks."""

    @property
    def Score(self) -> Callable[..., Awaitable[generation_pb2.ScoreResponse]]:
        """Make a Score."""

    @property
    def Embed(self) -> Callable[..., Awaitable[generation_pb2.EmbedResponse]]:
        """Make an Embed."""

    @property
    def DetectWatermark(self) -> Callable[..., Awaitable[generation_pb2.DetectWatermarkResponse]]:
        """Make a DetectWatermark."""


class BackendConnection(Protocol):
    """Connection to one backend's process; each channel has one of its own. Belongs to one event loop.

    Every method raises grpc.aio.AioRpcError when the backend does not answer.
    """

    @property
    def keeps_salts(self) -> bool:
        """True where requests of another cache_salt share no cached blocks."""

    @property
    def calls(self) -> BackendCalls:
        """Calls with a single answer."""

    async def until_serving(self, on_starting: Callable[[], object]) -> bool:
        """Return True once it serves; False when its health ends. `on_starting`: it is there and does not serve yet."""

    async def model_info(self) -> model_pb2.GetModelInfoResponse:
        """Return the facts of its model. Raises StartupError for files of the model that cannot be read."""

    async def open_session(self) -> StreamCall[generation_pb2.SessionResponse]:
        """Open a session: a stream of requests in, and of their events out."""

    def watch_loads(self) -> AsyncGenerator[admin_pb2.WatchLoadResponse]:
        """Yield reports of its load, and of its cached prefixes where it tells them."""

    def watch_health(self) -> AsyncGenerator[bool]:
        """Yield True while it serves, else False, now and at every change."""

    def refusal(self, request: generation_pb2.GenerateRequest, *, resumes: bool) -> PenstockError | None:
        """Return the error of a request that it cannot do; None for any that it may do. `resumes`: it would go on after
        tokens of another backend."""

    def lacks_call(self, method: str) -> PenstockError | None:
        """Return the error of a call with a single answer (`Score`) that it does not have; None where it does."""

    async def close(self) -> None:
        """Send what has to be sent before the channel closes. It takes a second at most, and raises nothing."""
