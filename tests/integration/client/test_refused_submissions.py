"""A batch that a server refuses while its lines are sent: the caller has the server's status.

The core of grpc fails the message that is on its way then, and grpc.aio puts INTERNAL of its own in place of what the
server said.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from penstock.v1 import jobs_pb2, jobs_pb2_grpc
from penstock_client import AsyncJobsClient, JobsClient, Unauthenticated
from penstock_client._channel import AsyncChannel

URL = "/v1/completions"
LINES = [b"x" * (300 << 10)] * 8
TRIES = 10


class Refusing(jobs_pb2_grpc.JobsServiceServicer):
    """Refuses a batch before it reads any line."""

    def SubmitBatch(
        self, request_iterator: Iterator[jobs_pb2.SubmitBatchRequest], context: Any
    ) -> jobs_pb2.SubmitBatchResponse:
        next(request_iterator)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token")
        raise AssertionError


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    jobs_pb2_grpc.add_JobsServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


async def test_the_asynchronous_client_tells_the_servers_status(address: str) -> None:
    async with AsyncJobsClient(address) as client:
        for _ in range(TRIES):
            with pytest.raises(Unauthenticated, match="no such token"):
                await client.submit_batch(LINES, endpoint=URL)


def test_the_synchronous_client_does(address: str) -> None:
    with JobsClient(address) as client:
        for _ in range(TRIES):
            with pytest.raises(Unauthenticated, match="no such token"):
                client.submit_batch(LINES, endpoint=URL)


class Replaced:
    """A call of grpc.aio's that has `statuses` one after another, all before its caller goes on."""

    def __init__(self, *statuses: grpc.aio.AioRpcError) -> None:
        self._statuses = statuses
        self._now = statuses[0]

    def add_done_callback(self, callback: Any) -> None:
        for one in self._statuses:
            self._now = one
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self._now.code()

    async def details(self) -> str | None:
        return self._now.details()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return self._now.trailing_metadata()

    def __await__(self) -> Iterator[Any]:
        raise self._now
        yield


def status(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(("reason", "TOKEN")), details, "")


MADE_UP = status(grpc.StatusCode.INTERNAL, "Internal error from Core")
OWN = status(grpc.StatusCode.UNAUTHENTICATED, "no such token")


@pytest.mark.parametrize("statuses", [(OWN,), (OWN, MADE_UP), (MADE_UP, OWN)])
async def test_a_made_up_status_replaces_nothing(statuses: tuple[grpc.aio.AioRpcError, ...]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await AsyncChannel.answer(lambda messages: Replaced(*statuses), [])
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.details() == "no such token"
    assert caught.value.trailing_metadata() == grpc.aio.Metadata(("reason", "TOKEN"))
    # Only what was made up is replaced: another error keeps all that grpc tells of it.
    assert (caught.value is OWN) == (statuses[-1] is OWN)


async def test_a_made_up_status_is_told_where_there_is_no_other() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await AsyncChannel.answer(lambda messages: Replaced(MADE_UP), [])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
