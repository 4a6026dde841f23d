"""The asynchronous client of JobsService. `_sync_jobs.py` is made from this file: run tools/make_sync_client.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc
from penstock.v1 import jobs_pb2

from penstock_client._batches import (
    AnswerReader,
    BatchAnswer,
    BatchWait,
    SentRequests,
    file_requests,
    is_live,
    submit_requests,
)
from penstock_client._channel import AsyncChannel
from penstock_client._exceptions import PenstockError, stream_error
from penstock_client.config import ClientConfig


class AsyncJobsClient:
    """A connection to a gateway's JobsService (--jobs-port): batches of requests on idle capacity.

    One event loop may use it.
    """

    def __init__(self, address: str, config: ClientConfig | None = None, *, channel: Any = None) -> None:
        """Connect to `address`, host:port. Raises ValueError for a token in the clear.

        `channel`: one of gRPC's to use in place of a new one. Its owner closes it.
        """
        self.config = config or ClientConfig()
        self._metadata = self.config.metadata(address)
        self._channel = AsyncChannel(address, self.config, channel)
        self._stub = self._channel.jobs

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Batches go on."""
        await self._channel.close()

    async def submit_batch(
        self,
        lines: Iterable[bytes | str | Mapping[str, Any]],
        *,
        endpoint: str,
        completion_window: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expires_after: float | None = None,
        timeout: float | None = None,
    ) -> jobs_pb2.Batch:
        """Send lines and make a batch of them. A line is text, bytes, or a mapping with `custom_id`, `method`, `url`
        and `body`, as in OpenAI's files.

        `lines` is read as it is sent, and may have any length. `endpoint` is the lines' `url`. `expires_after`: seconds
        until the gateway removes the file of the lines. `timeout` in seconds is the time to send them, by default
        `timeouts.unary`. Raises what `lines` raises, and TypeError for a line that JSON has no form for; then there is
        no batch.
        """
        return await self._submit(submit_requests(lines, endpoint, completion_window, metadata, expires_after), timeout)

    async def submit_file(
        self,
        input_file_id: str,
        *,
        endpoint: str,
        completion_window: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> jobs_pb2.Batch:
        """Make a batch of a file that the gateway has, from /v1/files or an earlier batch. Raises NotFound."""
        return await self._submit(file_requests(input_file_id, endpoint, completion_window, metadata))

    async def get_batch(self, batch_id: str) -> jobs_pb2.Batch:
        """Return a batch as it is now. Raises NotFound."""
        response: jobs_pb2.GetBatchResponse = await self._call(
            self._stub.GetBatch, jobs_pb2.GetBatchRequest(batch_id=batch_id)
        )
        return response.batch

    async def list_batches(self, *, limit: int | None = None, after: str = "") -> list[jobs_pb2.Batch]:
        """Return a page of the caller's batches, the newest first. `after`: the last batch of the page before."""
        request = jobs_pb2.ListBatchesRequest(limit=limit, after=after)
        response: jobs_pb2.ListBatchesResponse = await self._call(self._stub.ListBatches, request)
        return list(response.batches)

    async def cancel_batch(self, batch_id: str) -> jobs_pb2.Batch:
        """Begin the end of a batch: what is answered so far is kept. Raises NotFound, and FailedPrecondition."""
        response: jobs_pb2.CancelBatchResponse = await self._call(
            self._stub.CancelBatch, jobs_pb2.CancelBatchRequest(batch_id=batch_id)
        )
        return response.batch

    async def wait_batch(
        self, batch_id: str, *, poll_seconds: float = 1.0, timeout: float | None = None
    ) -> jobs_pb2.Batch:
        """Return a batch once it has ended. A gateway that restarts meanwhile is asked again.

        Raises DeadlineExceeded, or Unavailable, after `timeout` seconds.
        """
        wait = BatchWait(poll_seconds, timeout)
        while True:
            try:
                batch = await self.get_batch(batch_id)
            except PenstockError as error:
                await asyncio.sleep(wait.pause(error))
                continue
            if not is_live(batch):
                return batch
            await asyncio.sleep(wait.pause())

    async def read_answers(self, batch_id: str, *, after_line: int = 0) -> AsyncIterator[BatchAnswer]:
        """Yield the answers of a batch that has ended, in the order of its lines.

        After an error a call with the last answer's `line` as `after_line` goes on. Raises FailedPrecondition
        BATCH_NOT_ENDED.
        """
        reader = AnswerReader()
        request = jobs_pb2.ReadAnswersRequest(batch_id=batch_id, after_line=after_line)
        call = self._stub.ReadAnswers(request, metadata=self._metadata_now())
        try:
            async for piece in call:
                if (answer := reader.feed(piece)) is not None:
                    yield answer
        except grpc.RpcError as error:
            raise stream_error(error, None, self._channel.through) from error
        finally:
            call.cancel()

    async def delete_file(self, file_id: str) -> None:
        """Delete a file of a batch: its lines, answers or errors. Raises NotFound, and FailedPrecondition."""
        await self._call(self._stub.DeleteFile, jobs_pb2.DeleteFileRequest(file_id=file_id))

    async def _submit(
        self, messages: Iterator[jobs_pb2.SubmitBatchRequest], timeout: float | None = None
    ) -> jobs_pb2.Batch:
        requests = SentRequests(messages)
        try:
            response: jobs_pb2.SubmitBatchResponse = await self._channel.answer(
                self._stub.SubmitBatch,
                requests,
                timeout=timeout or self.config.timeouts.unary,
                metadata=self._metadata_now(),
            )
        except BaseException as error:
            # gRPC cancels the call.
            requests.check()
            if isinstance(error, grpc.RpcError):
                raise stream_error(error, None, self._channel.through) from error
            raise
        return response.batch

    def _metadata_now(self) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, *self.config.call_metadata())

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return await method(request, timeout=self.config.timeouts.unary, metadata=self._metadata_now())
        except grpc.RpcError as error:
            raise stream_error(error, None, self._channel.through) from error
