"""Guidance, DoLa, contrastive search and token healing through a router and a real generation service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from factories.servers.generation import Client, generation_service, request
from factories.servers.router import Answer, Router, collect, generate, running_router
from penstock.common.checkpoint import demo_folder
from penstock.v1 import common_pb2, config_pb2

WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)


@asynccontextmanager
async def stack_of_one() -> AsyncIterator[tuple[Client, Router]]:
    async with (
        generation_service(demo_folder(), kv_memory="32MiB", block_size=4, dtype="float32") as one,
        running_router(backend=(one.running.address,)) as router,
    ):
        yield one, router


async def ask(router: Router, text: str, output: config_pb2.OutputConfig = WANT_IDS, **config: Any) -> Answer:
    options = config_pb2.GenerationConfig(**{"max_new_tokens": 10, "do_sample": False, **config})
    return await collect(router.stub.Generate(generate(text, config=options, output=output)))


async def test_a_text_is_continuous_from_the_prompt_over_the_healed_token_to_the_answer() -> None:
    async with stack_of_one() as (client, router):
        prompt = "What is the col"
        answer = await ask(router, prompt, token_healing=True, do_sample=True, num_return_sequences=2, seed=7)
        (healed,) = answer.started.healed_token_ids
        ids = await router.encode(prompt)
        assert healed != ids[-1]
        assert await router.decode([*ids[:-1], healed]) == prompt + answer.started.healed_text
        assert answer.started.healed_text
        for index in (0, 1):
            whole = [*ids[:-1], healed, *answer.ids(index)]
            assert prompt + answer.text(index) == await router.decode(whole)
        assert answer.finished.usage.prompt_tokens == len(ids)
        assert answer.finished.usage.completion_tokens == len(answer.ids(0)) + len(answer.ids(1))
        await client.until_idle()


async def test_an_echoed_prompt_and_the_healed_text_are_one_text() -> None:
    async with stack_of_one() as (_, router):
        answer = await ask(router, "What is the col", config_pb2.OutputConfig(echo=True), token_healing=True)
        assert answer.text().startswith("What is the col" + answer.started.healed_text)


@pytest.mark.parametrize(
    "config",
    [
        {"token_healing": True, "do_sample": True, "seed": 5},
        {"token_healing": True, "penalty_alpha": 0.6, "top_k": 3},
        {"guidance_scale": 2.0, "negative_prompt_ids": common_pb2.TokenIds(ids=[9, 8, 7])},
        {"dola_layers": config_pb2.DolaLayers(preset="low"), "do_sample": True, "seed": 5},
    ],
)
async def test_another_backend_goes_on_where_the_first_was_lost(config: dict[str, Any]) -> None:
    async with stack_of_one() as (client, router):
        prompt = await router.encode("What is the col")
        whole = await client.generate(request(prompt, config=config))
        ids = whole.ids()
        rest = await client.generate(
            request(prompt, config=config, resumed_token_ids=[common_pb2.TokenIds(ids=ids[:3])])
        )
        assert rest.ids() == ids[3:]
        assert rest.started.healed_token_ids == whole.started.healed_token_ids
        assert rest.started.healed_text == whole.started.healed_text


async def test_a_prompt_of_one_token_is_answered_unchanged() -> None:
    async with stack_of_one() as (_, router):
        assert len(await router.encode("x")) == 1
        plain = await ask(router, "x")
        answer = await ask(router, "x", token_healing=True)
        assert not answer.started.healed_token_ids
        assert (answer.text(), answer.ids()) == (plain.text(), plain.ids())


async def test_a_prompt_is_never_healed_into_a_control_token() -> None:
    async with stack_of_one() as (_, router):
        control = await router.encode("<|im_start|><|im_end|>")
        answer = await ask(router, "Hello<", token_healing=True, logit_bias=dict.fromkeys(control, 50.0))
        assert not set(answer.started.healed_token_ids) & set(control)
        assert "<|im_" not in answer.started.healed_text


@pytest.mark.parametrize(
    "config",
    [
        {"dola_layers": config_pb2.DolaLayers(preset="high")},
        {"dola_layers": config_pb2.DolaLayers(preset="low"), "do_sample": True, "num_return_sequences": 3},
        {"dola_layers": config_pb2.DolaLayers(preset="high"), "guidance_scale": 1.5},
        {"penalty_alpha": 0.6, "top_k": 4},
    ],
)
async def test_a_constraint_holds(config: dict[str, Any]) -> None:
    values = ["green apples", "Paris", "42 times"]
    async with stack_of_one() as (_, router):
        options = config_pb2.GenerationConfig(**{"max_new_tokens": 24, "do_sample": False, "seed": 3, **config})
        message = generate("The capital of France is ", config=options)
        message.constraint.choice.values.extend(values)
        answer = await collect(router.stub.Generate(message))
        texts = [answer.text(index) for index in range(config.get("num_return_sequences", 1))]
        assert set(texts) <= set(values)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, common_pb2.GENERATION_MODE_CONTRASTIVE_SEARCH),
        (
            {"dola_layers": config_pb2.DolaLayers(preset="low"), "repetition_penalty": 1.2},
            common_pb2.GENERATION_MODE_DOLA_GENERATION,
        ),
        (
            {"guidance_scale": 2.0, "negative_prompt_text": "The capital of France is Paris."},
            common_pb2.GENERATION_MODE_GREEDY_SEARCH,
        ),
        (
            {"guidance_scale": 1.5, "dola_layers": config_pb2.DolaLayers(preset="high")},
            common_pb2.GENERATION_MODE_DOLA_GENERATION,
        ),
    ],
)
async def test_every_mode_is_served_told_and_leaves_no_block_behind(config: dict[str, Any], mode: int) -> None:
    async with stack_of_one() as (client, router):
        answer = await ask(router, "The capital of France is", **config)
        assert answer.started.generation_mode == mode
        assert len(answer.ids()) == answer.finished.usage.completion_tokens > 0
        again = await ask(router, "The capital of France is", **config)
        assert again.ids() == answer.ids()
        await client.until_idle()
