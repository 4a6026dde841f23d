"""Responses in the background by OpenAI's client: polled, read again, cancelled, ended with their gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router, until
from factories.servers.shared_store import needs_shared_store, shared_store
from openai.types.responses import Response
from penstock.common.errors import InvalidArgument
from penstock.gateway.endpoint import owner_of
from penstock.gateway.response_store import StoredResponse
from penstock.gateway.sqlite_responses import SqliteResponses

ASKED: dict[str, Any] = {"model": "", "input": "Hello", "background": True}
TOKENS = 12


def client_of(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url, api_key="mine", max_retries=0, timeout=60)


@asynccontextmanager
async def serving(
    allowance: int | None = None, tokens: int = TOKENS, **settings: Any
) -> AsyncIterator[tuple[EmittingBackend, Gateway, openai.AsyncOpenAI]]:
    """Run a gateway before a model that may take so many steps; None: any number."""
    async with (
        backend(allowance=allowance, script=count_up(tokens)) as one,
        # A token an event, however late the loop is: a test counts the bytes of events.
        running_router(one, max_gather_seconds=0.0) as router,
        running_gateway(router.server.address, **settings) as gateway,
        client_of(gateway) as client,
    ):
        yield one, gateway, client


async def polled(client: openai.AsyncOpenAI, response: Response, *statuses: str) -> Response:
    """Poll a response until it has one of these statuses."""
    async with asyncio.timeout(60):
        while response.status not in statuses:
            await asyncio.sleep(0.005)  # as a client polls
            response = await client.responses.retrieve(response.id)
    return response


async def test_a_response_is_polled_from_queued_to_completed() -> None:
    async with serving(allowance=0) as (one, gateway, client):
        waited = client.responses.create(model="", input="Hello")
        made = await client.responses.create(**ASKED)
        assert (made.status, made.background, made.output, made.usage) == ("queued", True, [], None)
        await one.allow(2)
        begun = await polled(client, made, "in_progress")
        assert begun.created_at == made.created_at
        assert gateway.metric("background_responses_in_flight") == 1
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**ASKED, previous_response_id=made.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_ready", "previous_response_id")
        await one.allow(None)
        done = await polled(client, made, "completed")
        assert done.output_text == (await waited).output_text != ""
        assert gateway.metric("background_responses_in_flight") == 0
        assert gateway.metric("background_responses_total", status="completed") == 1
        assert (await client.responses.create(model="", input="More", previous_response_id=made.id)).output_text
        # It has ended: nothing is left to cancel.
        assert await client.responses.cancel(made.id) == done


async def test_a_cancelled_response_keeps_what_there_was_and_frees_the_backend() -> None:
    async with serving(allowance=3) as (one, _, client):
        made = await client.responses.create(**ASKED)
        await one.until(lambda: one.allowance == 0)
        await polled(client, made, "in_progress")
        gone = await client.responses.cancel(made.id)
        assert gone.status == "cancelled"
        await one.until(lambda: not one.running)
        assert await client.responses.cancel(made.id) == gone == await client.responses.retrieve(made.id)


async def test_only_a_response_of_the_background_can_be_cancelled() -> None:
    async with serving() as (_, _, client):
        made = await client.responses.create(model="", input="Hello")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.cancel(made.id)
        assert caught.value.code == "not_in_background"
        with pytest.raises(openai.NotFoundError):
            await client.with_options(api_key="another").responses.cancel(made.id)


async def test_events_are_read_again_from_any_of_them() -> None:
    async with serving(allowance=4) as (one, _, client):
        stream = await client.responses.create(**ASKED, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        # Its reader left; it goes on.
        response: Any = seen[0]
        await one.allow(None)
        later = [
            event
            async for event in await client.responses.retrieve(
                response.response.id, stream=True, starting_after=seen[-1].sequence_number
            )
        ]
        whole = [event async for event in await client.responses.retrieve(response.response.id, stream=True)]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert whole[: len(seen)] == seen
        assert whole[len(seen) :] == later
        last: Any = whole[-1]
        assert last.type == "response.completed"
        assert last.response == await client.responses.retrieve(response.response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(response.response.id, stream=True, starting_after=len(whole))
        assert caught.value.param == "starting_after"
        plain = await client.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(plain.id, stream=True)
        assert caught.value.code == "events_not_kept"
        await polled(client, plain, "completed")


async def test_a_refused_prompt_ends_as_failed_with_its_reason_in_polls_and_in_the_stream() -> None:
    async with serving() as (one, gateway, client):
        one.refuse = InvalidArgument("prompt", "is not for today")
        made = await polled(client, await client.responses.create(**ASKED), "failed")
        assert made.error is not None
        assert (made.error.code, "not for today" in made.error.message) == ("invalid_prompt", True)
        events: list[Any] = [event async for event in await client.responses.create(**ASKED, stream=True)]
        assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        assert gateway.metric("background_responses_total", status="failed") == 2


async def test_bounds_are_kept() -> None:
    bounds: dict[str, Any] = {"max_background": 2, "tenant_share": 1.0, "background_event_bytes": 1 << 16}
    async with serving(allowance=0, tokens=1000, **bounds) as (one, _, client):
        made = [await client.responses.create(**ASKED) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="--max-background"):
            await client.responses.create(**ASKED)
        # A deleted one ends, and gives its place back.
        await client.responses.delete(made[0].id)
        await one.allow(None)
        await polled(client, made[1], "completed")
        with pytest.raises(openai.APIError, match="--background-event-bytes"):
            _ = [event async for event in await client.responses.create(**ASKED, stream=True)]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**ASKED, store=False)
        assert caught.value.param == "store"


async def test_the_body_of_a_request_counts_until_its_response_ends() -> None:
    bounds: dict[str, Any] = {"max_body_bytes": 1 << 16, "max_bodies_bytes": 100_000, "tenant_share": 1.0}
    async with serving(allowance=0, **bounds) as (one, gateway, client):
        # Records of another server's tools are kept, and no part of the prompt.
        record = {"type": "mcp_call", "id": "mcp_1", "output": "x" * 60_000}
        asked = {**ASKED, "input": [record, {"role": "user", "content": "Hello"}]}
        made = await client.responses.create(**asked)
        assert gateway.metric("http_body_bytes") > 60_000
        with pytest.raises(openai.RateLimitError, match="--max-bodies-bytes"):
            await client.responses.create(**asked)
        await one.allow(None)
        await polled(client, made, "completed")
        await until(lambda: not gateway.metric("http_body_bytes"))
        assert (await polled(client, await client.responses.create(**asked), "completed")).output


async def test_one_token_leaves_places_to_others() -> None:
    async with serving(allowance=0, max_background=4) as (_, gateway, client):
        for _number in range(3):
            await client.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="--tenant-share of --max-background"):
            await client.responses.create(**ASKED)
        await client.with_options(api_key="another").responses.create(**ASKED)
        assert gateway.metric("background_responses_in_flight") == 4


async def test_a_gateway_that_stops_ends_its_responses_as_failed(tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    async with backend(allowance=2, script=count_up(TOKENS)) as one, running_router(one) as router:
        async with (
            running_gateway(router.server.address, response_store=place) as gateway,
            client_of(gateway) as client,
        ):
            made = await client.responses.create(**ASKED)
            await one.until(lambda: one.allowance == 0)
        async with (
            running_gateway(router.server.address, response_store=place) as gateway,
            client_of(gateway) as client,
        ):
            found = await client.responses.retrieve(made.id)
            assert found.error is not None
            assert (found.status, "stopped" in found.error.message) == ("failed", True)


async def test_a_response_that_nobody_makes_any_more_has_failed(tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    row = {"id": "resp_1", "status": "in_progress", "background": True, "previous_response_id": None, "output": []}
    kept = SqliteResponses(place, max_responses=9, max_bytes=1 << 20, seconds=60.0)
    # As kill -9 leaves it.
    await kept.put(owner_of(b"Bearer mine"), StoredResponse(row, []), None)
    await kept.close()
    async with serving(response_store=place) as (_, _, client):
        found = await client.responses.retrieve("resp_1")
        assert found.error is not None
        assert (found.status, "ended before it was done" in found.error.message) == ("failed", True)
        assert await client.responses.cancel("resp_1") == found


@needs_shared_store
async def test_any_gateway_of_a_shared_store_polls_and_cancels(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"background_sign_seconds": 0.6}
    with shared_store(tmp_path) as server:
        async with (
            backend(allowance=2, script=count_up(TOKENS)) as one,
            running_router(one) as router,
            running_gateway(router.server.address, response_store=server.url, **settings) as right,
            client_of(right) as there,
        ):
            async with (
                running_gateway(router.server.address, response_store=server.url, **settings) as left,
                client_of(left) as here,
            ):
                first, second = [await here.responses.create(**ASKED) for _ in range(2)]
                await polled(there, first, "in_progress")
                assert (await there.responses.cancel(first.id)).status == "cancelled"
                assert (await there.responses.retrieve(second.id)).status in ("queued", "in_progress")
                background = left.app._background
                assert background is not None
                # It is gone without a word, as by kill -9: its sign of life runs out.
                for run in background._runs.values():
                    run.caller = "nobody"
            lost = await polled(there, second, "failed")
            assert lost.error is not None
            assert "ended before it was done" in lost.error.message
