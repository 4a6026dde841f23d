"""Admin and model RPCs of the generation services, forwarded: in the default deployment only the router is in reach.

The backend is named by the call's metadata `penstock-backend`: its address, as in the router's log and metrics, or the
name of --backend that it came from. It need not be named when there is one. Who may call is for `--admin-token-file`:
see `token_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc

from penstock.common.config import is_loopback
from penstock.common.credentials import TokenFile
from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, from_rpc_error
from penstock.router.aio import is_cancelled
from penstock.router.backends.backend import Backend, backend_lost, is_broken
from penstock.router.backends.pool import BackendPool
from penstock.router.config import BACKEND_KEY, RouterConfig
from penstock.serving.transport import ServerCall
from penstock.v1 import admin_pb2, admin_pb2_grpc, model_pb2, model_pb2_grpc

ADMIN_SERVICE, MODEL_SERVICE = "penstock.v1.GenerationAdminService", "penstock.v1.ModelService"
_FLAG = "--admin-token-file"
# A serving.transport.ServerCall; generated code takes it for a grpc.aio.ServicerContext.
Context = Any


def token_files(config: RouterConfig) -> Mapping[str, TokenFile]:
    """Read the tokens that the forwarded services take in place of the usual ones. Raises StartupError."""
    if config.admin_token_file is None:
        return {}
    tokens = TokenFile(config.admin_token_file, _FLAG)
    return dict.fromkeys((ADMIN_SERVICE, MODEL_SERVICE), tokens)


class Forwarding:
    """Finds the backend of a call and makes the same call there."""

    def __init__(self, config: RouterConfig, pool: BackendPool) -> None:
        self._pool = pool
        # Tokens for text must not do for a stop of the service where everybody can reach it.
        self._is_allowed = config.admin_token_file is not None or is_loopback(config.host)

    def backend_of(self, context: ServerCall) -> Backend:
        """Choose the backend. Raises FailedPrecondition, NotFound, InvalidArgument naming the metadata, Unavailable."""
        if not self._is_allowed:
            raise FailedPrecondition(
                f"the router listens on a public address: admin and model calls need its {_FLAG}",
                reason="NO_ADMIN_TOKENS",
            )
        known = {backend.key: backend for backend in self._pool.backends}
        named = dict(context.invocation_metadata() or ()).get(BACKEND_KEY)
        if isinstance(named, str) and named:
            return known.get(named) or self._named(named, known)
        if len(known) > 1:
            raise InvalidArgument(f"metadata {BACKEND_KEY}", f"must name one of several backends: {_names(known)}")
        if not known:
            raise Unavailable("no backend is known", reason="NO_BACKEND")
        return next(iter(known.values()))

    @staticmethod
    def _named(name: str, known: Mapping[str, Backend]) -> Backend:
        """Find the only backend of a configured name."""
        found = {key: backend for key, backend in known.items() if backend.where.target == name}
        if len(found) > 1:
            raise InvalidArgument(f"metadata {BACKEND_KEY}", f"is the name of several backends: {_names(found)}")
        if not found:
            raise NotFound(
                f"metadata {BACKEND_KEY}: no backend has this address or name; there are: {_names(known)}",
                reason="BACKEND_NOT_FOUND",
            )
        return next(iter(found.values()))

    async def call(
        self, make_stub: Callable[[grpc.aio.Channel], Any], method: str, request: Any, context: ServerCall
    ) -> Any:
        """Make the call with a single answer, with the caller's deadline. Raises the backend's error."""
        backend = self.backend_of(context)
        call: Callable[..., Awaitable[Any]] = getattr(make_stub(_channel(backend)), method)
        with _errors():
            return await call(request, timeout=context.time_remaining())


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise a backend's errors as ours: its own, and Unavailable BACKEND_LOST when it was lost meanwhile."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        raise (backend_lost() if is_broken(error, failure) else failure) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        # Our own end of the connection was closed.
        raise backend_lost() from None


def _names(backends: Mapping[str, Backend]) -> str:
    """List addresses, each with the configured name that it came from."""
    targets = {key: backend.where.target for key, backend in sorted(backends.items())}
    return ", ".join(key if target == key else f"{key} ({target})" for key, target in targets.items())


def _channel(backend: Backend) -> grpc.aio.Channel:
    if backend.channel is None:
        raise Unavailable("the backend is not connected", reason="NO_BACKEND")
    return backend.channel.for_stubs


class ForwardingAdminServicer(admin_pb2_grpc.GenerationAdminServiceServicer):
    """GenerationAdminService of the backends."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding

    async def _call(self, method: str, request: Any, context: Context) -> Any:
        return await self._forwarding.call(admin_pb2_grpc.GenerationAdminServiceStub, method, request, context)

    async def GetLoad(self, request: admin_pb2.GetLoadRequest, context: Context) -> admin_pb2.GetLoadResponse:
        """Return the backend's load."""
        answer: admin_pb2.GetLoadResponse = await self._call("GetLoad", request, context)
        return answer

    async def WatchLoad(self, request: admin_pb2.WatchLoadRequest, context: Context) -> None:  # type: ignore[override]
        """Send the backend's load at once, then on change."""
        channel = _channel(self._forwarding.backend_of(context))
        reports = admin_pb2_grpc.GenerationAdminServiceStub(channel).WatchLoad(
            request, timeout=context.time_remaining()
        )
        try:
            with _errors():
                async for report in reports:
                    await context.write(report)
        finally:
            reports.cancel()

    async def WarmUp(self, request: admin_pb2.WarmUpRequest, context: Context) -> admin_pb2.WarmUpResponse:
        """Run the backend's model once."""
        answer: admin_pb2.WarmUpResponse = await self._call("WarmUp", request, context)
        return answer

    async def ClearCache(self, request: admin_pb2.ClearCacheRequest, context: Context) -> admin_pb2.ClearCacheResponse:
        """Make the backend forget its reusable prefixes."""
        answer: admin_pb2.ClearCacheResponse = await self._call("ClearCache", request, context)
        return answer

    async def GetPoolStats(
        self, request: admin_pb2.GetPoolStatsRequest, context: Context
    ) -> admin_pb2.GetPoolStatsResponse:
        """Return totals of the backend's KV pool."""
        answer: admin_pb2.GetPoolStatsResponse = await self._call("GetPoolStats", request, context)
        return answer

    async def DumpState(self, request: admin_pb2.DumpStateRequest, context: Context) -> admin_pb2.DumpStateResponse:
        """Return the state of the backend's engine."""
        answer: admin_pb2.DumpStateResponse = await self._call("DumpState", request, context)
        return answer

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Stop the backend's admission; the router sends its requests elsewhere."""
        answer: admin_pb2.DrainResponse = await self._call("Drain", request, context)
        return answer

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        """Let the backend admit again."""
        answer: admin_pb2.ResumeResponse = await self._call("Resume", request, context)
        return answer


class ForwardingModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ModelService of the backends."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.GetModelInfoResponse:
        """Return the facts of the backend's model."""
        stub = model_pb2_grpc.ModelServiceStub
        answer: model_pb2.GetModelInfoResponse = await self._forwarding.call(stub, "GetModelInfo", request, context)
        return answer
