"""JobsService: the batches of /v1/batches over gRPC, by both clients, with the same store and the same callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from penstock.common.errors import StartupError
from penstock.gateway.config import GatewayConfig
from penstock.v1 import jobs_pb2, jobs_pb2_grpc
from penstock_client import (
    AsyncJobsClient,
    ClientConfig,
    FailedPrecondition,
    InvalidArgument,
    JobsClient,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
)

pytestmark = pytest.mark.xdist_group("gateway")
URL = "/v1/completions"
SETTINGS: dict[str, Any] = {"job_poll_seconds": 0.05, "jobs_port": 0}
POLL_SECONDS = 0.02


def requests_of(count: int, url: str = URL, **body: Any) -> list[dict[str, Any]]:
    """Return `count` lines as mappings."""
    body = {"prompt": "Hello", "max_tokens": 4, **body}
    return [{"custom_id": f"id-{one}", "method": "POST", "url": url, "body": body} for one in range(1, count + 1)]


def client_of(gateway: Gateway, token: str | None = None) -> AsyncJobsClient:
    return AsyncJobsClient(gateway.app.jobs_address, ClientConfig(token=token))


async def ended(client: AsyncJobsClient, batch: jobs_pb2.Batch, status: str = "COMPLETED") -> jobs_pb2.Batch:
    """Wait for the end of a batch."""
    now = await client.wait_batch(batch.id, poll_seconds=POLL_SECONDS, timeout=60)
    assert now.status == jobs_pb2.BatchStatus.Value(f"BATCH_STATUS_{status}"), now
    return now


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[EmittingBackend, Gateway, AsyncJobsClient]]:
    """Run a gateway and a router before one scripted backend."""
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, **{**SETTINGS, **settings}) as gateway,
        client_of(gateway) as client,
    ):
        yield one, gateway, client


async def test_lines_go_up_and_their_answers_come_down() -> None:
    async with scripted() as (_, _gateway, client):
        lines = [*requests_of(3), {**requests_of(1, prompt=7)[0], "custom_id": "bad"}]
        batch = await client.submit_batch(lines, endpoint=URL, metadata={"mine": "yes"})
        assert (batch.endpoint, batch.completion_window, dict(batch.metadata)) == (URL, "24h", {"mine": "yes"})
        done = await ended(client, batch)
        assert (done.total_lines, done.completed_lines, done.failed_lines) == (4, 3, 1)
        assert done.created_at <= done.started_at <= done.ended_at < done.expires_at
        found = [answer async for answer in client.read_answers(batch.id)]
        assert [(one.line, one.custom_id, one.has_failed) for one in found] == [
            (1, "id-1", False),
            (2, "id-2", False),
            (3, "id-3", False),
            (4, "bad", True),
        ]
        assert all(one.body is not None for one in found)
        assert found[0].body is not None
        assert found[0].body["usage"]["completion_tokens"] == 4
        assert found[3].body is not None
        assert found[3].body["error"]["param"] == "prompt"
        assert [one.line async for one in client.read_answers(batch.id, after_line=2)] == [3, 4]


async def test_http_and_grpc_have_one_store() -> None:
    async with (
        scripted() as (_, gateway, _client),
        client_of(gateway, "mine") as client,
        client_of(gateway, "another") as other,
        openai.AsyncOpenAI(base_url=gateway.url, api_key="mine", max_retries=0) as http,
    ):
        batch = await client.submit_batch(requests_of(2), endpoint=URL)
        done = await ended(client, batch)
        seen = await http.batches.retrieve(batch.id)
        assert (seen.status, seen.output_file_id) == ("completed", done.output_file_id)
        content = (await http.files.content(done.output_file_id)).content
        answers = [answer.answer async for answer in client.read_answers(batch.id)]
        assert answers == [json.loads(line) for line in content.splitlines()]
        again = await client.submit_file(batch.input_file_id, endpoint=URL)
        await ended(client, again)
        assert [one.id for one in await client.list_batches()] == [again.id, batch.id]
        assert [one.id for one in await client.list_batches(limit=1, after=again.id)] == [batch.id]
        await client.delete_file(done.output_file_id)
        assert [answer async for answer in client.read_answers(batch.id)] == []
        with pytest.raises(NotFound):
            await client.delete_file(done.output_file_id)
        asked: list[Callable[[], Any]] = [
            lambda: other.get_batch(batch.id),
            lambda: other.cancel_batch(batch.id),
            lambda: anext(other.read_answers(batch.id)),
            lambda: other.delete_file(batch.input_file_id),
            lambda: other.submit_file(batch.input_file_id, endpoint=URL),
        ]
        for ask in asked:
            with pytest.raises(NotFound):
                await ask()
        assert await other.list_batches() == []


async def test_the_synchronous_client_does_the_same() -> None:
    async with scripted() as (_, gateway, _client):

        def use() -> list[str]:
            with JobsClient(gateway.app.jobs_address) as client:
                batch = client.submit_batch((json.dumps(one) for one in requests_of(3)), endpoint=URL)
                client.wait_batch(batch.id, poll_seconds=POLL_SECONDS, timeout=60)
                return [answer.custom_id for answer in client.read_answers(batch.id)]

        assert await asyncio.to_thread(use) == ["id-1", "id-2", "id-3"]


async def test_a_wrong_field_is_named() -> None:
    async with scripted() as (_, gateway, client):
        batch = await ended(client, await client.submit_batch(requests_of(1), endpoint=URL))
        cases: list[tuple[str, Callable[[], Any]]] = [
            ("endpoint", lambda: client.submit_batch(requests_of(1), endpoint="/v1/score")),
            ("completion_window", lambda: client.submit_batch([], endpoint=URL, completion_window="0s")),
            ("metadata.a", lambda: client.submit_batch([], endpoint=URL, metadata={"a": "x" * 600})),
            ("metadata", lambda: client.submit_batch([], endpoint=URL, metadata={str(one): "" for one in range(17)})),
            ("expires_after_seconds", lambda: client.submit_batch([], endpoint=URL, expires_after=0.5)),
            ("expires_after_seconds", lambda: client.submit_batch([], endpoint=URL, expires_after=float("nan"))),
            ("limit", lambda: client.list_batches(limit=101)),
            ("after", lambda: client.list_batches(after="x\0")),
        ]
        for field, ask in cases:
            with pytest.raises(InvalidArgument) as caught:
                await ask()
            assert caught.value.field == field
        new = jobs_pb2.NewBatch(endpoint=URL)
        lines = jobs_pb2.SubmitBatchRequest(lines=b"x")
        orders: list[tuple[str, list[jobs_pb2.SubmitBatchRequest]]] = [
            ("batch", []),
            ("batch", [lines]),
            ("batch", [jobs_pb2.SubmitBatchRequest(batch=new), jobs_pb2.SubmitBatchRequest(batch=new)]),
            ("batch", [jobs_pb2.SubmitBatchRequest(batch=new), jobs_pb2.SubmitBatchRequest()]),
            (
                "lines",
                [jobs_pb2.SubmitBatchRequest(batch=jobs_pb2.NewBatch(endpoint=URL, input_file_id="x")), lines],
            ),
        ]
        async with grpc.aio.insecure_channel(gateway.app.jobs_address) as channel:
            stub: Any = jobs_pb2_grpc.JobsServiceStub(channel)
            for field, order in orders:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.SubmitBatch(iter(order))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (refused.value.details() or "").startswith(f"{field}:")
        await until(lambda: gateway.metric("http_requests_in_flight") == 0)
        assert [one.id for one in await client.list_batches()] == [batch.id]


async def test_a_live_batch_is_cancelled_and_not_read() -> None:
    async with scripted(job_requests=2) as (one, _gateway, client):
        await one.allow(0)
        batch = await client.submit_batch(requests_of(5), endpoint=URL)
        await one.until(lambda: one.running == 2)
        with pytest.raises(FailedPrecondition) as early:
            await anext(client.read_answers(batch.id))
        assert early.value.reason == "BATCH_NOT_ENDED"
        assert (await client.cancel_batch(batch.id)).status == jobs_pb2.BATCH_STATUS_CANCELLING
        await ended(client, batch, "CANCELLED")
        found = [answer async for answer in client.read_answers(batch.id)]
        assert [answer.answer["error"]["code"] for answer in found] == ["batch_cancelled"] * 5
        assert {answer.body for answer in found} == {None}
        with pytest.raises(FailedPrecondition) as late:
            await client.cancel_batch(batch.id)
        assert late.value.reason == "BATCH_ENDED"


async def test_what_is_wrong_with_lines_is_told() -> None:
    async with scripted() as (_, _gateway, client):
        batch = await client.submit_batch([*requests_of(1), "{"], endpoint=URL)
        done = await ended(client, batch, "FAILED")
        assert [(one.line, one.code) for one in done.problems] == [(2, "invalid_json_line")]


async def test_lines_that_are_refused_leave_nothing() -> None:
    async with scripted(max_file_bytes=300_000, max_batches=1, files_share=1.0) as (one, gateway, client):
        with pytest.raises(ResourceExhausted) as caught:
            await client.submit_batch([b"x" * 200_000] * 3, endpoint=URL)
        assert (caught.value.reason, caught.value.field) == ("FILE_TOO_LARGE", "lines")
        await one.allow(0)
        batch = await client.submit_batch(requests_of(1), endpoint=URL)
        with pytest.raises(ResourceExhausted) as full:
            await client.submit_batch(requests_of(1), endpoint=URL)
        assert full.value.reason == "BATCHES_FULL"
        await until(lambda: gateway.metric("kept_files") == 1)
        await one.allow(None)
        await ended(client, batch)


async def test_a_caller_that_leaves_in_the_middle_of_its_lines_leaves_nothing() -> None:
    async with scripted() as (_, gateway, client):
        more = asyncio.Event()

        async def parts() -> AsyncIterator[jobs_pb2.SubmitBatchRequest]:
            yield jobs_pb2.SubmitBatchRequest(batch=jobs_pb2.NewBatch(endpoint=URL))
            yield jobs_pb2.SubmitBatchRequest(lines=b"x" * 300_000)
            await more.wait()

        async with grpc.aio.insecure_channel(gateway.app.jobs_address) as channel:
            stub: Any = jobs_pb2_grpc.JobsServiceStub(channel)
            call = stub.SubmitBatch(parts())
            await until(lambda: gateway.metric("kept_files") == 1)
            call.cancel()
            await until(lambda: gateway.metric("kept_files") == 0)
        assert await client.list_batches() == []


async def test_an_error_of_the_lines_themselves_is_the_callers() -> None:
    def lines() -> Iterable[dict[str, Any]]:
        yield from requests_of(1)
        raise LookupError("no more of them")

    def send_all(address: str) -> None:
        with JobsClient(address) as client:
            client.submit_batch(lines(), endpoint=URL)

    async with scripted() as (_, gateway, client):
        with pytest.raises(LookupError, match="no more of them"):
            await client.submit_batch(lines(), endpoint=URL)
        with pytest.raises(LookupError, match="no more of them"):
            await asyncio.to_thread(send_all, gateway.app.jobs_address)
        assert await client.list_batches() == []


async def test_a_token_that_was_never_seen_sends_large_lines_and_a_wrong_one_nothing(tmp_path: Path) -> None:
    tokens, own = tmp_path / "tokens", tmp_path / "own"
    tokens.write_text("alice\njobs\n")
    own.write_text("jobs\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address, job_token_file=str(own), **SETTINGS) as gateway,
        client_of(gateway, "alice") as alice,
        client_of(gateway, "stranger") as stranger,
        client_of(gateway) as nobody,
    ):
        facts = {str(number): "é" * 512 for number in range(16)}
        lines = requests_of(3, prompt="Hello " * 100)
        lines += [{**lines[0], "custom_id": "x" * 500 + str(number)} for number in range(100)]
        for client in (stranger, nobody):
            with pytest.raises(Unauthenticated):
                await client.submit_batch(lines, endpoint=URL, metadata=facts)
            with pytest.raises(Unauthenticated):
                await client.list_batches()
        batch = await alice.submit_batch(lines, endpoint=URL, metadata=facts)
        assert dict(batch.metadata) == facts
        assert (await ended(alice, batch)).completed_lines == 103


async def test_a_router_with_tokens_needs_one_for_lines(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address, **SETTINGS) as gateway,
        client_of(gateway, "alice") as alice,
    ):
        with pytest.raises(FailedPrecondition) as caught:
            await alice.submit_batch(requests_of(1), endpoint=URL)
        assert caught.value.reason == "NO_JOB_TOKEN"


async def test_calls_have_the_gateways_places() -> None:
    async with scripted(max_requests=1) as (_, gateway, client):
        more = asyncio.Event()

        async def parts() -> AsyncIterator[jobs_pb2.SubmitBatchRequest]:
            yield jobs_pb2.SubmitBatchRequest(batch=jobs_pb2.NewBatch(endpoint=URL))
            await more.wait()

        async with grpc.aio.insecure_channel(gateway.app.jobs_address) as channel:
            stub: Any = jobs_pb2_grpc.JobsServiceStub(channel)
            call = stub.SubmitBatch(parts())
            await until(lambda: gateway.metric("http_requests_in_flight") == 1)
            with pytest.raises(ResourceExhausted) as caught:
                await client.list_batches()
            assert caught.value.reason in ("MAX_REQUESTS", "TOO_MANY_RPCS")
            call.cancel()
            await until(lambda: gateway.metric("http_requests_in_flight") == 0)


async def test_lines_that_do_not_come_in_time_end_the_call() -> None:
    async with scripted(upload_seconds=1.0) as (_, gateway, client):

        async def parts() -> AsyncIterator[jobs_pb2.SubmitBatchRequest]:
            yield jobs_pb2.SubmitBatchRequest(batch=jobs_pb2.NewBatch(endpoint=URL))
            await asyncio.Event().wait()

        async with grpc.aio.insecure_channel(gateway.app.jobs_address) as channel:
            stub: Any = jobs_pb2_grpc.JobsServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.SubmitBatch(parts())
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await client.list_batches() == []


async def test_the_port_has_health_and_reflection() -> None:
    async with (
        scripted() as (_, gateway, client),
        grpc.aio.insecure_channel(gateway.app.jobs_address) as channel,
    ):
        await client.list_batches()
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="penstock.v1.JobsService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        (told,) = [one async for one in reflection.ServerReflectionInfo(iter(asked))]
        assert "penstock.v1.JobsService" in {one.name for one in told.list_services_response.service}
        labels = {"grpc_service": "penstock.v1.JobsService", "grpc_method": "ListBatches"}
        sample = gateway.registry.get_sample_value(
            "grpc_server_handled_total", {**labels, "grpc_type": "unary", "grpc_code": "OK"}
        )
        assert sample == 1


def test_a_port_without_a_store_is_refused_at_the_start() -> None:
    with pytest.raises(StartupError) as caught:
        GatewayConfig(jobs_port=0, job_store="off").validate()
    assert caught.value.flag == "--jobs-port"


def numbers_of(answers: Iterable[Any]) -> list[int]:
    return [answer.line for answer in answers]


async def test_a_batch_goes_on_where_the_gateway_was_killed(tmp_path: Path) -> None:
    """Each line has one answer, and those that were answered before are not asked again."""
    port = stack.free_port()

    def start(router: str) -> stack.Process:
        flags = ("--router", router, "--job-store", str(tmp_path / "jobs"), "--jobs-port", str(port))
        return stack.start("gateway", *flags, "--job-requests", "2", "--job-poll-seconds", "0.05")

    count = 9
    async with (
        backend() as one,
        running_router(one) as router,
        AsyncJobsClient(f"127.0.0.1:{port}") as client,
    ):
        await one.allow(4 * 4)
        process = start(router.server.address)
        try:
            await asyncio.to_thread(stack.wait_serving, f"127.0.0.1:{port}", process)
            batch = await client.submit_batch(requests_of(count), endpoint=URL)
            await one.until(lambda: one.allowance == 0)
            process.kill()
            process = start(router.server.address)
            await one.allow(None)
            done = await client.wait_batch(batch.id, poll_seconds=POLL_SECONDS, timeout=60)
            assert done.completed_lines == count
            assert numbers_of([answer async for answer in client.read_answers(batch.id)]) == [*range(1, count + 1)]
            assert len(one.submitted) < 2 * count
        finally:
            process.kill()


async def test_errors_are_the_clients_own() -> None:
    async with scripted() as (_, _gateway, client):
        with pytest.raises(PenstockError) as caught:
            await client.get_batch("")
        assert caught.value.reason == "BATCH_NOT_FOUND"
