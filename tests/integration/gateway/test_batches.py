"""/v1/files and /v1/batches by OpenAI's own client: every line is answered once, whatever happens between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.postgres import needs_postgres, running_postgres
from factories.servers.router import backend, running_router, until
from factories.servers.served import Served
from openai.types import Batch
from penstock.common.errors import ResourceExhausted, Unavailable
from penstock.common.idle_only import IDLE_TENANT
from penstock.jobs.job_records import ENDPOINTS
from penstock.v1 import generation_pb2

pytest.importorskip("python_multipart")
pytestmark = pytest.mark.xdist_group("gateway")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}
URL = "/v1/completions"
POLL: dict[str, Any] = {"job_poll_seconds": 0.05}
# Between two looks at a batch: whoever asks without a pause takes the time from its lines.
PAUSE_SECONDS = 0.02


def jsonl(requests: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def lines_of(count: int, url: str = URL, **body: Any) -> bytes:
    """Return a file of `count` requests."""
    return jsonl(
        {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": {**BODIES[url], **body}}
        for number in range(count)
    )


def client_of(gateway: Gateway, key: str = "mine") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=60)


async def submitted(client: openai.AsyncOpenAI, data: bytes, url: Any = URL, **facts: Any) -> Batch:
    """Upload a file, and make a batch of it."""
    file = await client.files.create(file=("lines.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **facts)


async def polled(client: openai.AsyncOpenAI, batch: Batch, is_there: Callable[[Batch], bool]) -> Batch:
    """Poll a batch, as its callers do, until it is so."""
    while not is_there(now := await client.batches.retrieve(batch.id)):  # noqa: ASYNC110
        await asyncio.sleep(PAUSE_SECONDS)
    return now


async def ended(client: openai.AsyncOpenAI, batch: Batch, status: str = "completed") -> Batch:
    """Poll a batch until it has ended."""
    now = await polled(client, batch, lambda now: now.status not in ("validating", "in_progress", "cancelling"))
    assert now.status == status, now
    return now


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file of answers by their custom_id; each is there once."""
    assert file_id is not None
    found = [json.loads(line) for line in (await client.files.content(file_id)).content.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[EmittingBackend, Gateway, openai.AsyncOpenAI]]:
    """Run a gateway and a router before one scripted backend."""
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, **{**POLL, **settings}) as gateway,
        client_of(gateway) as client,
    ):
        yield one, gateway, client


@pytest.mark.parametrize("url", BODIES)
async def test_a_file_of_requests_becomes_a_file_of_answers(url: str) -> None:
    async with scripted() as (one, gateway, client):
        batch = await submitted(client, lines_of(5, url), url, metadata={"mine": "yes"})
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", url, {"mine": "yes"})
        done = await ended(client, batch)
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 5, "completed": 5, "failed": 0}
        assert done.error_file_id is None
        found = await answers(client, done.output_file_id)
        assert sorted(found) == [f"id-{number}" for number in range(5)]
        await client.post(url.removeprefix("/v1"), body=BODIES[url], cast_to=object)
        for answer in found.values():
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            assert answer["response"]["body"]["usage"]["total_tokens"] > 4
        assert {request.fair_share_key for request in one.submitted[:5]} == {IDLE_TENANT}
        assert one.submitted[-1].fair_share_key != IDLE_TENANT
        assert gateway.metric("batch_lines_total", outcome="completed") == 5


