"""Admin and model RPCs of the generation services, forwarded: by default clients can reach only the router.

The call's metadata `penstock-backend` names the backend: by its address, as in the router's log and metrics, or by its
name in --backend. With a single backend it may be left out. `--admin-token-file` decides who may call, and
`--model-token-file` for calls that open the model: see `token_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from penstock.common.config import is_loopback
from penstock.common.credentials import BearerTokens, TokenFile, TokenFiles
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    StartupError,
    Unavailable,
    from_rpc_error,
)
from penstock.common.request_context import BACKEND_KEY
from penstock.router.aio import is_cancelled
from penstock.router.backends.backend import Backend
from penstock.router.backends.link import backend_lost, is_broken
from penstock.router.config import RouterConfig
from penstock.serving.transport import Channel, ServerCall, StreamCall
from penstock.v1 import admin_pb2, admin_pb2_grpc, graphs_pb2, model_pb2, model_pb2_grpc

ADMIN_SERVICE, MODEL_SERVICE = "penstock.v1.GenerationAdminService", "penstock.v1.ModelService"
ROUTER_ADMIN_SERVICE = "penstock.v1.RouterAdminService"
_FLAG, _MODEL_FLAG = "--admin-token-file", "--model-token-file"
FACTS_METHOD = f"/{MODEL_SERVICE}/GetModelInfo"
# Methods that open the model: all of ModelService but the one that reports facts.
OPENING_METHODS = tuple(
    name
    for one in model_pb2.DESCRIPTOR.services_by_name["ModelService"].methods
    if (name := f"/{MODEL_SERVICE}/{one.name}") != FACTS_METHOD
)
# A serving.transport.ServerCall; generated code takes it for a grpc.aio.ServicerContext.
Context = Any


def token_files(config: RouterConfig) -> dict[str, BearerTokens]:
    """Read the tokens that the forwarded services accept in place of the usual ones. Raises StartupError."""
    files: dict[str, BearerTokens] = {}
    admins, usual, opening = (
        None if path is None else TokenFile(path, flag)
        for path, flag in (
            (config.admin_token_file, _FLAG),
            (config.auth_token_file, "--auth-token-file"),
            (config.model_token_file, _MODEL_FLAG),
        )
    )
    if admins is not None:
        files |= dict.fromkeys((ADMIN_SERVICE, MODEL_SERVICE, ROUTER_ADMIN_SERVICE), admins)
    if opening is not None:
        files |= dict.fromkeys(OPENING_METHODS, opening)
        # A caller that runs the model's graphs must know them.
        others = usual if admins is None and is_loopback(config.host) else admins
        if others is not None:
            files[FACTS_METHOD] = TokenFiles((others, opening))
        elif not is_loopback(config.host):
            files[FACTS_METHOD] = opening
    return files


class Forwarding:
    """Finds the backend of a call and makes the same call there."""

    def __init__(self, config: RouterConfig, backends: Callable[[], Sequence[Backend]]) -> None:
        """Make it. `backends` returns those that there are."""
        self._backends = backends
        # On a public address, tokens for text must not be enough to stop the service.
        self._is_allowed = bool(config.admin_token_file or config.keys_file) or is_loopback(config.host)
        self._may_open = bool(config.model_token_file or config.keys_file) or is_loopback(config.host)

    def backend_to_open(self, context: ServerCall) -> Backend:
        """Choose the backend of a call that opens the model. Raises FailedPrecondition, and as `backend_of`."""
        if not self._may_open:
            raise FailedPrecondition(
                f"the router listens on a public address: calls that open the model need its {_MODEL_FLAG}",
                reason="MODEL_ACCESS_OFF",
            )
        return self._choose(context)

    def backend_to_describe(self, context: ServerCall) -> Backend:
        """Choose the backend of a call that asks for facts about the model. Raises as `backend_of`."""
        return self._choose(context) if self._may_open else self.backend_of(context)

    def backend_of(self, context: ServerCall) -> Backend:
        """Choose the backend. Raises FailedPrecondition, NotFound, InvalidArgument naming the metadata, Unavailable."""
        self.require_admin()
        return self._choose(context)

    def require_admin(self) -> None:
        """Refuse operators' calls where anybody could make them. Raises FailedPrecondition."""
        if not self._is_allowed:
            raise FailedPrecondition(
                f"the router listens on a public address: admin and model calls need its {_FLAG}, or keys with the "
                "scope admin",
                reason="NO_ADMIN_TOKENS",
            )

    def _choose(self, context: ServerCall) -> Backend:
        known = {backend.key: backend for backend in self._backends()}
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
        """Find the only backend with a configured name."""
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
        """Make a call with a single answer, with the caller's deadline. Raises the backend's error."""
        return await self.call_at(self.backend_of(context), make_stub, method, request, context)

    async def open_call(self, method: str, request: Any, context: ServerCall) -> Any:
        """Make a ModelService call that opens the model. Raises the backend's error."""
        stub = model_pb2_grpc.ModelServiceStub
        return await self.call_at(self.backend_to_open(context), stub, method, request, context)

    @staticmethod
    async def call_at(
        backend: Backend,
        make_stub: Callable[[grpc.aio.Channel], Any],
        method: str,
        request: Any,
        context: ServerCall,
    ) -> Any:
        """Make the call at the chosen backend. Raises as `call`."""
        async with _reached(backend) as channel:
            return await _made(channel, make_stub, method, request, context)


