"""Generate: what a request gets on a stream of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from factories.models.checkpoints import reference_model
from factories.servers.generation import Client, Outcome, generation_service, request, token_ids
from penstock.common.checkpoint import demo_folder
from penstock.generation.core.sampling_params import derive_seed
from penstock.v1 import common_pb2
from tokenizers import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAMPLED = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder) as running:
        yield running
        await running.until_idle()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))


def transformers_greedy(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """Tokens that transformers generates after `prompt`, past end-of-sequence ids."""
    model: Any = reference_model(folder)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
    )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


def assert_whole(outcome: Outcome) -> None:
    """contract.md 1 and 2: Started once, deltas gapless from 0, Finished once and last, status OK."""
    assert outcome.error is None
    assert outcome.kinds == ["started", *["delta"] * len(outcome.deltas), "finished"]
    assert [delta.seq for delta in outcome.deltas] == list(range(len(outcome.deltas)))
    assert outcome.finished.last_seq == len(outcome.deltas) - 1


async def test_a_stream_is_started_deltas_and_one_finished(client: Client) -> None:
    outcome = await client.generate(request(request_id="mine"))
    assert_whole(outcome)
    assert (outcome.started.request_id, outcome.started.prompt_tokens) == ("mine", 3)
    assert outcome.started.generation_mode == common_pb2.GENERATION_MODE_GREEDY_SEARCH
    (end,) = outcome.finished.sequences
    assert (end.finish_reason, end.token_count) == (common_pb2.FINISH_REASON_LENGTH, 8)
    usage = outcome.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 8)
    assert outcome.deltas[-1].finished == end
    assert outcome.finished.timings.total_seconds > 0


async def test_greedy_ids_are_transformers(client: Client, folder: Path) -> None:
    prompt = list(range(40, 60))
    expected = transformers_greedy(folder, prompt, 40)
    outcome = await client.generate(request(prompt, config={"max_new_tokens": 40}))
    assert outcome.ids() == expected


async def test_a_seed_gives_the_same_ids_again(client: Client) -> None:
    first = await client.generate(request(config=SAMPLED, seed=7))
    again = await client.generate(request(config=SAMPLED, seed=7))
    other = await client.generate(request(config=SAMPLED, seed=8))
    assert first.ids() == again.ids()
    assert first.ids() != other.ids()
    assert first.started.generation_mode == common_pb2.GENERATION_MODE_SAMPLE


async def test_a_seed_that_was_drawn_is_reported_and_reproduces(client: Client) -> None:
    first = await client.generate(request(config=SAMPLED))
    again = await client.generate(request(config=SAMPLED, seed=first.started.seed))
    assert first.ids() == again.ids()


async def test_several_sequences_equal_single_requests_with_the_derived_seeds(client: Client) -> None:
    several = await client.generate(request(config={**SAMPLED, "num_return_sequences": 3}, seed=11))
    assert_whole(several)
    assert [end.index for end in several.finished.sequences] == [0, 1, 2]
    assert several.finished.usage.completion_tokens == 36
    for index in range(3):
        single = await client.generate(request(config=SAMPLED, seed=derive_seed(11, index)))
        assert several.ids(index) == single.ids()


async def test_logprobs_come_per_token_with_the_alternatives_asked_for(client: Client) -> None:
    outcome = await client.generate(request(output={"top_logprobs": 3}))
    positions = [position for delta in outcome.deltas for position in delta.logprobs]
    assert [position.chosen.token_id for position in positions] == outcome.ids()
    for position in positions:
        assert [entry.rank for entry in position.top] == [1, 2, 3]
        assert position.chosen == position.top[0]
    total = sum(position.chosen.logprob for position in positions)
    assert outcome.finished.sequences[0].cumulative_logprob == pytest.approx(total, rel=1e-5)


async def test_prompt_logprobs_come_with_started(client: Client) -> None:
    outcome = await client.generate(request((5, 6, 7, 8), output={"prompt_logprobs": 2}))
    positions = outcome.started.prompt_logprobs
    assert not positions[0].HasField("chosen")
    assert [position.chosen.token_id for position in positions[1:]] == [6, 7, 8]
    assert all(len(position.top) == 2 for position in positions[1:])


async def test_a_stop_string_over_token_boundaries_ends_on_the_very_token(client: Client, tokenizer: Tokenizer) -> None:
    free = await client.generate(request(config={"max_new_tokens": 30}))
    texts = [tokenizer.decode([token_id]) for token_id in free.ids()]
    whole = [bool(text) and "\ufffd" not in text for text in texts]
    cut = next(i for i in range(5, 29) if whole[i] and whole[i + 1])
    stop = texts[cut][-1] + texts[cut + 1][0]
    ends_at = next(n for n in range(30) if stop in tokenizer.decode(free.ids()[: n + 1]))
    outcome = await client.generate(request(config={"max_new_tokens": 30}, stop={"stop_strings": ["\0", stop]}))
    assert_whole(outcome)
    assert outcome.ids() == free.ids()[: ends_at + 1]
    (end,) = outcome.finished.sequences
    assert (end.finish_reason, end.stop_string) == (common_pb2.FINISH_REASON_STOP_STRING, stop)
    assert outcome.finished.usage.completion_tokens == end.token_count == ends_at + 1


async def test_a_stop_id_and_a_sequence_of_ids_end_it(client: Client) -> None:
    free = (await client.generate(request())).ids()
    for run in (free[3:4], free[2:4]):
        outcome = await client.generate(request(stop={"stop_token_ids": [token_ids(*run)]}))
        (end,) = outcome.finished.sequences
        assert end.finish_reason == common_pb2.FINISH_REASON_STOP_TOKEN
        assert outcome.ids() == free[: free.index(run[-1]) + 1]


async def test_an_end_id_ends_it_unless_ignored(client: Client) -> None:
    free = (await client.generate(request())).ids()
    ended = await client.generate(request(stop={"ignore_eos": False}, eos_token_ids=[free[2]]))
    assert ended.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_STOP_EOS
    assert ended.ids() == free[: free.index(free[2]) + 1]
    ignored = await client.generate(request(eos_token_ids=[free[2]]))
    assert ignored.ids() == free


async def test_the_same_prompt_again_is_cached_unless_the_salt_differs(client: Client) -> None:
    prompt = range(100, 150)
    await client.generate(request(prompt, cache_salt="a"))
    again = await client.generate(request(prompt, cache_salt="a"))
    other = await client.generate(request(prompt, cache_salt="b"))
    assert again.started.cached_tokens == again.finished.usage.cached_tokens > 0
    assert other.started.cached_tokens == 0
    assert again.ids() == other.ids()


@pytest.mark.parametrize("config", [{"max_new_tokens": 12}, SAMPLED])
async def test_resuming_goes_on_where_another_attempt_stopped(client: Client, config: dict[str, object]) -> None:
    whole = await client.generate(request(config=config, seed=3))
    moved = await client.generate(request(config=config, seed=3, resumed_token_ids=[token_ids(*whole.ids()[:5])]))
    assert whole.ids()[:5] + moved.ids() == whole.ids()
    assert [delta.seq for delta in moved.deltas] == list(range(7))


async def test_warnings_come_back(client: Client) -> None:
    outcome = await client.generate(request(config={"temperature": 0.5, "max_length": 50}))
    assert len(outcome.started.warnings) == 2


async def test_an_interval_sends_fewer_deltas_with_the_same_ids(client: Client) -> None:
    every = await client.generate(request())
    some = await client.generate(request(output={"stream_interval": 3}))
    assert_whole(some)
    assert [len(delta.token_ids) for delta in some.deltas] == [3, 3, 2]
    assert some.ids() == every.ids()


async def test_the_demo_model_speaks_as_in_transformers(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n").ids
    expected = transformers_greedy(demo_folder(), prompt, 24)
    async with generation_service(demo_folder(), dtype="float32", served_model_name=("demo",)) as client:
        outcome = await client.generate(request(prompt, config={"max_new_tokens": 24}, model="demo"))
    assert_whole(outcome)
    assert outcome.ids() == expected
