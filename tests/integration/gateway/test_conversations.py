"""/v1/conversations by OpenAI's own client: items that are kept, and turns that are added to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router
from factories.servers.shared_store import needs_shared_store, shared_store

HELLO: Any = [{"type": "message", "role": "user", "content": "Hello"}]


def client_of(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url, api_key="mine", max_retries=0, timeout=60)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[EmittingBackend, openai.AsyncOpenAI]]:
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, **settings) as gateway,
        client_of(gateway) as client,
    ):
        yield one, client


async def test_a_conversation_is_made_read_changed_and_deleted() -> None:
    async with serving() as (_, client):
        made = await client.conversations.create(metadata={"a": "b"}, items=HELLO)
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        assert await client.conversations.retrieve(made.id) == made
        changed = await client.conversations.update(made.id, metadata={"c": "d"})
        assert (changed.metadata, changed.created_at) == ({"c": "d"}, made.created_at)
        other = client.with_options(api_key="another")
        with pytest.raises(openai.NotFoundError):
            await other.conversations.retrieve(made.id)
        assert (await client.conversations.delete(made.id)).deleted
        for call in (
            client.conversations.retrieve(made.id),
            client.conversations.update(made.id, metadata={}),
            client.conversations.delete(made.id),
            client.conversations.items.list(made.id),
            client.conversations.items.create(made.id, items=HELLO),
            client.responses.create(model="", input="x", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert caught.value.code == "conversation_not_found"


async def test_items_are_added_listed_read_and_deleted() -> None:
    async with serving() as (_, client):
        made = await client.conversations.create()
        given: Any = [{"role": "user", "content": text} for text in "abc"]
        added = await client.conversations.items.create(made.id, items=given)
        texts = [item.content[0].text for item in added.data]  # type: ignore[union-attr]
        assert texts == ["a", "b", "c"]
        listed = [item async for item in client.conversations.items.list(made.id, limit=2)]
        assert listed == added.data[::-1]
        page = await client.conversations.items.list(made.id, order="asc", after=added.data[0].id or "", limit=1)
        assert (page.data, page.has_more) == (added.data[1:2], True)
        one = added.data[1].id or ""
        assert await client.conversations.items.retrieve(one, conversation_id=made.id) == added.data[1]
        assert (await client.conversations.items.delete(one, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError) as caught:
            await client.conversations.items.retrieve(one, conversation_id=made.id)
        assert caught.value.code == "conversation_item_not_found"
        # Sent back with its id, as clients do.
        again = await client.conversations.items.create(made.id, items=[added.data[0].model_dump()])  # type: ignore[list-item]
        assert again.data[0].id != added.data[0].id


async def prompt(one: EmittingBackend) -> list[int]:
    return list(one.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize("way", ["whole", "streamed", "background"])
async def test_a_turn_builds_on_the_conversation_and_is_added_to_it(way: str) -> None:
    async with serving() as (one, client):
        kept = await client.conversations.create(items=[{"role": "system", "content": "Be brief.", "type": "message"}])

        async def turn(text: str) -> str:
            asked: dict[str, Any] = {"model": "", "input": text, "conversation": kept.id}
            if way == "whole":
                made = await client.responses.create(**asked)
            else:
                stream = await client.responses.create(**asked, stream=True, background=way == "background")
                made = [event async for event in stream][-1].response  # type: ignore[union-attr]
            assert made.conversation is not None
            assert made.conversation.id == kept.id
            return str(made.output_text)

        first = await turn("Hello")
        second = await turn("And then?")
        in_turn = await prompt(one)
        items = [item async for item in client.conversations.items.list(kept.id, order="asc")]
        texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
        assert texts == ["Be brief.", "Hello", first, "And then?", second]
        sent: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"},
        ]
        await client.responses.create(model="", input=sent)
        assert await prompt(one) == in_turn


async def test_a_conversation_that_is_deleted_meanwhile_is_told_in_the_answer() -> None:
    async with serving() as (one, client):
        kept = await client.conversations.create()
        await one.allow(0)
        stream = await client.responses.create(model="", input="Hello", conversation=kept.id, background=True)
        await client.conversations.delete(kept.id)
        await one.allow(None)
        while (made := await client.responses.retrieve(stream.id)).status in ("queued", "in_progress"):
            await one.until(lambda: not one.running)
        told: Any = made.model_extra
        assert any("deleted meanwhile" in warning for warning in told["penstock"]["warnings"])


REFUSED: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "no list": ("/conversations", {"items": "Hello"}, "items", 400),
    "too many": ("/conversations", {"items": HELLO * 21}, "items", 400),
    "metadata": ("/conversations", {"metadata": {"a": 1}}, "metadata.a", 400),
    "an item that is none": ("/conversations", {"items": [{"type": "song"}]}, "items[0].type", 400),
    "a role": ("/conversations", {"items": [{"role": "x", "content": "a"}]}, "items[0].role", 400),
    "an image": (
        "/conversations",
        {"items": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "items[0].content[0]",
        400,
    ),
    "both": ("/responses", {"input": "x", "conversation": "a", "previous_response_id": "b"}, "conversation", 400),
    "no id": ("/responses", {"input": "x", "conversation": {}}, "conversation.id", 400),
    "compaction": (
        "/responses",
        {"input": "x", "context_management": [{"type": "compaction"}]},
        "context_management",
        400,
    ),
    "tools of a server": ("/responses", {"input": "x", "tools": [{"type": "mcp"}]}, "tools[0].type", 400),
    "compact": ("/responses/compact", {"input": "x"}, None, 400),  # type: ignore[dict-item]
}


async def test_faults_name_the_field() -> None:
    async with serving() as (_, client):
        for path, body, param, status in REFUSED.values():
            with pytest.raises(openai.APIStatusError) as caught:
                await client.post(path, body=body, cast_to=object)
            error: Any = caught.value
            assert (error.status_code, error.param) == (status, param)


async def test_bounds_of_all_and_of_one_caller_are_kept() -> None:
    async with serving(max_conversations=4, max_body_bytes=4096) as (_, client):
        first = await client.conversations.create()
        last = await client.conversations.create()
        # 4 for all, and half of that for each of several callers, which only a router with tokens tells apart.
        with pytest.raises(openai.RateLimitError) as caught:
            await client.conversations.create()
        assert caught.value.code == "conversations_full"
        other = client.with_options(api_key="another")
        for _ in range(2):
            await other.conversations.create()
        third = client.with_options(api_key="a third")
        await client.conversations.update(first.id, metadata={"still": "used"})
        await third.conversations.create()
        assert await client.conversations.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(last.id)
        text: Any = [{"role": "user", "content": "x" * 1500}]
        await client.conversations.items.create(first.id, items=text)
        await client.conversations.items.create(first.id, items=text)
        with pytest.raises(openai.APIStatusError) as refused:
            await client.conversations.items.create(first.id, items=text)
        assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


@needs_shared_store
async def test_gateways_share_conversations_through_a_store(tmp_path: Path) -> None:
    with shared_store(tmp_path) as server:
        async with (
            backend() as one,
            running_router(one) as router,
            running_gateway(router.server.address, response_store=server.url) as left,
            running_gateway(router.server.address, response_store=server.url) as right,
            client_of(left) as here,
            client_of(right) as there,
        ):
            kept = await here.conversations.create(items=HELLO)
            await there.responses.create(model="", input="More", conversation=kept.id)
            items = [item async for item in here.conversations.items.list(kept.id)]
            assert len(items) == 3
            await there.conversations.delete(kept.id)
            with pytest.raises(openai.NotFoundError):
                await here.conversations.retrieve(kept.id)
            server.kill()
            with pytest.raises(openai.InternalServerError) as caught:
                await here.conversations.create()
            assert (caught.value.status_code, caught.value.code) == (503, "response_store_down")
