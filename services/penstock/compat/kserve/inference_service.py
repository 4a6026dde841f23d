"""KServe's inference.GRPCInferenceService: an adapter in front of Generate's path.

Admission, tokens, deadlines, retries and statuses are Generate's. A message is parsed and handed to `TextFlow`, and
the output of that becomes tensors.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from penstock import __version__
from penstock.common.errors import InvalidArgument, NotFound, PenstockError
from penstock.common.request_context import current_request_id, new_request_id
from penstock.compat.kserve import infer_message
from penstock.http2.metadata import Metadata
from penstock.inference import kserve_pb2, kserve_pb2_grpc
from penstock.router.frontend.reach import choose_for, reach
from penstock.router.frontend.route_table import RouteTable
from penstock.router.frontend.routed_model import RoutedModel
from penstock.router.frontend.stream_writer import GENERATE
from penstock.router.keys.api_key import KeyScope
from penstock.router.metrics import RouterMetrics
from penstock.serving.transport import ServerCall
from penstock.v1 import generation_pb2, text_pb2

KSERVE_SERVICE = "inference.GRPCInferenceService"
# Scopes that calls need of a key; any valid key may make the others.
KSERVE_SCOPES = {f"/{KSERVE_SERVICE}/{method}": KeyScope.GENERATE for method in ("ModelInfer", "ModelStreamInfer")}
# Triton's metadata that asks for a stream's first error as its status.
GRPC_ERROR_KEY = "triton_grpc_error"
# Fields of Generate -> KServe's names for them.
_FIELDS = {"model": "model_name", "prompt": "inputs.text_input"}


class KserveServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Handlers of GRPCInferenceService."""

    def __init__(self, table: RouteTable, metrics: RouterMetrics, max_stream_requests: int) -> None:
        """Make it. `max_stream_requests`: requests of one stream at once; the next is read when one has ended."""
        self._table = table
        self._metrics = metrics
        self._max_stream_requests = max_stream_requests

    async def ServerLive(self, request: kserve_pb2.ServerLiveRequest, context: Any) -> kserve_pb2.ServerLiveResponse:
        """Report that the process answers."""
        return kserve_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: kserve_pb2.ServerReadyRequest, context: Any) -> kserve_pb2.ServerReadyResponse:
        """Report that the tokenizer and a backend are ready."""
        return kserve_pb2.ServerReadyResponse(ready=self._table.is_ready)

    async def ModelReady(self, request: kserve_pb2.ModelReadyRequest, context: Any) -> kserve_pb2.ModelReadyResponse:
        """Report that a backend has the model or adapter. Raises NotFound."""
        route, model, adapter = self._find(request.name, request.version, context)
        return kserve_pb2.ModelReadyResponse(ready=route.takes_requests_of(model, adapter))

    async def ServerMetadata(
        self, request: kserve_pb2.ServerMetadataRequest, context: Any
    ) -> kserve_pb2.ServerMetadataResponse:
        """Report name and version."""
        return kserve_pb2.ServerMetadataResponse(
            name=infer_message.PLATFORM, version=__version__, extensions=["parameters", "model_configuration"]
        )

    async def ModelMetadata(
        self, request: kserve_pb2.ModelMetadataRequest, context: Any
    ) -> kserve_pb2.ModelMetadataResponse:
        """Describe the tensors of a model. Raises NotFound."""
        _, model, adapter = self._find(request.name, request.version, context)
        return infer_message.model_metadata(adapter or model)

    async def ModelConfig(self, request: kserve_pb2.ModelConfigRequest, context: Any) -> kserve_pb2.ModelConfigResponse:
        """Describe them as Triton does. Raises NotFound."""
        _, model, adapter = self._find(request.name, request.version, context)
        return infer_message.model_config(adapter or model)

    async def ModelInfer(  # type: ignore[override]
        self, request: kserve_pb2.ModelInferRequest, context: ServerCall
    ) -> kserve_pb2.ModelInferResponse:
        """Answer one text whole."""
        asked = infer_message.infer_request(request)
        if asked.streams:
            raise InvalidArgument(
                f"parameters.{infer_message.STREAM}", "is for ModelStreamInfer: ModelInfer has one response"
            )
        return await self._answer(asked, context)

    async def ModelStreamInfer(  # type: ignore[override]
        self, request_iterator: AsyncIterator[kserve_pb2.ModelInferRequest], context: ServerCall
    ) -> None:
        """Answer requests as they come, several at once; a failed one does not affect the others."""
        await _InferStream(self._answer, context, self._max_stream_requests).run(request_iterator)

    async def _answer(
        self,
        asked: infer_message.InferRequest,
        context: ServerCall,
        write: Callable[[kserve_pb2.ModelInferResponse], Awaitable[None]] | None = None,
        abort: Callable[..., Awaitable[Any]] | None = None,
    ) -> kserve_pb2.ModelInferResponse:
        """Return the last response, or the only one; those before it go to `write`. Raises PenstockError."""
        call = _TextCall(context, asked, write, abort or context.abort)
        try:
            route = await reach(self._table, GENERATE.name, asked.request, call, self._metrics)
            await route.flow.run(asked.request, GENERATE, call)
        except (InvalidArgument, NotFound) as error:
            raise _renamed(error) from None
        return call.last_response()

    def _find(self, name: str, version: str, context: ServerCall) -> tuple[RoutedModel, str, str]:
        """Return the route, the model and the adapter of this name; empty for the only model served."""
        infer_message.check_version("version", version)
        asked = text_pb2.GenerateTextRequest(model=name)
        try:
            route = choose_for(self._table, asked, context)
            return route, *route.pool.choose_model(asked.model)
        except (InvalidArgument, NotFound) as error:
            raise _renamed(error, {"model": "name"}) from None


