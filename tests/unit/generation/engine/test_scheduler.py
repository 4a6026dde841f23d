"""Order in which sequences are computed. The runner has no model; the steps that it saw are the evidence."""

from __future__ import annotations

from factories.engine.fake_engine import (
    Answer,
    FakeRunner,
    collect,
    engine_config,
    make_engine,
    prompt_embeds,
    request,
    run,
)
from penstock.generation.core.prompt_embeds import PLACEHOLDER
from penstock.generation.core.request import FinishReason, Request


def rows(runner: FakeRunner) -> list[dict[int, int]]:
    """Per step: first prompt token of a sequence -> rows scheduled for it."""
    return [{entry.sequence.token_ids[0]: entry.num_tokens for entry in step.scheduled} for step in runner.steps]


def test_a_prompt_over_the_budget_is_computed_in_chunks_and_draws_only_at_its_end() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16))
    run(engine, request([1] * 40, max_new_tokens=2))
    assert [step.num_tokens for step in runner.steps] == [16, 16, 8, 1]
    assert [bool(step.scheduled[0].sample) for step in runner.steps] == [False, False, True, True]


def test_decoding_sequences_come_before_prompts_in_every_step() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16))
    answers: dict[str, Answer] = {}
    engine.add(request([1], max_new_tokens=6))
    collect(answers, engine.step())
    run(engine, request([2] * 40, max_new_tokens=1), answers=answers)
    assert rows(runner)[1:4] == [{1: 1, 2: 15}, {1: 1, 2: 15}, {1: 1, 2: 10}]


def test_a_long_prompt_leaves_a_share_of_each_step_to_those_who_wait() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16, long_prompt_share=0.75))
    run(engine, request([1] * 100, max_new_tokens=1), request([2] * 4, max_new_tokens=1))
    assert rows(runner)[0] == {1: 12, 2: 4}


def test_admission_is_by_priority_then_by_arrival() -> None:
    engine, runner = make_engine(engine_config(max_running_sequences=1))
    run(
        engine,
        request([1], max_new_tokens=1, arrival_time=0.0),
        request([2], max_new_tokens=1, arrival_time=1.0, priority=1),
        request([3], max_new_tokens=1, arrival_time=0.5),
    )
    assert [list(step) for step in rows(runner)] == [[2], [1], [3]]


def test_waiting_long_enough_outweighs_a_higher_priority() -> None:
    engine, runner = make_engine(engine_config(max_running_sequences=1, priority_seconds=30.0))
    run(
        engine,
        request([1], max_new_tokens=1, arrival_time=31.0, priority=1),
        request([2], max_new_tokens=1, arrival_time=0.0),
    )
    assert [list(step) for step in rows(runner)] == [[2], [1]]


def test_nobody_passes_a_waiting_request_that_does_not_fit_yet() -> None:
    engine, runner = make_engine(engine_config(num_blocks=10, reserve_share=0.0))
    run(
        engine,
        request([1] * 24, max_new_tokens=4, arrival_time=0.0),
        request([2] * 30, max_new_tokens=4, arrival_time=1.0),
        request([3], max_new_tokens=1, arrival_time=2.0),
    )
    first_seen = {token: step for step, entries in reversed(list(enumerate(rows(runner)))) for token in entries}
    assert first_seen[2] > first_seen[1]
    assert first_seen[3] >= first_seen[2]


def test_admission_leaves_the_reserve_free_while_others_run() -> None:
    engine, _ = make_engine(engine_config(num_blocks=10, reserve_share=0.3))
    engine.add(request([1] * 8, max_new_tokens=3))
    engine.add(request([2] * 24, max_new_tokens=3))
    engine.step()
    assert engine.load().running_requests == 1
    assert engine.num_waiting == 1


def test_when_blocks_run_out_the_lowest_priority_latest_arrival_gives_way_and_loses_nothing() -> None:
    def requests() -> list[Request]:
        return [
            request([1] * 8, max_new_tokens=20, priority=1, arrival_time=2.0, do_sample=True, seed=1),
            request([2] * 8, max_new_tokens=20, arrival_time=0.0, do_sample=True, seed=2),
            request([3] * 8, max_new_tokens=20, arrival_time=1.0, do_sample=True, seed=3),
        ]

    roomy, _ = make_engine()
    untroubled = requests()
    calm = run(roomy, *untroubled)
    tight, runner = make_engine(engine_config(num_blocks=11, reserve_share=0.0))
    submitted = requests()
    answers = run(tight, *submitted)
    assert tight.stats.preemptions > 0
    assert [answers[item.request_id].ids for item in submitted] == [calm[item.request_id].ids for item in untroubled]
    of_the_first = [number for number, step in enumerate(rows(runner)) if 1 in step]
    assert of_the_first == list(range(20)), "the highest priority ran through without a gap"


def test_a_preempted_request_with_several_sequences_shares_its_prompt_again() -> None:
    config = engine_config(num_blocks=14, reserve_share=0.0)
    alone, _ = make_engine()
    wide = {"max_new_tokens": 8, "num_return_sequences": 3, "do_sample": True, "seed": 5}
    expected = run(alone, item := request([2] * 18, **wide))[item.request_id].ids
    engine, _ = make_engine(config)
    engine.add(request([1] * 4, max_new_tokens=30, priority=1))
    late = request([2] * 18, **wide)
    answers = run(engine, late)
    assert engine.stats.preemptions > 0
    assert answers[late.request_id].ids == expected


