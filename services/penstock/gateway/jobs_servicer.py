"""JobsService: the batches of `/v1/batches` over gRPC, from the same store, for the same callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from penstock_client import AsyncClient

from penstock.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
)
from penstock.gateway.batch_order import USUAL_WINDOW, BatchOrder, checked_order
from penstock.gateway.callers import Callers
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import owner_of
from penstock.gateway.file_routes import PURPOSE, asking_jobs
from penstock.gateway.http_errors import HttpError
from penstock.gateway.jobs import Jobs
from penstock.gateway.jobs_messages import answer_messages, batch_message
from penstock.gateway.places import Places
from penstock.jobs.file_store import CHUNK_BYTES
from penstock.jobs.job_records import LIVE, FileRecord
from penstock.serving.transport import CheckedCall
from penstock.v1 import jobs_pb2, jobs_pb2_grpc

_FILE_NAME = "lines.jsonl"
_LISTED, _MOST_LISTED = 20, 100


@dataclass(frozen=True, slots=True)
class _Caller:
    """Scope of what a caller keeps, and its tenant at the router."""

    owner: str
    tenant: str
    client: AsyncClient


class JobsServicer(jobs_pb2_grpc.JobsServiceServicer):
    """Handlers of JobsService. They find out who calls before they read anything."""

    def __init__(self, config: GatewayConfig, jobs: Jobs, callers: Callers, places: Places) -> None:
        """Take the parts that HTTP's routes use, too."""
        self._config, self._jobs, self._callers, self._places = config, jobs, callers, places

    async def SubmitBatch(
        self, request_iterator: AsyncIterator[jobs_pb2.SubmitBatchRequest], context: Any
    ) -> jobs_pb2.SubmitBatchResponse:
        """Make a batch of lines that arrive, or of a file that is there."""
        async with self._admitted(context) as caller:
            await self._jobs.rights.require_scope(caller.tenant, caller.client)
            parts = _Parts(request_iterator, self._config.upload_seconds)
            first = await parts.next()
            if first is None or first.WhichOneof("part") != "batch":
                raise InvalidArgument("batch", "must be in the first message, and in no other")
            new = first.batch
            order = checked_order(
                self._config,
                caller.tenant,
                endpoint=new.endpoint,
                window=new.completion_window if new.HasField("completion_window") else USUAL_WINDOW,
                metadata=new.metadata,
            )
            key_digest = await self._jobs.rights.key_of_batch(caller.tenant, order.endpoint)
            if new.HasField("input_file_id"):
                if new.HasField("expires_after_seconds"):
                    raise InvalidArgument("expires_after_seconds", "must not be given with input_file_id")
                if await parts.next() is not None:
                    raise InvalidArgument("lines", "must not be sent with input_file_id")
                return await self._made(caller, new.input_file_id, order, key_digest)
            seconds = new.expires_after_seconds if new.HasField("expires_after_seconds") else None
            if seconds is not None and not seconds >= 1.0:
                raise InvalidArgument("expires_after_seconds", "must be 1 or more")
            with self._jobs.uploading(caller.owner):
                file = await self._jobs.files.begin(caller.owner)
                try:
                    await self._receive(parts, file)
                    file = await self._jobs.files.finish(file, name=_FILE_NAME, purpose=PURPOSE, seconds=seconds)
                except BaseException:
                    await asyncio.shield(self._jobs.files.abandon(file))
                    raise
            try:
                return await self._made(caller, file.file_id, order, key_digest)
            except BaseException:
                await asyncio.shield(self._delete_unused(file))
                raise

    async def _receive(self, parts: _Parts, file: FileRecord) -> None:
        """Write the lines to the store while they arrive."""
        place, held = 0, bytearray()
        while (part := await parts.next()) is not None:
            if part.WhichOneof("part") != "lines":
                raise InvalidArgument("batch", "must be in the first message, and in no other")
            held += part.lines
            while len(held) >= CHUNK_BYTES:
                await self._append(file, place, bytes(held[:CHUNK_BYTES]))
                del held[:CHUNK_BYTES]
                place += CHUNK_BYTES
        if held:
            await self._append(file, place, bytes(held))

    async def _append(self, file: FileRecord, place: int, data: bytes) -> None:
        try:
            await self._jobs.files.append(file, place, data)
        except ResourceExhausted as error:
            if error.reason != "FILE_TOO_LARGE":
                raise
            raise ResourceExhausted(error.message, reason=error.reason, field="lines") from None

    async def _delete_unused(self, file: FileRecord) -> None:
        """Delete the lines of a batch that was not made. A caller that left may have made it: then it reads them."""
        with contextlib.suppress(PenstockError):
            await self._jobs.files.delete(file.owner, file.file_id)

    async def _made(
        self, caller: _Caller, file_id: str, order: BatchOrder, key_digest: str
    ) -> jobs_pb2.SubmitBatchResponse:
        record = await self._jobs.batches.create(
            caller.owner,
            input_file=file_id,
            endpoint=order.endpoint,
            window=order.window,
            seconds=order.seconds,
            metadata=order.metadata,
            key_digest=key_digest,
        )
        self._jobs.runner.wake()
        return jobs_pb2.SubmitBatchResponse(batch=batch_message(record))

    async def GetBatch(self, request: jobs_pb2.GetBatchRequest, context: Any) -> jobs_pb2.GetBatchResponse:
        """Return a batch."""
        async with self._admitted(context) as caller:
            record = await self._jobs.batches.get(caller.owner, request.batch_id)
            return jobs_pb2.GetBatchResponse(batch=batch_message(record))

    async def ListBatches(self, request: jobs_pb2.ListBatchesRequest, context: Any) -> jobs_pb2.ListBatchesResponse:
        """Return a page of the caller's batches."""
        async with self._admitted(context) as caller:
            limit = request.limit if request.HasField("limit") else _LISTED
            if not 1 <= limit <= _MOST_LISTED:
                raise InvalidArgument("limit", f"must be from 1 to {_MOST_LISTED}")
            found, has_more = await self._jobs.batches.listed(caller.owner, after=request.after or None, limit=limit)
            return jobs_pb2.ListBatchesResponse(batches=[batch_message(one) for one in found], has_more=has_more)

    async def CancelBatch(self, request: jobs_pb2.CancelBatchRequest, context: Any) -> jobs_pb2.CancelBatchResponse:
        """Begin the end of a batch."""
        async with self._admitted(context) as caller:
            record = await self._jobs.batches.cancel(caller.owner, request.batch_id)
            self._jobs.runner.wake()
            return jobs_pb2.CancelBatchResponse(batch=batch_message(record))

    async def ReadAnswers(self, request: jobs_pb2.ReadAnswersRequest, context: Any) -> None:  # type: ignore[override]
        """Write the answers of a batch that has ended, as fast as they are read."""
        async with self._admitted(context) as caller:
            record = await self._jobs.batches.get(caller.owner, request.batch_id)
            if record.state in LIVE:
                raise FailedPrecondition(f"the batch has not ended: {record.state}", reason="BATCH_NOT_ENDED")
            number = request.after_line
            while answers := await self._jobs.batches.answers(record.batch_id, number):
                number = answers[-1].number
                for kept in answers:
                    for message in answer_messages(kept):
                        await self._write(context, message)

    async def _write(self, context: CheckedCall, message: jobs_pb2.ReadAnswersResponse) -> None:
        seconds = self._config.stalled_reader_seconds
        try:
            async with asyncio.timeout(seconds):
                await context.write(message)
        except TimeoutError:
            raise ResourceExhausted(
                f"nothing of the answers was read for {seconds:g} s (--stalled-reader-seconds)", reason="SLOW_READER"
            ) from None

    async def DeleteFile(self, request: jobs_pb2.DeleteFileRequest, context: Any) -> jobs_pb2.DeleteFileResponse:
        """Delete a file of the caller."""
        async with self._admitted(context) as caller:
            await self._jobs.files.delete(caller.owner, request.file_id)
            return jobs_pb2.DeleteFileResponse()

    @contextlib.asynccontextmanager
    async def _admitted(self, context: CheckedCall) -> AsyncIterator[_Caller]:
        """Find out who calls, and hold a place during the block. Raises PenstockError."""
        self._places.check_draining()
        shown = dict(context.invocation_metadata()).get("authorization")
        authorization = shown.encode() if isinstance(shown, str) else shown
        caller = await self._callers.admit(authorization)
        with _limits(), asking_jobs(), self._places.admitted(), self._places.entered(caller.tenant):
            context.vouch()
            yield _Caller(owner_of(authorization), caller.tenant, caller.client)


class _Parts:
    """Messages of a submission, which must all arrive within a time."""

    def __init__(self, messages: AsyncIterator[jobs_pb2.SubmitBatchRequest], seconds: float) -> None:
        self._messages, self._seconds = aiter(messages), seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def next(self) -> jobs_pb2.SubmitBatchRequest | None:
        """Return the next message; None at the end. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(self._end):
                return await anext(self._messages, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the lines did not arrive within {self._seconds:g} s (--upload-seconds)", reason="DEADLINE_EXCEEDED"
            ) from None


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Turn HTTP's refusals for limits into gRPC's."""
    try:
        yield
    except HttpError as error:
        raise ResourceExhausted(
            error.message, reason=error.reason, retry_after_seconds=error.retry_after_seconds
        ) from None
