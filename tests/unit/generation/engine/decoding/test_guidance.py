"""Classifier-free guidance in the engine: a draw and its unconditional row are of one step, whatever the pool does."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import pytest
from factories.engine.fake_engine import (
    engine_config,
    is_unconditional,
    make_engine,
    ranking,
    request,
    run,
)
from factories.engine.sequences import params, sequence
from penstock.generation.core.decoding_mode import GuidanceOptions
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.block_tables import BlockTables, FoundPrefix
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.engine import Engine

ROOMY = engine_config(num_blocks=400, max_batch_tokens=1000)


def guidance(*negative: int) -> GuidanceOptions:
    return GuidanceOptions(2.0, negative)


def guided(prompt: list[int], negative: list[int], steps: int) -> list[int]:
    """Return the fake runner's greedy search over both branches, without an engine."""
    output: list[int] = []
    for _ in range(steps):
        output.append(ranking(0, [*prompt, *output, -1, *negative, *output], 50)[0][0])
    return output


def test_both_branches_get_the_same_output_and_only_the_guided_one_speaks() -> None:
    engine, runner = make_engine()
    item = request([1, 2, 3, 4, 5], max_new_tokens=4, guidance=guidance(7, 8))
    answer = run(engine, item)[item.request_id]
    assert answer.ids == {0: guided([1, 2, 3, 4, 5], [7, 8], 4)}
    assert [step.num_tokens for step in runner.steps] == [4 + 1, 2, 2, 2, 2]
    assert engine.load().kv_blocks_used == 0


def test_without_a_negative_prompt_the_unconditional_branch_starts_from_the_last_prompt_token() -> None:
    engine, _ = make_engine()
    item = request([1, 2, 3], max_new_tokens=3, guidance=guidance())
    assert run(engine, item)[item.request_id].ids == {0: guided([1, 2, 3], [3], 3)}


def test_returned_sequences_share_the_prompt_and_their_unconditional_branches_the_negative_prompt() -> None:
    engine, runner = make_engine()
    item = request(
        list(range(16)), max_new_tokens=3, guidance=guidance(*range(12)), num_return_sequences=3, do_sample=True
    )
    run(engine, item)
    assert [step.num_tokens for step in runner.steps] == [15 + 11, 2, 6, 6]


@pytest.mark.parametrize("resumed", [[[4], [5, 6]], [[], [5, 6]], [[4, 4, 4, 4], []]])
def test_resumed_sequences_go_on_as_if_nothing_had_happened(resumed: list[list[int]]) -> None:
    spec: dict[str, Any] = {"num_return_sequences": 2, "do_sample": True, "guidance": guidance(9, 9), "seed": 3}
    whole = request([1, 2, 3], max_new_tokens=6, **spec)
    ids = run(make_engine()[0], whole)[whole.request_id].ids
    cut = [ids[index][: len(tokens)] for index, tokens in enumerate(resumed)]
    rest = request([1, 2, 3], max_new_tokens=6, resumed_token_ids=cut, **spec)
    answer = run(make_engine()[0], rest)[rest.request_id]
    assert {index: cut[index] + answer.ids[index] for index in ids} == ids


def test_prompt_logprobs_are_the_prompts_not_the_negative_prompts() -> None:
    engine, _ = make_engine()
    item = request([1, 2, 3, 4], max_new_tokens=2, guidance=guidance(5, 6, 7), prompt_logprobs=0)
    started = run(engine, item)[item.request_id].started
    assert started is not None
    assert [entry.chosen and entry.chosen.token_id for entry in started.prompt_logprobs] == [None, 2, 3, 4]


def test_cached_tokens_are_the_prompts_not_the_negative_prompts() -> None:
    engine, _ = make_engine()
    run(engine, request(range(20), max_new_tokens=1))
    item = request(range(20), max_new_tokens=1, guidance=guidance(33))
    started = run(engine, item)[item.request_id].started
    assert started is not None
    assert started.cached_tokens == 16


def test_a_negative_prompt_takes_its_place_in_the_context_and_in_the_pool() -> None:
    config = engine_config(max_context_tokens=20)
    engine, _ = make_engine(config)
    item = request([1], max_new_tokens=100, guidance=guidance(*range(15)))
    assert len(run(engine, item)[item.request_id].ids[0]) == 5
    params = request([1], guidance=guidance(*range(15)), num_return_sequences=2, do_sample=True).params
    assert MODES.most_sequences(params) == 4
    assert MODES.blocks_needed(config, params, 1, 8) == config.blocks_needed(1, 8, 2) + config.blocks_needed(15, 8, 2)


def test_room_for_one_branch_is_not_made_of_the_others_cached_prefix() -> None:
    tables = BlockTables(BlockPool(7, 2), prefix_cache=True)
    off = params()
    # Everything is cached and not held, the branch's beginning longest ago: it would be evicted first.
    for tokens in ([6] * 4, list(range(10))):
        earlier = sequence(tokens, off)
        tables.start([(earlier, FoundPrefix(([],)))])
        earlier.num_computed_tokens = len(tokens)
        tables.computed(earlier, "")
        tables.free(earlier)
    prompt, branch = sequence([1, 2, 3, 4, 5, 6, 7, 8], off, seq_id=1), sequence([6] * 5, off, seq_id=2)
    tables.hash_blocks(branch, "")
    prefix = [block for block_hash in branch.block_hashes if (block := tables.pool.lookup(block_hash)) is not None]
    assert len(prefix) == 2
    tables.start([(prompt, FoundPrefix(([],))), (branch, FoundPrefix((prefix,)))])
    assert branch.block_table[:2] == prefix
    assert set(prompt.block_table).isdisjoint(branch.block_table)
    tables.pool.check_integrity()


class FailingRunner:
    """Runner whose model gives no numbers for unconditional branches."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = make_engine(config)[1]

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        result = self._runner.execute(output)
        bad = {one.seq_id for entry in output.scheduled for one in entry.sample if is_unconditional(one)}
        return RunnerOutput({}, {}, frozenset(bad)) if bad else result

    def release(self, seq_ids: Items[int]) -> None:
        self._runner.release(seq_ids)


def test_an_unconditional_branch_without_numbers_ends_its_request() -> None:
    config = engine_config()
    engine = Engine(config, FailingRunner(config), None)
    item = request([1, 2, 3], guidance=guidance(4))
    finished = run(engine, item)[item.request_id].finished
    assert finished is not None
    assert finished.error is not None
    assert finished.error.reason == "MODEL_OUTPUT_NAN"
