"""Embed gives the mean of transformers' last_hidden_state, however the inputs are chunked, batched and preempted."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.servers.generation import Client, generation_service, token_ids
from penstock.v1 import generation_pb2
from transformers import PreTrainedModel

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=6)


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, block_size=4, max_batch_tokens=16, max_running_sequences=6) as one:
        yield one


def inputs(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 70))] for _ in range(count)]


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model.base_model(torch.tensor([ids])).last_hidden_state[0].double().mean(0).float()


async def test_the_mean_is_over_every_token_of_the_input(client: Client, reference: PreTrainedModel) -> None:
    texts = inputs(12, seed=1)
    request = generation_pb2.EmbedRequest(inputs=[token_ids(*ids) for ids in texts])
    response = await client.generation.Embed(request)
    for ids, embedding in zip(texts, response.embeddings, strict=True):
        torch.testing.assert_close(
            torch.tensor(embedding.values), expected(reference, ids), atol=TOLERANCE, rtol=TOLERANCE
        )
    assert response.usage.prompt_tokens == sum(map(len, texts))
    await client.until_idle()


async def test_normalised_embeddings_have_length_one_and_the_same_direction(
    client: Client, reference: PreTrainedModel
) -> None:
    texts = inputs(3, seed=2)
    request = generation_pb2.EmbedRequest(inputs=[token_ids(*ids) for ids in texts], normalize=True)
    for ids, embedding in zip(texts, (await client.generation.Embed(request)).embeddings, strict=True):
        mean = expected(reference, ids)
        torch.testing.assert_close(torch.tensor(embedding.values), mean / mean.norm(), atol=TOLERANCE, rtol=TOLERANCE)


async def test_a_cached_prefix_is_computed_again_since_its_rows_count(
    client: Client, reference: PreTrainedModel
) -> None:
    ids = inputs(1, seed=3)[0] * 2
    request = generation_pb2.EmbedRequest(inputs=[token_ids(*ids)])
    for _ in range(2):
        response = await client.generation.Embed(request)
        assert response.usage.cached_tokens == 0
        torch.testing.assert_close(
            torch.tensor(response.embeddings[0].values), expected(reference, ids), atol=TOLERANCE, rtol=TOLERANCE
        )


async def test_inputs_that_the_pool_cannot_hold_together_are_right_all_the_same(
    folder: Path, reference: PreTrainedModel
) -> None:
    """A pool of 160 tokens for six inputs of 64 at a time: they wait for each other or are preempted."""
    texts = [ids[:64] for ids in (one * 64 for one in inputs(10, seed=4))]
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    async with generation_service(
        folder,
        block_size=4,
        max_batch_tokens=24,
        max_running_sequences=6,
        kv_memory=f"{40 * block_bytes}",
        max_context=100,
    ) as client:
        response = await client.generation.Embed(generation_pb2.EmbedRequest(inputs=[token_ids(*ids) for ids in texts]))
    for ids, embedding in zip(texts, response.embeddings, strict=True):
        torch.testing.assert_close(
            torch.tensor(embedding.values), expected(reference, ids), atol=TOLERANCE, rtol=TOLERANCE
        )
