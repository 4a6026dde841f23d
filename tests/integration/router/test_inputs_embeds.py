"""inputs_embeds through the router, by both Python clients: the backend's ids as text, refusals, where requests go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from factories.servers.generation import Client, generation_service
from factories.servers.router import Router, backend, collect, running_router
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.v1 import common_pb2, config_pb2, text_pb2
from penstock_client import AsyncClient
from penstock_client import Client as SyncClient
from penstock_client._tensors import set_rows
from safetensors.torch import load_file
from tokenizers import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "<|im_start|>user\nCount from 3 to 9.<|im_end|>\n<|im_start|>assistant\n"
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_token_ids": True}


@dataclass
class Stack:
    """The public service and what is behind it, and the model's table with the ids of TEXT."""

    router: Router
    backend: Client
    table: torch.Tensor
    ids: list[int]

    @property
    def rows(self) -> torch.Tensor:
        return self.table[self.ids]

    @property
    def address(self) -> str:
        return self.router.server.address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    table = load_file(demo_folder() / "model.safetensors")["model.embed_tokens.weight"]
    async with AsyncExitStack() as running:
        service = await running.enter_async_context(generation_service(demo_folder(), kv_memory="16MiB"))
        router = await running.enter_async_context(running_router(backend=(service.running.address,)))
        yield Stack(router, service, table, tokenizer.encode(TEXT).ids)


async def test_both_clients_read_the_answer_of_the_rows(stack: Stack) -> None:
    async with AsyncClient(stack.address) as client:
        wanted = await client.generate(stack.ids, **OPTIONS)
        assert "3" in wanted.text
        for rows in (stack.rows, stack.rows[None], stack.rows.float().numpy(), stack.rows.float().tolist()):
            answer = await client.generate(inputs_embeds=rows, **OPTIONS)
            assert (answer.text, answer.choices[0].token_ids) == (wanted.text, wanted.choices[0].token_ids)
            assert answer.usage.prompt_tokens == len(stack.ids)
        answer = await client.generate(stack.ids, inputs_embeds=stack.rows, **OPTIONS)
        assert answer.text == wanted.text

    def ask() -> tuple[str, str]:
        with SyncClient(stack.address) as client:
            before = client.generate(
                stack.ids[4:], inputs_embeds=stack.rows[:4].float().numpy(), inputs_embeds_before_ids=True, **OPTIONS
            )
            return client.generate(inputs_embeds=stack.rows, **OPTIONS).text, before.text

    assert await asyncio.to_thread(ask) == (wanted.text, wanted.text)


async def test_a_text_goes_on_from_rows_before_it(stack: Stack) -> None:
    async with AsyncClient(stack.address) as client:
        wanted = await client.generate([*stack.ids, *stack.ids], **OPTIONS)
        # Control tokens of a text are text, so the text is one without any.
        plain = await client.generate("Count.", max_new_tokens=1, return_token_ids=True)
        answer = await client.generate(stack.ids, inputs_embeds=stack.rows, inputs_embeds_before_ids=True, **OPTIONS)
        assert answer.text == wanted.text
        after = await client.generate(
            "Count.", inputs_embeds=stack.rows, inputs_embeds_before_ids=True, echo=True, **OPTIONS
        )
        assert after.text.startswith("Count.")
        assert after.usage.prompt_tokens == len(stack.ids) + plain.usage.prompt_tokens
        alone = await client.generate(inputs_embeds=stack.rows, echo=True, **OPTIONS)
        assert "Count" not in alone.text


async def test_warnings_come_back(stack: Stack) -> None:
    async with AsyncClient(stack.address) as client:
        answer = await client.generate(inputs_embeds=stack.rows, repetition_penalty=1.2, **OPTIONS)
        assert any("inputs_embeds came without ids" in text for text in answer.started.warnings)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("inputs_embeds", {"inputs_embeds": np.zeros((4, 255), np.float32)}),
        ("inputs_embeds", {"inputs_embeds": np.zeros((0, 256), np.float32)}),
        ("inputs_embeds", {"inputs_embeds": np.full((4, 256), np.inf, np.float16)}),
        ("inputs_embeds", {"inputs_embeds": np.zeros((4096, 256), np.float16)}),
        ("inputs_embeds", {"inputs_embeds": common_pb2.Tensor()}),
        ("inputs_embeds", {"inputs_embeds": common_pb2.Tensor(dtype=1, shape=[2**62, 256], data=b"12")}),
        ("prompt", {"prompt": [5] * 5, "inputs_embeds": np.zeros((4, 256), np.float32)}),
        ("config.token_healing", {"inputs_embeds": np.zeros((4, 256), np.float32), "token_healing": True}),
        ("inputs_embeds_before_ids", {"prompt": [5], "inputs_embeds_before_ids": True}),
    ],
)
async def test_a_refusal_names_the_clients_field(stack: Stack, field: str, options: dict[str, Any]) -> None:
    async with AsyncClient(stack.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.generate(**{**OPTIONS, **options})
    assert refused.value.field == field
    await stack.router.until("num_requests_running", 0)
    await stack.backend.until_idle()


async def test_without_any_prompt_it_is_refused(stack: Stack) -> None:
    with pytest.raises(Exception, match="inputs_embeds") as refused:
        await collect(stack.router.stub.Generate(text_pb2.GenerateTextRequest()))
    assert "prompt" in str(refused.value)


async def test_more_than_the_router_takes_is_refused(stack: Stack) -> None:
    async with AsyncClient(stack.address) as client:
        with pytest.raises(ResourceExhausted):
            await client.generate(inputs_embeds=np.zeros((4097, 256), np.float32), **OPTIONS)


async def test_equal_rows_go_where_they_went_before() -> None:
    rows = torch.randn(64, 8)
    other = rows.clone()
    other[:16] += 1
    async with backend(block_size=16) as one, backend(block_size=16) as two, running_router(one, two) as router:

        async def ask(values: torch.Tensor, **fields: Any) -> Any:
            message = text_pb2.GenerateTextRequest(config=config_pb2.GenerationConfig(max_new_tokens=2), **fields)
            set_rows(message.inputs_embeds, values)
            before = len(one.submitted), len(two.submitted)
            await collect(router.stub.Generate(message))
            after = len(one.submitted), len(two.submitted)
            (owner,) = (at for at, old, new in zip((one, two), before, after, strict=True) if new > old)
            sent = owner.submitted[-1]
            assert sent.inputs_embeds == message.inputs_embeds
            assert sent.inputs_embeds_before_ids == message.inputs_embeds_before_ids
            return owner, list(sent.prompt_token_ids)

        first, ids = await ask(rows)
        assert ids == []
        # Where nothing is known, equals take turns.
        assert (await ask(other))[0] is not first
        for _ in range(3):
            assert (await ask(rows))[0] is first
            assert (await ask(rows[:40]))[0] is first
            assert (await ask(other))[0] is not first
        prompt = common_pb2.TokenIds(ids=[5, 6])
        assert await ask(rows, token_ids=prompt, inputs_embeds_before_ids=True) == (first, [5, 6])
