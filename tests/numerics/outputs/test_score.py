"""Score gives the model's own log-probabilities, as transformers computes them, however the prompts are chunked, shared
and mixed with other requests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.servers.generation import Client, generation_service, request
from penstock.v1 import generation_pb2
from transformers import PreTrainedModel

TOLERANCE = 1e-4
BLOCK_SIZE = 4


@pytest.fixture(scope="module", params=["qwen2-window", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    family, _, windowed = request.param.partition("-")
    return tiny_checkpoint(tmp_path_factory.mktemp(family), family, seed=5, **(window if windowed else {}))


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, block_size=BLOCK_SIZE, max_batch_tokens=24, max_running_sequences=6) as one:
        yield one


def ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, high))]


def item(prompt: Sequence[int], continuation: Sequence[int]) -> generation_pb2.ScoreItem:
    return generation_pb2.ScoreItem(prompt_token_ids=prompt, continuation_token_ids=continuation)


@torch.inference_mode()
def expected_rows(model: PreTrainedModel, one: generation_pb2.ScoreItem) -> torch.Tensor:
    """(continuation, vocabulary) log-probabilities of every token at each position of the continuation."""
    tokens = [*one.prompt_token_ids, *one.continuation_token_ids]
    logits = model(torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(-1)[len(one.prompt_token_ids) - 1 : -1]


def check(result: generation_pb2.ScoreResult, one: generation_pb2.ScoreItem, model: PreTrainedModel, top: int) -> None:
    rows = expected_rows(model, one)
    targets = list(one.continuation_token_ids)
    chosen = rows[torch.arange(len(targets)), torch.tensor(targets)]
    got = torch.tensor([entry.chosen.logprob for entry in result.logprobs])
    assert [entry.chosen.token_id for entry in result.logprobs] == targets
    torch.testing.assert_close(got, chosen, atol=TOLERANCE, rtol=0)
    assert abs(result.logprob - float(chosen.double().sum())) < TOLERANCE * len(targets)
    ranks = [int((row > row[target]).sum()) + 1 for row, target in zip(rows, targets, strict=True)]
    assert [entry.chosen.rank for entry in result.logprobs] == ranks
    assert result.is_greedy == (max(ranks) == 1)
    for entry, row in zip(result.logprobs, rows, strict=True):
        assert [alternative.token_id for alternative in entry.top] == row.topk(top).indices.tolist()
        torch.testing.assert_close(
            torch.tensor([alternative.logprob for alternative in entry.top]),
            row.topk(top).values,
            atol=TOLERANCE,
            rtol=0,
        )


async def test_continuations_of_all_lengths_get_the_models_own_log_probabilities(
    client: Client, reference: PreTrainedModel
) -> None:
    rng = random.Random(1)
    items = [item(ids(rng, 1, 60), ids(rng, 1, 12)) for _ in range(24)]
    response = await client.generation.Score(generation_pb2.ScoreRequest(items=items, top_logprobs=3))
    assert len(response.results) == len(items)
    for result, one in zip(response.results, items, strict=True):
        check(result, one, reference, top=3)
    await client.until_idle()


async def test_continuations_of_one_prompt_share_its_cached_blocks_and_score_the_same(
    client: Client, reference: PreTrainedModel
) -> None:
    rng = random.Random(2)
    prompt = ids(rng, 41, 41)
    items = [item(prompt, ids(rng, 1, 5)) for _ in range(8)]
    response = await client.generation.Score(generation_pb2.ScoreRequest(items=items, top_logprobs=1))
    for result, one in zip(response.results, items, strict=True):
        check(result, one, reference, top=1)
    # Row 40 is needed, so the blocks before it: ten of four tokens, for all but the first.
    assert response.usage.cached_tokens == 7 * 40
    assert response.usage.prompt_tokens == sum(len(one.continuation_token_ids) for one in items) + 8 * 41


async def test_a_greedy_answer_is_recognised_as_such(client: Client, reference: PreTrainedModel) -> None:
    rng = random.Random(3)
    prompt = ids(rng, 20, 20)
    answer = (await client.generate(request(prompt, config={"max_new_tokens": 6, "do_sample": False}))).ids()
    spoilt = [*answer[:-1], (answer[-1] + 1) % VOCAB_SIZE]
    items = [item(prompt, answer), item(prompt, spoilt)]
    response = await client.generation.Score(generation_pb2.ScoreRequest(items=items))
    assert [result.is_greedy for result in response.results] == [True, False]
    for result, one in zip(response.results, items, strict=True):
        check(result, one, reference, top=0)


async def test_salts_do_not_share_blocks(client: Client) -> None:
    items = [item(range(2, 34), [1])]
    for salt, cached in (("a", 0), ("a", 28), ("b", 0)):
        response = await client.generation.Score(generation_pb2.ScoreRequest(items=items, cache_salt=salt))
        assert response.usage.cached_tokens == cached