def _renamed(error: PenstockError, names: dict[str, str] = _FIELDS) -> PenstockError:
    """Return the error with KServe's name of the field."""
    field = names.get(error.field or "")
    if field is None:
        return error
    if isinstance(error, InvalidArgument):
        return InvalidArgument(field, error.description, reason=error.reason)
    text = error.message.removeprefix(f"{error.field}: ")
    return type(error)(f"{field}: {text}", reason=error.reason, field=field, metadata=error.metadata)


class _TextCall:
    """A ServerCall for Generate that turns its messages into tensors. The call itself is the KServe client's."""

    # Every message is converted before it is written.
    writes_at_once = False

    def __init__(
        self,
        call: ServerCall,
        asked: infer_message.InferRequest,
        write: Callable[[kserve_pb2.ModelInferResponse], Awaitable[None]] | None,
        abort: Callable[..., Awaitable[Any]],
    ) -> None:
        self._call = call
        self._abort = abort
        self._asked = asked
        self._write = write if asked.streams else None
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._finished: generation_pb2.Finished | None = None

    def last_response(self) -> kserve_pb2.ModelInferResponse:
        """Return the response for Finished, which ends every successful answer."""
        assert self._finished is not None
        texts = ["".join(self._texts[result.index]) for result in self._finished.sequences]
        return infer_message.final_response(self._asked, texts, self._finished)

    async def write(self, message: text_pb2.GenerateTextResponse) -> None:
        """Take a message from Generate."""
        if message.HasField("finished"):
            self._finished = message.finished
        elif not message.HasField("delta"):
            return
        elif self._write is not None:
            await self._write(infer_message.delta_response(self._asked, message.delta))
        else:
            self._texts[message.delta.index].append(message.delta.text)

    def try_write(self, message: Any) -> bool:
        """Refuse: see `writes_at_once`."""
        return False

    def invocation_metadata(self) -> Metadata:
        """Return the client's metadata."""
        return self._call.invocation_metadata()

    def time_remaining(self) -> float | None:
        """Return the seconds to the call's deadline."""
        return self._call.time_remaining()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Set the call's status."""
        self._call.set_trailing_metadata(metadata)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the call is over."""
        self._call.when_over(callback)

    def code(self) -> grpc.StatusCode:
        """Return the call's status."""
        return self._call.code()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call."""
        await self._abort(code, details, trailing_metadata)
        raise grpc.aio.AbortError


class _InferStream:
    """One ModelStreamInfer; lives in its handler."""

    def __init__(
        self,
        answer: Callable[..., Awaitable[kserve_pb2.ModelInferResponse]],
        context: ServerCall,
        max_requests: int,
    ) -> None:
        self._answer = answer
        self._context = context
        self._places = asyncio.Semaphore(max_requests)
        self._writing = asyncio.Lock()
        metadata = context.invocation_metadata() or ()
        self._ends_by_status = any(key == GRPC_ERROR_KEY and str(value).lower() == "true" for key, value in metadata)
        self._handler = asyncio.current_task()
        self._has_failed = False
        self._is_ending = False

    async def run(self, requests: AsyncIterator[kserve_pb2.ModelInferRequest]) -> None:
        """Serve until the client has sent its last request and all are answered. Raises PenstockError."""
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await self._places.acquire()
                    group.create_task(self._serve(request))
                    # The first request has the call's own id; a task has a copy of the context.
                    current_request_id.set(new_request_id())
        except* Exception as errors:
            # One error ends the call, and the handler's caller can map it, even one for bytes that are not a message.
            failed = errors
        else:
            return
        raise _first(failed)

    async def _serve(self, request: kserve_pb2.ModelInferRequest) -> None:
        try:
            asked = infer_message.infer_request(request)
            response = await self._answer(asked, self._context, self._write, self._abort)
            await self._write(response)
        except PenstockError as error:
            if self._ends_by_status:
                self._has_failed = True
                raise
            message = f"{error.code.name}: {error.message} [{error.reason}]"
            await self._send(infer_message.failed_response(request, message))
        except asyncio.CancelledError:
            # Generate cut off a reader that takes nothing: the whole call is over, not this request alone.
            if self._handler is not None and not self._handler.cancelling() and not self._has_failed:
                self._handler.cancel()
            raise
        finally:
            self._places.release()

    async def _write(self, response: kserve_pb2.ModelInferResponse) -> None:
        await self._send(kserve_pb2.ModelStreamInferResponse(infer_response=response))

    async def _abort(self, *status: Any) -> None:
        """End the call, once: several requests may try, and gRPC treats a second time as an error."""
        if not self._is_ending:
            self._is_ending = True
            await self._context.abort(*status)

    async def _send(self, message: kserve_pb2.ModelStreamInferResponse) -> None:
        async with self._writing:
            await self._context.write(message)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
