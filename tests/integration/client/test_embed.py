"""Embed over a real generation service on the demo model, directly and through a router."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from factories.engine.step_gate import held_after
from factories.servers.generation import Client, generation_service, token_ids
from factories.servers.router import running_router
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument, from_rpc_error
from penstock.v1 import generation_pb2, text_pb2
from penstock_client import AsyncClient
from penstock_client import Client as SyncClient

# The first items are answered in them, which watchers of the load see, and many are left.
SOME_STEPS = 8
TEXTS = ["Hello, world", "The capital of France is Paris", "The capital of France is Paris."]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with generation_service(demo_folder(), kv_memory="16MiB", block_size=4) as one:
        yield one


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ([], "inputs"),
        ([token_ids(5)] * 257, "inputs"),
        ([token_ids(5), token_ids()], "inputs[1]"),
        ([token_ids(1 << 20)], "inputs[0]"),
        ([token_ids(5), token_ids(*range(2, 40), *range(2, 40)), token_ids(*[7] * 20_000)], "inputs[2]"),
    ],
)
async def test_bad_inputs_are_refused_by_name(client: Client, inputs: list[Any], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generation.Embed(generation_pb2.EmbedRequest(inputs=inputs))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_cancelling_ends_every_input(client: Client) -> None:
    with held_after(SOME_STEPS):
        call = client.generation.Embed(
            generation_pb2.EmbedRequest(inputs=[token_ids(*[5 + index] * 900) for index in range(128)])
        )
        await client.until(lambda load: load.running_requests > 0)
        call.cancel()
    await client.until_idle()


async def test_texts_are_embedded_through_the_router_and_the_clients(client: Client) -> None:
    async with running_router(backend=(client.running.address,)) as router:
        answer = await router.stub.Embed(text_pb2.EmbedTextRequest(texts=TEXTS))
        direct = await client.generation.Embed(
            generation_pb2.EmbedRequest(inputs=[token_ids(*await router.encode(text)) for text in TEXTS])
        )
        for one, other in zip(answer.embeddings, direct.embeddings, strict=True):
            assert list(one.values) == pytest.approx(list(other.values), abs=1e-5)

        def synchronous() -> tuple[tuple[float, ...], ...]:
            with SyncClient(router.server.address) as sync:
                return sync.embed(TEXTS, normalize=True).vectors

        async with AsyncClient(router.server.address) as one_client:
            vectors = (await one_client.embed(TEXTS, normalize=True)).vectors
        for vector, other in zip(vectors, await asyncio.to_thread(synchronous), strict=True):
            assert math.isclose(math.hypot(*vector), 1.0, abs_tol=1e-5)
            assert vector == pytest.approx(other, abs=1e-5)
        # Two texts that differ in a full stop are nearer to each other than either to the third.
        near, far = (sum(map(float.__mul__, vectors[1], vectors[other])) for other in (2, 0))
        assert near > far


@pytest.mark.parametrize(("texts", "field"), [([], "texts"), (["a", ""], "texts[1]"), (["a " * 20_000], "texts[0]")])
async def test_bad_texts_are_refused_by_their_public_names(client: Client, texts: list[str], field: str) -> None:
    async with running_router(backend=(client.running.address,)) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.Embed(text_pb2.EmbedTextRequest(texts=texts))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == field
