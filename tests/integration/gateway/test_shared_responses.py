"""Two gateways that share responses: a conversation goes on at either, and neither falls with the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router
from factories.servers.shared_store import needs_shared_store, shared_store

pytestmark = needs_shared_store
ASKED: dict[str, Any] = {"model": "", "input": "Hello", "max_output_tokens": 4}


def client_of(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url, api_key="mine", max_retries=0, timeout=60)


async def test_a_conversation_goes_on_at_another_gateway(tmp_path: Path) -> None:
    with shared_store(tmp_path) as server:
        async with (
            backend() as one,
            running_router(one) as router,
            running_gateway(router.server.address, response_store=server.url) as left,
            running_gateway(router.server.address, response_store=server.url) as right,
            client_of(left) as here,
            client_of(right) as there,
        ):
            first = await here.responses.create(**ASKED)
            assert await there.responses.retrieve(first.id) == first
            second = await there.responses.create(**ASKED, previous_response_id=first.id)
            third = await here.responses.create(**ASKED, previous_response_id=second.id)
            assert third.usage is not None
            assert second.usage is not None
            assert third.usage.input_tokens > second.usage.input_tokens
            with pytest.raises(openai.NotFoundError):
                await there.with_options(api_key="another").responses.retrieve(third.id)
            assert left.metric("kept_responses") == 3
            await there.responses.delete(first.id)
            with pytest.raises(openai.BadRequestError) as caught:
                await here.responses.create(**ASKED, previous_response_id=third.id)
            assert caught.value.param == "previous_response_id"


async def test_without_its_store_a_gateway_answers_and_keeps_nothing(tmp_path: Path) -> None:
    with shared_store(tmp_path) as server:
        async with (
            backend() as one,
            running_router(one) as router,
            running_gateway(router.server.address, response_store=server.url) as gateway,
            client_of(gateway) as client,
        ):
            kept = await client.responses.create(**ASKED)
            server.kill()
            alone = await client.responses.create(**ASKED)
            assert (alone.status, alone.output_text) == (kept.status, kept.output_text)
            assert (alone.to_dict()["store"], kept.to_dict()["store"]) == (False, True)
            for call in (
                client.responses.create(**ASKED, previous_response_id=kept.id),
                client.responses.retrieve(kept.id),
                client.responses.delete(kept.id),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await call
                assert (caught.value.status_code, caught.value.code) == (503, "response_store_down")
            chat = await client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hello"}])
            assert chat.choices
            server.start()
            again = await client.responses.create(**ASKED)
            assert await client.responses.retrieve(again.id) == again