def test_several_sequences_compute_their_prompt_once_and_copy_only_its_last_block() -> None:
    engine, runner = make_engine()
    run(engine, request([1] * 6, max_new_tokens=3, num_return_sequences=4, do_sample=True))
    assert [step.num_tokens for step in runner.steps] == [6, 4, 4]
    assert len(runner.steps[0].scheduled[0].sample) == 4
    assert len(runner.steps[1].copies) == 3
    assert engine.stats.copy_on_write_blocks == 3


def test_a_cached_prefix_is_not_computed_again_but_one_token_is() -> None:
    engine, runner = make_engine()
    run(engine, request([1] * 8, max_new_tokens=1))
    answers = run(engine, item := request([1] * 8, max_new_tokens=1))
    assert [step.num_tokens for step in runner.steps] == [8, 4]
    finished = answers[item.request_id].finished
    assert finished is not None
    assert finished.cached_tokens == 4
    assert engine.stats.prefix_hit_tokens == 4


def test_a_generated_answer_is_a_prefix_for_the_next_turn() -> None:
    engine, runner = make_engine()
    answer = run(engine, first := request([1] * 8, max_new_tokens=9))[first.request_id]
    run(engine, request([1] * 8 + answer.ids[0] + [2], max_new_tokens=1))
    assert runner.steps[-1].scheduled[0].start == 16


def test_prefixes_are_not_shared_between_salts() -> None:
    engine, runner = make_engine()
    run(engine, request([1] * 8, max_new_tokens=1, cache_salt="a"))
    run(engine, request([1] * 8, max_new_tokens=1, cache_salt="b"))
    assert [step.num_tokens for step in runner.steps] == [8, 8]


def test_prompt_logprobs_need_every_row_so_they_take_no_cached_prefix() -> None:
    engine, runner = make_engine()
    run(engine, request([1] * 8, max_new_tokens=1))
    answers = run(engine, item := request([1] * 8, max_new_tokens=1, prompt_logprobs=0))
    assert [step.num_tokens for step in runner.steps] == [8, 8]
    started = answers[item.request_id].started
    assert started is not None
    assert [entry.chosen is None for entry in started.prompt_logprobs] == [True] + [False] * 7


def test_an_identical_prompt_that_waits_its_turn_shares_the_blocks_computed_meanwhile() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16))
    run(engine, request([1] * 16, max_new_tokens=4), request([1] * 16, max_new_tokens=4))
    assert [step.num_tokens for step in runner.steps][:2] == [16, 5]


def test_the_cache_can_be_switched_off_and_cleared() -> None:
    off, runner = make_engine(engine_config(prefix_cache=False))
    run(off, request([1] * 8, max_new_tokens=1))
    run(off, request([1] * 8, max_new_tokens=1))
    assert [step.num_tokens for step in runner.steps] == [8, 8]
    on, runner = make_engine()
    run(on, request([1] * 8, max_new_tokens=1))
    assert on.clear_cache() == 2
    run(on, request([1] * 8, max_new_tokens=1))
    assert [step.num_tokens for step in runner.steps] == [8, 8]


def test_the_runner_is_told_which_sequences_are_gone() -> None:
    engine, runner = make_engine()
    run(engine, request([1], max_new_tokens=1), request([2], max_new_tokens=3))
    gone = runner.steps[0].scheduled[0].sequence.seq_id
    assert [step.released for step in runner.steps] == [(), (gone,), ()]
    # Of the last one no step can tell.
    assert not runner.known


def test_a_context_that_is_full_ends_the_sequence_by_length() -> None:
    engine, _ = make_engine(engine_config(max_context_tokens=10))
    answers = run(engine, item := request([1] * 6, max_new_tokens=100))
    finished = answers[item.request_id].finished
    assert finished is not None
    assert finished.sequences[0].reason is FinishReason.LENGTH
    assert finished.sequences[0].num_tokens == 4


def test_only_steps_with_embeddings_to_compute_say_so() -> None:
    config = engine_config(max_batch_tokens=4, max_running_sequences=4, prefix_cache=False)
    engine, runner = make_engine(config)
    ordinary = request([1, 2, 3], max_new_tokens=4)
    embeds = prompt_embeds(range(9), config.block_size)
    run(engine, ordinary, request([PLACEHOLDER] * 9 + [5, 6], max_new_tokens=6, embeds=embeds))
    for step in runner.steps:
        starts = [entry.start for entry in step.scheduled if entry.sequence.embeds is not None]
        assert step.has_embeds == any(start < 9 for start in starts)
    assert [step.has_embeds for step in runner.steps][-5:] == [False] * 5


def test_rows_of_embeddings_are_shared_with_equal_ones_alone() -> None:
    config = engine_config()
    engine, _ = make_engine(config)
    head = list(range(8))
    prompts = [[*head, 8, 9, 10], [*head, 8, 9, 10], [*head, 9, 9, 9], [1, *head[1:], 8, 9, 10]]
    cached = []
    for kinds in prompts:
        embeds = prompt_embeds(kinds, config.block_size)
        # FakeRunner fails where a block holds other embeddings than its sequence has.
        answer = run(engine, request([PLACEHOLDER] * len(kinds), max_new_tokens=3, embeds=embeds)).popitem()[1]
        assert answer.started is not None
        cached.append(answer.started.cached_tokens)
    assert cached == [0, 8, 8, 0]
