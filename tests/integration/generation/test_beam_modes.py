"""Beam modes through a router and a real generation service."""

from __future__ import annotations

from typing import Any

import pytest
from factories.servers.generation import generation_service
from factories.servers.router import collect, generate, running_router
from penstock.common.checkpoint import demo_folder
from penstock.v1 import common_pb2, config_pb2

PROMPT = "The capital of France is"
OUTPUT = config_pb2.OutputConfig(return_token_ids=True, top_logprobs=2)
MODES: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 4, "length_penalty": 0.0},
    "beam sampling": {"num_beams": 4, "do_sample": True, "length_penalty": 0.0},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "length_penalty": 0.0},
    "constrained beam search": {
        "num_beams": 4,
        "force_words_ids": [config_pb2.WordAlternatives(alternatives=[common_pb2.TokenIds(ids=[300, 301])])],
        "length_penalty": 0.0,
    },
}


@pytest.mark.parametrize("mode", MODES)
async def test_whole_texts_come_best_first_with_their_scores_and_the_blocks_are_free_after(mode: str) -> None:
    async with (
        generation_service(demo_folder(), kv_memory="32MiB", block_size=4, dtype="float32") as service,
        running_router(backend=(service.running.address,)) as router,
    ):
        config = config_pb2.GenerationConfig(
            **{"max_new_tokens": 8, "do_sample": False, "seed": 5, "num_return_sequences": 3, **MODES[mode]}
        )
        message = generate(PROMPT, config=config, output=OUTPUT)
        answer = await collect(router.stub.Generate(message))
        again = await collect(router.stub.Generate(message))
        results = answer.finished.sequences
        assert [result.index for result in results] == [0, 1, 2]
        scores = [result.cumulative_logprob for result in results]
        assert scores == sorted(scores, reverse=True)
        for index in range(3):
            ids = answer.ids(index)
            assert again.ids(index) == ids
            assert results[index].token_count == len(ids)
            assert answer.text(index) == await router.decode(ids)
        assert len({tuple(answer.ids(index)) for index in range(3)}) > 1
        assert answer.finished.usage.completion_tokens == sum(len(answer.ids(index)) for index in range(3))
        await service.until_idle()


async def test_a_stop_string_ends_a_beam_and_is_told() -> None:
    async with (
        generation_service(demo_folder(), kv_memory="32MiB", dtype="float32") as service,
        running_router(backend=(service.running.address,)) as router,
    ):
        config = config_pb2.GenerationConfig(max_new_tokens=30, do_sample=False, num_beams=3, length_penalty=0.0)
        free = await collect(router.stub.Generate(generate(PROMPT, config=config, output=OUTPUT)))
        stop = free.text()[2:5]
        message = generate(PROMPT, config=config, output=OUTPUT, stop=config_pb2.StopConfig(stop_strings=[stop]))
        answer = await collect(router.stub.Generate(message))
        result = answer.finished.sequences[0]
        assert result.finish_reason == common_pb2.FINISH_REASON_STOP_STRING
        assert result.stop_string == stop
        assert stop not in answer.text()
        await service.until_idle()
