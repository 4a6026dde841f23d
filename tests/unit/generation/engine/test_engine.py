"""Outputs that a caller of the engine gets, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from factories.engine.fake_engine import Answer, FakeDrafter, collect, engine_config, make_engine, request, run
from penstock.common.errors import Aborted, Internal, InvalidArgument, PenstockError, ResourceExhausted, Unavailable
from penstock.generation.core.decoding_mode import GuidanceOptions
from penstock.generation.core.request import Emission, FinishedOutput, FinishReason, RequestTimings, SequenceFinish
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftRequest, SampledToken
from penstock.generation.engine.acceptance import most_output_tokens
from penstock.generation.engine.decoding.assisted import AssistanceOptions, AssistedGeneration
from penstock.generation.engine.decoding.base import Decision
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.decoding.parallel_sampling import ParallelSampling


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def finished(answer: Answer) -> FinishedOutput:
    assert answer.finished is not None
    return answer.finished


def error_of(answer: Answer) -> PenstockError:
    error = finished(answer).error
    assert error is not None
    return error


def test_a_request_is_told_its_start_every_token_and_its_end() -> None:
    engine, _ = make_engine(script={0: 4, 1: 5, 2: 6})
    answer = run(engine, item := request([1, 2, 3], max_new_tokens=10, eos_token_ids=(6,)))[item.request_id]
    assert [delta.token_ids for delta in answer.deltas] == [(4,), (5,), (6,)]
    assert answer.deltas[-1].finish == SequenceFinish(0, FinishReason.STOP_EOS, 3, stop_token_id=6)
    last = finished(answer)
    assert (last.prompt_tokens, last.completion_tokens, last.last_seq, last.error) == (3, 3, 2, None)


def test_every_returned_sequence_has_its_own_deltas_and_end_under_one_numbering() -> None:
    engine, _ = make_engine()
    item = request([1], max_new_tokens=3, num_return_sequences=3, do_sample=True)
    answer = run(engine, item)[item.request_id]
    assert sorted(answer.ids) == [0, 1, 2]
    assert [delta.finish is not None for delta in answer.deltas[-3:]] == [True] * 3
    assert [finish.index for finish in finished(answer).sequences] == [0, 1, 2]
    assert finished(answer).last_seq == 8


def test_logprobs_travel_with_their_tokens_and_add_up() -> None:
    engine, _ = make_engine()
    answer = run(engine, item := request([1], max_new_tokens=3, top_logprobs=2))[item.request_id]
    chosen = [delta.logprobs[0].chosen for delta in answer.deltas]
    total = sum(entry.logprob for entry in chosen if entry is not None)
    assert [entry.token_id for entry in chosen if entry is not None] == answer.ids[0]
    assert finished(answer).sequences[0].cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("length", [1, 2, 70])
def test_prompt_logprobs_have_one_entry_per_prompt_token(length: int) -> None:
    item = request([1] * length, prompt_logprobs=0, max_new_tokens=2)
    started = run(make_engine()[0], item)[item.request_id].started
    assert started is not None
    assert [entry.chosen is None for entry in started.prompt_logprobs] == [True] + [False] * (length - 1)


def test_prompt_logprobs_are_never_those_of_half_a_prompt() -> None:
    clock = Clock()
    engine, _ = make_engine(engine_config(max_batch_tokens=16), clock=clock)
    item = request([1] * 60, prompt_logprobs=0, max_time=1.0)
    engine.add(item)
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(answers, engine.step())
        clock.now += 0.6
    answer = answers[item.request_id]
    assert finished(answer).sequences[0].reason is FinishReason.MAX_TIME
    assert answer.started is not None
    assert answer.started.prompt_logprobs == ()


def test_timings_say_how_long_each_stage_took() -> None:
    clock = Clock()
    engine, _ = make_engine(engine_config(max_batch_tokens=16), clock=clock)
    engine.add(item := request([1] * 20, max_new_tokens=3))
    answers: dict[str, Answer] = {}
    while engine.has_work:
        clock.now += 1.0
        collect(answers, engine.step())
    assert finished(answers[item.request_id]).timings == RequestTimings(
        queue=1.0, prefill=1.0, decode=2.0, time_to_first_token=2.0, total=4.0
    )


def test_an_aborted_request_gives_its_blocks_back_at_once_and_says_what_it_had() -> None:
    engine, _ = make_engine()
    engine.add(item := request([1] * 6, max_new_tokens=9))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        collect(answers, engine.step())
    assert engine.abort(item.request_id)
    assert engine.load().kv_blocks_used == 0
    run(engine, answers=answers)
    last = finished(answers[item.request_id])
    assert last.sequences == (SequenceFinish(0, FinishReason.ABORTED, 3),)
    assert (last.completion_tokens, last.error) == (3, None)
    assert not engine.abort(item.request_id), "it is not live any more"


def test_queued_work_past_its_deadline_is_never_computed() -> None:
    clock = Clock()
    engine, runner = make_engine(engine_config(max_running_sequences=1), clock=clock)
    engine.add(request([1], max_new_tokens=3))
    engine.add(item := request([2], max_new_tokens=3, deadline=1.5, arrival_time=1.0))
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    clock.now = 2.0
    run(engine, answers=answers)
    assert error_of(answers[item.request_id]).reason == "DEADLINE_EXCEEDED"
    assert finished(answers[item.request_id]).timings.queue is None
    assert all(entry.sequence.token_ids[0] == 1 for step in runner.steps for entry in step.scheduled)


def test_running_work_past_its_deadline_stops() -> None:
    clock = Clock()
    engine, runner = make_engine(clock=clock)
    engine.add(item := request([1], max_new_tokens=30, deadline=1.0))
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    clock.now = 1.5
    run(engine, answers=answers)
    assert len(runner.steps) == 1
    assert error_of(answers[item.request_id]).metadata == {"stage": "generation"}
    assert finished(answers[item.request_id]).sequences[0].reason is FinishReason.ERROR


def test_max_time_ends_every_sequence_well_and_counts_from_the_first_step() -> None:
    clock = Clock()
    engine, _ = make_engine(clock=clock)
    clock.now = 100.0
    item = request([1], max_new_tokens=30, max_time=1.0, num_return_sequences=2, do_sample=True)
    engine.add(item)
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    clock.now = 100.9
    collect(answers, engine.step())
    clock.now = 101.1
    run(engine, answers=answers)
    last = finished(answers[item.request_id])
    assert [(end.reason, end.num_tokens) for end in last.sequences] == [(FinishReason.MAX_TIME, 2)] * 2
    assert last.error is None
    assert [delta.finish is not None for delta in answers[item.request_id].deltas][-2:] == [True, True]


def test_a_resumed_sequence_that_had_ended_ends_at_once_and_the_others_go_on() -> None:
    engine, _ = make_engine()
    resumed = [[7, 8, 9], [7]]
    item = request([1], max_new_tokens=3, num_return_sequences=2, do_sample=True, resumed_token_ids=resumed)
    answer = run(engine, item)[item.request_id]
    assert (answer.deltas[0].index, answer.deltas[0].token_ids) == (0, ())
    assert answer.deltas[0].finish == SequenceFinish(0, FinishReason.LENGTH, 3)
    assert len(answer.ids[1]) == 2
    assert finished(answer).completion_tokens == 6


def test_a_resumed_request_that_had_ended_altogether_ends_without_a_step() -> None:
    engine, runner = make_engine()
    answer = run(engine, item := request([1], max_new_tokens=2, resumed_token_ids=[[7, 8]]))[item.request_id]
    assert finished(answer).sequences == (SequenceFinish(0, FinishReason.LENGTH, 2),)
    assert not runner.steps


class Stumbling(ParallelSampling):
    """Strategy that fails at its second token when its first prompt token is 13."""

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        for sequence in sampled:
            if sequence.token_ids[0] == 13 and sequence.num_output_tokens == 1:
                raise RuntimeError("stumbled")
        return super().advance(sampled)


class Unsteady(AssistedGeneration):
    """Strategy of which a method fails when the first prompt token is its number here."""

    METHODS = ("draft_requests", "take_drafts", "end")

    def draft_requests(self) -> list[DraftRequest]:
        self._stumble("draft_requests")
        return super().draft_requests()

    def take_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:
        self._stumble("take_drafts")
        super().take_drafts(drafts)

    def end(self, reason: FinishReason) -> list[Emission]:
        if reason is FinishReason.MAX_TIME:
            self._stumble("end")
        return super().end(reason)

    def _stumble(self, name: str) -> None:
        if self.METHODS.index(name) == self._request.prompt_token_ids[0]:
            raise RuntimeError("stumbled")


@pytest.mark.parametrize("method", Unsteady.METHODS)
def test_whatever_a_strategy_is_asked_only_its_own_request_fails(method: str) -> None:
    clock = Clock()
    engine, _ = make_engine(strategy=Unsteady, drafter=FakeDrafter(0.5), clock=clock)
    options: dict[str, Any] = {"max_new_tokens": 20, "mode": AssistanceOptions(num_assistant_tokens=2)}
    bad = request([Unsteady.METHODS.index(method), 1], max_time=1.0, **options)
    good = request([9, 1], **options)
    answers: dict[str, Answer] = {}
    engine.add(bad)
    engine.add(good)
    collect(answers, engine.step())
    clock.now = 2.0
    run(engine, answers=answers)
    assert error_of(answers[bad.request_id]).reason == "DECODING_FAILED"
    assert finished(answers[good.request_id]).error is None
    assert len(answers[good.request_id].ids[0]) == 20
    assert engine.load().kv_blocks_used == 0
    engine.check_integrity()


def test_a_request_that_fails_by_itself_ends_alone() -> None:
    engine, _ = make_engine(strategy=Stumbling)
    bad, good = request([13, 1], max_new_tokens=5), request([1, 2], max_new_tokens=5)
    answers = run(engine, bad, good)
    assert error_of(answers[bad.request_id]).reason == "DECODING_FAILED"
    assert "stumbled" not in error_of(answers[bad.request_id]).message
    assert len(answers[bad.request_id].ids[0]) == 1
    assert len(answers[good.request_id].ids[0]) == 5
    assert engine.load().kv_blocks_used == 0


def test_a_broken_step_is_raised_and_then_every_request_gets_its_end() -> None:
    engine, runner = make_engine(engine_config(max_running_sequences=1))
    running, queued = request([1], max_new_tokens=9), request([2], max_new_tokens=9)
    engine.add(running)
    engine.add(queued)
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    runner.fail_at_step = 2
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    collect(answers, engine.fail_all())
    errors = [error_of(answers[item.request_id]) for item in (running, queued)]
    assert [error.reason for error in errors] == ["STEP_FAILED", "ENGINE_FAILED"]
    assert isinstance(errors[0], Internal)
    assert isinstance(errors[1], Unavailable), "nothing of it was sent, and nothing of it was in the step"


def test_stopping_tells_who_may_retry_elsewhere() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=1))
    running, queued = request([1], max_new_tokens=9), request([2], max_new_tokens=9)
    engine.add(running)
    engine.add(queued)
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    collect(answers, engine.stop_all())
    assert isinstance(error_of(answers[queued.request_id]), Unavailable)
    assert isinstance(error_of(answers[running.request_id]), Aborted)
    assert error_of(answers[running.request_id]).metadata == {"last_seq": "0"}


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ([1], {"priority": 101}, "priority"),
        ([1], {"priority": -(2**31)}, "priority"),
        ([1], {"num_return_sequences": 17}, "config.num_return_sequences"),
        ([1], {"num_return_sequences": 9, "guidance": GuidanceOptions(2.0)}, "config.num_return_sequences"),
        ([1], {"mode": BeamOptions(17)}, "config.num_beams"),
        ([1], {"mode": ContrastiveOptions(0.6, 17)}, "config.top_k"),
    ],
)
def test_impossible_requests_are_refused_by_field(prompt: list[int], fields: dict[str, Any], field: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidArgument) as caught:
        engine.check(request(prompt, **fields))
    assert caught.value.field == field


def test_resumed_ids_that_go_on_after_their_end_are_refused() -> None:
    engine, _ = make_engine()
    item = request([1], resumed_token_ids=[[1, 2, 3]], eos_token_ids=(2,))
    engine.check(item)
    with pytest.raises(InvalidArgument) as caught:
        engine.add(item)
    assert caught.value.field == "resumed_token_ids"
    assert not engine.has_work


def test_what_an_empty_pool_could_not_hold_is_refused_and_what_it_just_holds_runs() -> None:
    config = engine_config(num_blocks=10)
    limit = most_output_tokens(config, MODES, SamplingParams(1, num_return_sequences=2), 10)
    engine, _ = make_engine(config)
    with pytest.raises(ResourceExhausted) as caught:
        engine.check(request([1] * 10, max_new_tokens=limit + 1, num_return_sequences=2))
    assert caught.value.reason == "EXCEEDS_KV_POOL"
    item = request([1] * 10, max_new_tokens=limit, num_return_sequences=2, do_sample=True)
    assert len(run(engine, item)[item.request_id].ids[1]) == limit


def test_what_a_strategy_makes_is_what_is_delivered() -> None:
    made: list[Emission] = []

    class Remembering(ParallelSampling):
        def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
            decision = super().advance(sampled)
            made.extend(decision.emissions)
            return decision

    engine, _ = make_engine(strategy=Remembering)
    item = request([1], max_new_tokens=4, num_return_sequences=2, do_sample=True)
    deltas = run(engine, item)[item.request_id].deltas
    assert len(deltas) == 8
    assert all(delta is emission for delta, emission in zip(deltas, made, strict=True))
    assert [emission.seq for emission in made] == list(range(8))


def test_load_says_what_waits_runs_and_is_held() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=2, max_batch_tokens=16))
    for prompt in ([1] * 20, [2], [3] * 5):
        engine.add(request(prompt, max_new_tokens=4))
    engine.step()
    load = engine.load()
    assert (load.waiting_requests, load.running_requests, load.running_sequences) == (1, 2, 2)
    assert (load.step, load.group_blocks_used) == (1, engine._scheduler.pool.used_by_group)
    assert load.measured_at > 0
    # The first has 12 rows of 16, and then the 3 that the second has no use for.
    assert load.pending_prompt_tokens == 5 + 5
    assert load.kv_blocks_used == 6
    assert load.kv_blocks_free + load.kv_blocks_evictable + load.kv_blocks_used == load.kv_blocks_total == 64


def test_load_tells_sequences_from_requests() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=8))
    engine.add(request([1, 2], max_new_tokens=4, do_sample=True, num_return_sequences=3))
    engine.add(request([3], max_new_tokens=4))
    engine.step()
    load = engine.load()
    assert (load.waiting_requests, load.running_requests, load.running_sequences) == (0, 2, 4)


def test_counters_count() -> None:
    engine, _ = make_engine()
    run(engine, request([1] * 8, max_new_tokens=3))
    run(engine, request([1] * 8, max_new_tokens=3))
    stats = engine.stats
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens, stats.requests_finished) == (6, 16, 6, 2)
    assert (stats.prefix_lookup_tokens, stats.prefix_hit_tokens, stats.computed_tokens) == (16, 4, 16)
    assert [sample.num_tokens for sample in stats.drain_steps()] == [8, 1, 1, 4, 1, 1]
    assert stats.drain_steps() == []


def test_a_live_request_id_is_not_accepted_twice() -> None:
    engine, _ = make_engine()
    engine.add(request([1], request_id="same"))
    with pytest.raises(ValueError, match="live"):
        engine.add(request([1], request_id="same"))
