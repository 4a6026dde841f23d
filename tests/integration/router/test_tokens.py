"""Tokenize, Detokenize and RenderChat: what the router makes of texts and conversations, for clients to see."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from factories.servers.router import backend, running_router
from penstock_client import AsyncClient, InvalidArgument, NotFound

HELLO = [{"role": "user", "content": "Hello"}]


async def test_texts_and_conversations_become_ids_and_back() -> None:
    async with backend() as one, running_router(one) as router, AsyncClient(router.server.address) as client:
        ids = await client.tokenize(["Hello world", "x"])
        assert ids == [await router.encode("Hello world"), await router.encode("x")]
        assert await client.detokenize(ids) == ["Hello world", "x"]
        text, prompt = await client.render_chat(HELLO)
        assert "Hello" in text
        assert await client.detokenize([prompt], skip_special_tokens=False) == [text]
        await client.generate(HELLO)
        assert list(one.submitted[-1].prompt_token_ids) == prompt


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda client: client.tokenize([]), "texts"),
        (lambda client: client.detokenize([]), "sequences"),
        (lambda client: client.tokenize(["x"] * 5000), "texts"),
        (lambda client: client.render_chat([]), "messages"),
    ],
    ids=["no text", "no ids", "too many", "no message"],
)
async def test_a_wrong_field_is_named(ask: Callable[[AsyncClient], Awaitable[Any]], field: str) -> None:
    async with backend() as one, running_router(one) as router, AsyncClient(router.server.address) as client:
        with pytest.raises(InvalidArgument) as caught:
            await ask(client)
        assert caught.value.field == field
        with pytest.raises(NotFound):
            await client.tokenize("x", model="another")