async def _made(
    channel: Channel,
    make_stub: Callable[[grpc.aio.Channel], Any],
    method: str,
    request: Any,
    context: ServerCall,
) -> Any:
    call: Callable[..., Awaitable[Any]] = getattr(make_stub(channel.for_stubs), method)
    with _errors():
        return await call(request, timeout=context.time_remaining())


@contextlib.asynccontextmanager
async def _reached(backend: Backend, *, is_apart: bool = False) -> AsyncIterator[Channel]:
    """Open a channel to a backend; `is_apart`: one that outlives the loss of the backend's own connection."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            channel = await stack.enter_async_context(backend.link.open_channel() if is_apart else backend.link.reach())
        except StartupError:
            raise Unavailable("the router cannot read its credentials for the backend", reason="NO_BACKEND") from None
        yield channel


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise a backend's errors as PenstockErrors: its own, and Unavailable BACKEND_LOST if it was lost meanwhile."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        raise (backend_lost() if is_broken(error, failure) else failure) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        # This process closed its end of the connection.
        raise backend_lost() from None


def _names(backends: Mapping[str, Backend]) -> str:
    """List addresses, each with its configured name."""
    targets = {key: backend.where.target for key, backend in sorted(backends.items())}
    return ", ".join(key if target == key else f"{key} ({target})" for key, target in targets.items())


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
        async with _reached(self._forwarding.backend_of(context)) as channel:
            stub = admin_pb2_grpc.GenerationAdminServiceStub(channel.for_stubs)
            reports = stub.WatchLoad(request, timeout=context.time_remaining())
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

    async def CopyBlocks(self, request: admin_pb2.CopyBlocksRequest, context: Context) -> admin_pb2.CopyBlocksResponse:
        """Copy blocks of the backend's KV pool."""
        answer: admin_pb2.CopyBlocksResponse = await self._call("CopyBlocks", request, context)
        return answer

    async def SwapBlocks(self, request: admin_pb2.SwapBlocksRequest, context: Context) -> admin_pb2.SwapBlocksResponse:
        """Copy blocks between the backend's KV pool and its host pool."""
        answer: admin_pb2.SwapBlocksResponse = await self._call("SwapBlocks", request, context)
        return answer

    async def DumpState(self, request: admin_pb2.DumpStateRequest, context: Context) -> admin_pb2.DumpStateResponse:
        """Return the state of the backend's engine."""
        answer: admin_pb2.DumpStateResponse = await self._call("DumpState", request, context)
        return answer

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Stop the backend's admission; the router sends its requests elsewhere."""
        answer: admin_pb2.DrainResponse = await self._call("Drain", request, context)
        return answer

    async def Pause(self, request: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        """Hold the steps of the backend's engine; the router sends new requests elsewhere."""
        answer: admin_pb2.PauseResponse = await self._call("Pause", request, context)
        return answer

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        """Let the backend admit again, and step again."""
        answer: admin_pb2.ResumeResponse = await self._call("Resume", request, context)
        return answer

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Make the backend load an adapter; requests after the answer are sent there."""
        backend = self._forwarding.backend_of(context)
        stub = admin_pb2_grpc.GenerationAdminServiceStub
        answer: admin_pb2.LoadAdapterResponse = await self._forwarding.call_at(
            backend, stub, "LoadAdapter", request, context
        )
        backend.adapters.note_loaded(answer)
        return answer

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """Make the backend unload an adapter; requests after the answer are not sent there."""
        backend = self._forwarding.backend_of(context)
        stub = admin_pb2_grpc.GenerationAdminServiceStub
        answer: admin_pb2.UnloadAdapterResponse = await self._forwarding.call_at(
            backend, stub, "UnloadAdapter", request, context
        )
        backend.adapters.note_missing(request.name, answer.version)
        return answer

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        """Return the backend's adapters."""
        answer: admin_pb2.ListAdaptersResponse = await self._call("ListAdapters", request, context)
        return answer

    async def Reload(self, request: admin_pb2.ReloadRequest, context: Context) -> admin_pb2.ReloadResponse:
        """Make the backend read its weights again; meanwhile the router sends its requests elsewhere."""
        answer: admin_pb2.ReloadResponse = await self._call("Reload", request, context)
        return answer


class ForwardingModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ModelService of the backends."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.GetModelInfoResponse:
        """Return facts about the backend's model."""
        backend, stub = self._forwarding.backend_to_describe(context), model_pb2_grpc.ModelServiceStub
        answer: model_pb2.GetModelInfoResponse = await self._forwarding.call_at(
            backend, stub, "GetModelInfo", request, context
        )
        return answer

    async def UnloadModel(
        self, request: model_pb2.UnloadModelRequest, context: Context
    ) -> model_pb2.UnloadModelResponse:
        """Unload the backend's model; the router sends its requests elsewhere."""
        backend = self._forwarding.backend_to_open(context)
        # The model's end ends the session, and the session's end ends the router's own connection.
        async with _reached(backend, is_apart=True) as channel:
            stub = model_pb2_grpc.ModelServiceStub
            answer: model_pb2.UnloadModelResponse = await _made(channel, stub, "UnloadModel", request, context)
            return answer

    async def LoadModel(  # type: ignore[override]
        self, request_iterator: AsyncIterator[model_pb2.LoadModelRequest], context: Context
    ) -> None:
        """Load a model at the backend, which joins once it serves a model for the router's tokenizer."""
        await self._stream("LoadModel", model_pb2.LoadModelResponse.FromString, request_iterator, context)

    async def WriteWeights(  # type: ignore[override]
        self, request_iterator: AsyncIterator[model_pb2.WriteWeightsRequest], context: Context
    ) -> None:
        """Write new weights into the backend's model; other backends keep theirs."""
        await self._stream("WriteWeights", model_pb2.WriteWeightsResponse.FromString, request_iterator, context)

    async def Forward(  # type: ignore[override]
        self, request_iterator: AsyncIterator[graphs_pb2.ForwardRequest], context: Context
    ) -> None:
        """Run graphs of the backend's model."""
        await self._stream("Forward", graphs_pb2.ForwardResponse.FromString, request_iterator, context)

    async def _stream(
        self, method: str, parse: Callable[[bytes], Any], requests: AsyncIterator[Any], context: ServerCall
    ) -> None:
        """Forward the messages of a call, both ways."""
        async with _reached(self._forwarding.backend_to_open(context)) as channel:
            with _errors():
                call: StreamCall[Any] = await channel.open_stream(f"/{MODEL_SERVICE}/{method}", parse)
            await self._pass_on(requests, call, context)

    @staticmethod
    async def _pass_on(requests: AsyncIterator[Any], call: StreamCall[Any], context: ServerCall) -> None:
        sending = asyncio.create_task(_send_on(requests, call))
        # A caller's message that cannot be read ends the call, with that error.
        sending.add_done_callback(lambda task: call.cancel() if _failure_of(task) is not None else None)
        try:
            with _errors():
                while (message := await call.receive()) is not None:
                    await context.write(message)
        except PenstockError:
            if (failure := _failure_of(sending)) is not None:
                raise failure from None
            raise
        finally:
            sending.cancel()
            call.cancel()

    async def AllocateTensors(
        self, request: graphs_pb2.AllocateTensorsRequest, context: Context
    ) -> graphs_pb2.AllocateTensorsResponse:
        """Make tensors at the backend."""
        answer: graphs_pb2.AllocateTensorsResponse = await self._forwarding.open_call(
            "AllocateTensors", request, context
        )
        return answer

    async def ReadTensor(
        self, request: graphs_pb2.ReadTensorRequest, context: Context
    ) -> graphs_pb2.ReadTensorResponse:
        """Return elements of a tensor at the backend."""
        answer: graphs_pb2.ReadTensorResponse = await self._forwarding.open_call("ReadTensor", request, context)
        return answer

    async def WriteTensor(
        self, request: graphs_pb2.WriteTensorRequest, context: Context
    ) -> graphs_pb2.WriteTensorResponse:
        """Change elements of a tensor at the backend."""
        answer: graphs_pb2.WriteTensorResponse = await self._forwarding.open_call("WriteTensor", request, context)
        return answer

    async def FreeTensors(
        self, request: graphs_pb2.FreeTensorsRequest, context: Context
    ) -> graphs_pb2.FreeTensorsResponse:
        """Free tensors and sequences at the backend."""
        answer: graphs_pb2.FreeTensorsResponse = await self._forwarding.open_call("FreeTensors", request, context)
        return answer

    async def Sample(self, request: graphs_pb2.SampleRequest, context: Context) -> graphs_pb2.SampleResponse:
        """Draw tokens with the backend's sampler."""
        answer: graphs_pb2.SampleResponse = await self._forwarding.open_call("Sample", request, context)
        return answer


async def _send_on(requests: AsyncIterator[Any], call: StreamCall[Any]) -> None:
    """Send a caller's messages to the backend up to the last one, or until the call is over."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        async for request in requests:
            await call.write(request)
        await call.done_writing()


def _failure_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return the exception that a task ended with."""
    return task.exception() if task.done() and not task.cancelled() else None
