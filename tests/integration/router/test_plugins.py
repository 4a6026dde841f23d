"""The server owner's plugins from the text clients, through the router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from factories.engine.plugins import FLAGS
from factories.servers.generation import generation_service
from factories.servers.router import Router, running_router
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock_client import AsyncClient, Internal, InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    async with (
        generation_service(demo_folder(), kv_memory="16MiB", **FLAGS) as client,
        running_router(backend=(client.running.address,)) as one,
    ):
        yield one


async def test_a_request_chooses_them_by_name(router: Router) -> None:
    async with AsyncClient(router.server.address) as client:
        answer = await client.generate(
            "The sky", logits_processor={"one-token": {"token_id": 300}}, max_new_tokens=3, return_token_ids=True
        )
        assert answer.choices[0].token_ids == [300] * 3
        answer = await client.generate(
            user("Hello"), stopping_criteria=[("multiple", {"of": 1})], return_token_ids=True
        )
        assert (answer.choices[0].finish_reason, len(answer.choices[0].token_ids)) == ("STOP_CRITERIA", 1)


async def test_an_unknown_name_and_a_failure_are_told(router: Router) -> None:
    async with AsyncClient(router.server.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.generate("The sky", stopping_criteria="unknown")
        assert (refused.value.field, refused.value.reason) == ("config.stopping_criteria", "PLUGIN_NOT_FOUND")
        stream = client.stream("The sky", logits_processor={"raising": {"after": 5}}, max_new_tokens=20)
        with pytest.raises(Internal, match="raising raised LookupError") as failed:
            await stream.result()
        assert failed.value.reason == "PLUGIN_FAILED"
        assert stream.state.started is not None
        assert (await client.generate("The sky", max_new_tokens=3)).choices[0].finish_reason == "LENGTH"