async def test_files_are_created_read_listed_and_deleted() -> None:
    async with scripted() as (_, _gateway, client):
        data = lines_of(4000, echo=False)
        assert len(data) > 300_000
        file = await client.files.create(file=("a.jsonl", data), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.object) == (len(data), "a.jsonl", "batch", "file")
        assert (await client.files.content(file.id)).content == data
        assert await client.files.retrieve(file.id) == file
        other = await client.files.create(
            file=("b", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert other.expires_at == other.created_at + 3600
        assert [one.id async for one in client.files.list(limit=1)] == [other.id, file.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError) as caught:
            await client.files.retrieve(file.id)
        assert caught.value.code == "file_not_found"
        assert [one.id async for one in client.files.list(purpose="batch", order="asc")] == [other.id]


async def test_an_upload_that_is_refused_leaves_nothing() -> None:
    async with scripted(max_file_bytes=1024) as (_, _gateway, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.files.create(file=("a", b"x" * 2000), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        assert refused.value.param == "purpose"
        with pytest.raises(openai.BadRequestError):
            await client.post("/files", body={"file": "x"}, cast_to=object)
        assert [one async for one in client.files.list()] == []


async def test_bad_lines_end_a_batch_before_one_runs() -> None:
    async with scripted() as (one, _, client):
        good = json.loads(lines_of(1))
        data = jsonl([good, {**good, "url": "/v1/embeddings"}, good]) + b"{\n"
        done = await ended(client, await submitted(client, data), "failed")
        assert done.errors is not None
        assert [(error.line, error.code) for error in done.errors.data or ()] == [
            (2, "mismatched_url"),
            (4, "invalid_json_line"),
            (3, "duplicate_custom_id"),
        ]
        assert one.submitted == []
        empty = await ended(client, await submitted(client, b"\n\n"), "failed")
        assert empty.errors is not None
        assert [error.code for error in empty.errors.data or ()] == ["empty_file"]


async def test_a_line_that_its_endpoint_refuses_is_in_the_error_file() -> None:
    async with scripted() as (_, _gateway, client):
        bad = {"custom_id": "bad", "method": "POST", "url": URL, "body": {"prompt": 7}}
        done = await ended(client, await submitted(client, lines_of(2) + jsonl([bad])))
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
        (found,) = (await answers(client, done.error_file_id)).values()
        assert found["custom_id"] == "bad"
        assert found["response"]["status_code"] == 400
        assert found["response"]["body"]["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("facts", "param"),
    [
        ({"endpoint": "/v1/score"}, "endpoint"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a": 7}}, "metadata.a"),
        ({"input_file_id": 7}, "input_file_id"),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(facts: dict[str, Any], param: str) -> None:
    async with scripted() as (_, _gateway, client):
        file = await client.files.create(file=("a", lines_of(1)), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h", **facts}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/batches", body=asked, cast_to=object)
        assert caught.value.param == param


async def test_callers_see_their_own_alone() -> None:
    async with scripted() as (_, gateway, client), client_of(gateway, "another") as other:
        batch = await submitted(client, lines_of(1))
        done = await ended(client, batch)
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(done.output_file_id or ""),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ]
        for ask in asked:
            with pytest.raises(openai.NotFoundError):
                await ask()
        assert [one async for one in other.batches.list()] == []
        assert [one.id async for one in client.batches.list()] == [batch.id]


async def test_a_cancelled_batch_gives_up_its_lines_at_the_backend() -> None:
    async with scripted(job_requests=4) as (one, _gateway, client):
        await one.allow(0)
        batch = await submitted(client, lines_of(9))
        await one.until(lambda: one.running == 4)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        await one.until(lambda: one.running == 0)
        done = await ended(client, batch, "cancelled")
        assert done.cancelled_at is not None
        found = await answers(client, done.error_file_id)
        assert {answer["error"]["code"] for answer in found.values()} == {"batch_cancelled"}
        assert len(found) == 9
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.cancel(batch.id)
        assert caught.value.code == "batch_ended"


async def test_a_line_that_finds_no_room_is_sent_again() -> None:
    async with scripted(job_requests=4) as (one, _gateway, client):
        refusals = iter(range(3))

        def refuse(_: object) -> Unavailable | None:
            return None if next(refusals, None) is None else Unavailable("later", reason="NO_MODEL")

        one.refuse = refuse
        done = await ended(client, await submitted(client, lines_of(6)))
        assert len(await answers(client, done.output_file_id)) == 6
        assert done.request_counts is not None
        assert done.request_counts.failed == 0


async def test_a_line_that_is_never_taken_holds_up_no_other_and_no_other_caller() -> None:
    async with scripted(job_requests=2) as (one, gateway, client), client_of(gateway, "another") as other:

        def refuse(request: generation_pb2.GenerateRequest) -> ResourceExhausted | None:
            is_away = request.config.max_new_tokens == 5
            return ResourceExhausted("later", reason="QUEUE_FULL") if is_away else None

        one.refuse = refuse
        away = jsonl(
            {"custom_id": f"away-{number}", "method": "POST", "url": URL, "body": {"prompt": "x", "max_tokens": 5}}
            for number in range(2)
        )
        stuck = await submitted(client, away + lines_of(3))
        await ended(other, await submitted(other, lines_of(3)))
        now = await polled(client, stuck, lambda now: now.request_counts.completed == 3)  # type: ignore[union-attr]
        assert now.status == "in_progress"


async def test_another_gateway_goes_on_where_one_ended(tmp_path: Path) -> None:
    folder = str(tmp_path / "jobs")
    async with backend() as one, running_router(one) as router:
        async with running_gateway(router.server.address, job_store=folder, job_requests=2, **POLL) as gateway:
            client = client_of(gateway)
            await one.allow(8)
            batch = await submitted(client, lines_of(7))
            await one.until(lambda: one.allowance == 0)
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            await client.close()
        await one.allow(None)
        async with (
            running_gateway(router.server.address, job_store=folder, **POLL) as gateway,
            client_of(gateway) as client,
        ):
            done = await ended(client, batch)
            assert len(await answers(client, done.output_file_id)) == 7
            # Those that the first one answered are not asked again.
            assert len(one.submitted) < 2 * 7


async def test_a_batch_expires_and_keeps_its_answers() -> None:
    async with scripted(job_requests=1) as (one, _, client):
        await one.allow(4)
        file = await client.files.create(file=("a", lines_of(3)), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": URL, "completion_window": "1s"}
        batch = await client.post("/batches", body=asked, cast_to=Batch)
        done = await ended(client, batch, "expired")
        assert len(await answers(client, done.output_file_id)) == 1
        found = await answers(client, done.error_file_id)
        assert {answer["error"]["code"] for answer in found.values()} == {"batch_expired"}


async def test_without_a_store_the_paths_say_so() -> None:
    async with scripted(job_store="off") as (_, _gateway, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.retrieve("x")
        assert caught.value.code == "job_store_off"


async def test_a_router_with_tokens_needs_one_for_lines(tmp_path: Path) -> None:
    tokens, own = tmp_path / "tokens", tmp_path / "own"
    tokens.write_text("alice\njobs\n")
    own.write_text("jobs\n")
    async with backend() as one, running_router(one, auth_token_file=str(tokens)) as router:
        address = router.server.address
        async with running_gateway(address, **POLL) as gateway, client_of(gateway, "alice") as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await submitted(client, lines_of(1))
            assert caught.value.code == "no_job_token"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="stranger").files.list()
        async with (
            running_gateway(address, job_token_file=str(own), **POLL) as gateway,
            client_of(gateway, "alice") as client,
        ):
            done = await ended(client, await submitted(client, lines_of(2)))
            assert len(await answers(client, done.output_file_id)) == 2


def shown(url: str, body: dict[str, Any]) -> Any:
    """Return the content of an endpoint's answer, without ids and times."""
    if url == "/v1/embeddings":
        return [one["embedding"] for one in body["data"]]
    if url == "/v1/responses":
        return [part["text"] for item in body["output"] for part in item["content"]]
    return [one.get("text") or one["message"]["content"] for one in body["choices"]]


@pytest.mark.parametrize("url", ENDPOINTS)
def test_answers_of_a_real_model_are_those_of_the_endpoint_itself(served: Served, url: str) -> None:
    body = {"input": "Hello"} if url == "/v1/embeddings" else {**BODIES[url], "temperature": 0}
    data = jsonl({"custom_id": str(one), "method": "POST", "url": url, "body": body} for one in range(3))
    file = served.client.files.create(file=("a", data), purpose="batch")
    batch = served.client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while (done := served.client.batches.retrieve(batch.id)).status in ("validating", "in_progress"):
        time.sleep(PAUSE_SECONDS)
    assert done.status == "completed"
    found = [json.loads(line) for line in served.client.files.content(done.output_file_id or "").content.splitlines()]
    alone = shown(url, served.json(url, body))
    assert alone
    assert [shown(url, one["response"]["body"]) for one in found] == [alone] * 3


@needs_postgres
async def test_gateways_share_a_database_and_outlive_its_restart() -> None:
    with running_postgres() as server:
        shared: dict[str, Any] = {"job_store": server.database(), "job_requests": 2, "job_lease_seconds": 1.0, **POLL}
        async with (
            backend() as one,
            running_router(one) as router,
            running_gateway(router.server.address, **shared) as left,
            running_gateway(router.server.address, **shared) as right,
            client_of(left) as here,
            client_of(right) as there,
        ):
            await one.allow(0)
            batch = await submitted(here, lines_of(9))
            # Both take lines.
            await one.until(lambda: one.running == 4)
            server.disconnect_all()
            await one.allow(None)
            status = ""
            while status != "completed":
                await asyncio.sleep(PAUSE_SECONDS)
                with contextlib.suppress(openai.InternalServerError):
                    status = (await there.batches.retrieve(batch.id)).status
            done = await there.batches.retrieve(batch.id)
            assert len(await answers(there, done.output_file_id)) == 9
            assert (await here.files.content(done.input_file_id)).content == lines_of(9)


async def test_a_caller_that_leaves_in_the_middle_of_a_file_leaves_nothing() -> None:
    async with scripted() as (_, gateway, client):
        head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        _, writer = await asyncio.open_connection(*gateway.host_port)
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            b"content-length: 9000000\r\n\r\n" + head + b"y" * 600_000
        )
        await until(lambda: gateway.metric("kept_files") == 1)
        writer.close()
        await until(lambda: gateway.metric("kept_files") == 0)
        assert gateway.metric("kept_file_bytes") == 0
        assert [one async for one in client.files.list()] == []


async def test_uploads_have_places_and_a_time() -> None:
    async with scripted(max_uploads=1, upload_seconds=1.0) as (_, gateway, client):
        reader, writer = await asyncio.open_connection(*gateway.host_port)
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            b"content-length: 9000\r\n\r\n--x\r\n"
        )
        await until(lambda: gateway.metric("http_requests_in_flight") == 1)
        with pytest.raises(openai.RateLimitError):
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert b"408" in await reader.readline()
        writer.close()
        await client.files.create(file=("a", b"x"), purpose="batch")


async def test_one_caller_leaves_others_a_place_for_uploads() -> None:
    async with scripted(max_uploads=2) as (_, gateway, client), client_of(gateway, "another") as other:
        _, writer = await asyncio.open_connection(*gateway.host_port)
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            b"authorization: Bearer mine\r\ncontent-length: 9000\r\n\r\n--x\r\n"
        )
        await until(lambda: gateway.metric("http_requests_in_flight") == 1)
        with pytest.raises(openai.RateLimitError, match="--files-share of --max-uploads"):
            await client.files.create(file=("a", b"x"), purpose="batch")
        await other.files.create(file=("a", b"x"), purpose="batch")
        writer.close()


async def test_a_name_that_no_database_holds_is_the_callers_mistake() -> None:
    async with scripted() as (_, _gateway, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.get("/files?purpose=a%00", cast_to=object)
        assert caught.value.param == "purpose"
        with pytest.raises(openai.NotFoundError):
            await client.get("/files/%00", cast_to=object)
