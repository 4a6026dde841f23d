"""Special ids of a text request, which the generation service has had: from the clients through the router."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from factories.servers.generation import generation_service
from factories.servers.router import Router, running_router
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock.v1 import config_pb2, generation_pb2
from penstock_client import AsyncClient, Client, InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "The capital of France is"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    async with (
        generation_service(demo_folder(), kv_memory="16MiB") as client,
        running_router(backend=(client.running.address,)) as one,
    ):
        yield one


async def test_a_text_request_has_its_own_end(router: Router) -> None:
    async with AsyncClient(router.server.address) as client:
        wanted = {"max_new_tokens": 8, "return_token_ids": True, "do_sample": False}
        plain = (await client.generate(PROMPT, ignore_eos=True, **wanted)).choices[0]
        end = plain.token_ids[1]
        cut = plain.token_ids[: plain.token_ids.index(end) + 1]
        for asked in (end, [4000, end]):
            choice = (await client.generate(PROMPT, eos_token_id=asked, **wanted)).choices[0]
            assert choice.token_ids == cut
            assert choice.finish_reason == "STOP_EOS"
            assert choice.stop_token_id == end
        assert len(cut) < 8
        chat = (await client.generate(user("Hello"), eos_token_id=end, **wanted)).choices[0]
        assert end not in chat.token_ids[:-1]


async def test_the_synchronous_client_has_it_too(router: Router) -> None:
    def ask() -> int:
        with Client(router.server.address) as client:
            first = client.generate(PROMPT, max_new_tokens=1, return_token_ids=True).choices[0].token_ids[0]
            wanted = {"max_new_tokens": 8, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
            answer = client.generate(PROMPT, eos_token_id=first, pad_token_id=first, **wanted)
            assert list(answer.started.warnings) == []
            return len(answer.choices)

    assert await asyncio.to_thread(ask) == 1


async def test_an_empty_prompt_begins_with_the_id_that_the_request_names(router: Router) -> None:
    async with AsyncClient(router.server.address) as client:
        wanted = {"max_new_tokens": 6, "return_token_ids": True}
        expected = await client.generate([7], **wanted)
        for prompt in ("", []):
            found = await client.generate(prompt, bos_token_id=7, **wanted)
            assert found.choices == expected.choices
            assert found.finished.usage.prompt_tokens == 1
        again = await client.generate("", bos_token_id=7, echo=True, **wanted)
        assert again.choices[0].text == expected.choices[0].text


async def test_an_empty_prompt_without_such_an_id_is_refused_by_its_name(router: Router) -> None:
    async with AsyncClient(router.server.address) as client:
        for prompt in ("", []):
            with pytest.raises(InvalidArgument, match="bos_token_id is unset") as refused:
                await client.generate(prompt)
            assert (refused.value.field, refused.value.reason) == ("prompt", "EMPTY_PROMPT")


async def test_an_empty_prompt_begins_with_the_models_own_id_at_both_services(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder(), folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 9, "do_sample": False}))
    async with (
        generation_service(folder, kv_memory="4MiB") as backend,
        running_router(backend=(backend.running.address,)) as router,
        AsyncClient(router.server.address) as client,
    ):
        expected = await client.generate([9], max_new_tokens=6, return_token_ids=True)
        assert (await client.generate(max_new_tokens=6, return_token_ids=True)).choices == expected.choices
        request = generation_pb2.GenerateRequest(config=config_pb2.GenerationConfig(max_new_tokens=6))
        events = [event async for event in backend.generation.Generate(request)]
        ids = [token_id for event in events for token_id in event.delta.token_ids]
        assert ids == expected.choices[0].token_ids


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
async def test_an_id_outside_of_the_vocabulary_is_refused_by_its_name(router: Router, name: str) -> None:
    async with AsyncClient(router.server.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.generate(PROMPT, **{name: 4096})  # type: ignore[arg-type]
        assert refused.value.field == f"config.{name}"
