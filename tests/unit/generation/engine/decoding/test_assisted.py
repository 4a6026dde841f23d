"""Assisted generation changes nothing but the number of steps."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories.engine.fake_engine import (
    Answer,
    FakeDrafter,
    FakeRunner,
    collect,
    engine_config,
    make_engine,
    request,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.decoding_mode import PLAIN, AssistantSchedule, DecodingMode
from penstock.generation.core.request import FinishReason
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftKind, RunnerOutput, SampledToken, SchedulerOutput
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.ngram_memory import TenantMemory
from penstock.text.token_bytes import TokenBytes

# Few tokens, so that lookups are often right and stop conditions are met.
VOCABULARY = 4
TEXT = TokenBytes({token: bytes([97 + token]) for token in range(VOCABULARY)}, special=[])
LOOKUP = AssistanceOptions(prompt_lookup_num_tokens=6, max_matching_ngram_size=2)
MODEL = AssistanceOptions(num_assistant_tokens=5, confidence_threshold=0.0)
MEMORY = AssistanceOptions(ngram_memory_num_tokens=6, ngram_memory_match=2)
LOOKAHEAD = AssistanceOptions(lookahead_window=5, lookahead_ngram_size=3)
ROOMY = engine_config(num_blocks=400, max_batch_tokens=1000, max_draft_rows=200)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a request without assistance."""
    head = draw(st.sampled_from([[], [1, 2, 3] * 3, [1] * 17]))
    return {
        "prompt": head + draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)),
        "max_new_tokens": draw(st.integers(1, 24)),
        "num_return_sequences": draw(st.sampled_from([1, 1, 1, 2, 4])),
        "do_sample": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "eos_token_ids": draw(st.sampled_from([(), (3,)])),
        "ignore_eos": draw(st.booleans()),
        "stop_strings": draw(st.sampled_from([(), ("abca",), ("bb", "cab")])),
        "stop_token_ids": draw(st.sampled_from([(), ((2, 1, 0),)])),
        "top_logprobs": draw(st.sampled_from([None, 0, 2])),
        "priority": draw(st.integers(0, 2)),
    }


assistances = st.one_of(
    st.builds(
        AssistanceOptions,
        prompt_lookup_num_tokens=st.integers(1, 9),
        max_matching_ngram_size=st.integers(1, 3),
    ),
    st.builds(
        AssistanceOptions,
        num_assistant_tokens=st.integers(1, 9),
        schedule=st.sampled_from(AssistantSchedule),
    ),
    st.builds(
        AssistanceOptions,
        prompt_lookup_num_tokens=st.sampled_from([None, 4]),
        ngram_memory_num_tokens=st.integers(1, 9),
        ngram_memory_match=st.integers(2, 4),
        lookahead_window=st.sampled_from([None, 3]),
    ),
    st.builds(
        AssistanceOptions,
        lookahead_window=st.integers(1, 9),
        lookahead_ngram_size=st.integers(2, 5),
        lookahead_guesses=st.integers(1, 4),
    ),
)
configs = st.builds(
    engine_config,
    num_blocks=st.integers(50, 90),
    block_size=st.integers(1, 6),
    max_running_sequences=st.integers(4, 9),
    max_batch_tokens=st.integers(9, 40),
    max_draft_rows=st.integers(0, 30),
    prefix_cache=st.booleans(),
    ngram_memory_tokens=st.sampled_from([256, 65_536]),
    reserve_share=st.sampled_from([0.0, 0.1]),
)
drafters = st.builds(
    FakeDrafter,
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    vocab_size=st.just(VOCABULARY),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


def engine_of(config: Any = ROOMY, **kwargs: Any) -> tuple[Engine, FakeRunner]:
    return make_engine(config, vocab_size=VOCABULARY, stop_text=TEXT, **kwargs)


def alone(spec: dict[str, Any]) -> Answer:
    item = request(**spec)
    return run(engine_of()[0], item)[item.request_id]


def fits(config: Any, spec: dict[str, Any]) -> bool:
    count = spec["num_return_sequences"]
    return bool(config.blocks_needed(len(spec["prompt"]), spec["max_new_tokens"], count) <= config.num_blocks)


def words(answer: Answer) -> list[Any]:
    """All that a caller gets, however it is cut into deltas."""
    assert answer.finished is not None
    logprobs = [[entry for delta in answer.deltas if delta.index == i for entry in delta.logprobs] for i in range(4)]
    # Sums of the same numbers in the same order.
    return [answer.ids, logprobs, answer.finished.sequences, answer.finished.completion_tokens]


@settings(max_examples=30, deadline=None)
@given(
    drawn=st.lists(st.tuples(specs(), st.just(PLAIN) | assistances), min_size=1, max_size=7),
    config=configs,
    drafter=drafters,
    data=st.data(),
)
def test_assisted_requests_get_exactly_what_they_get_unassisted(
    drawn: list[tuple[dict[str, Any], DecodingMode]], config: Any, drafter: FakeDrafter, data: st.DataObject
) -> None:
    engine, _ = engine_of(config, drafter=drafter)
    answers: dict[str, Answer] = {}
    submitted = []
    for spec, assistance in drawn:
        if fits(config, spec):
            item = request(**spec, mode=assistance)
            engine.add(item)
            submitted.append((spec, item))
        for _ in range(data.draw(st.integers(0, 4))):
            collect(answers, engine.step())
            engine.check_integrity()
    run(engine, answers=answers)
    for spec, item in submitted:
        assert words(answers[item.request_id]) == words(alone(spec))
    assert engine.load().kv_blocks_used == 0


@settings(max_examples=30, deadline=None)
@given(spec=specs(), assistance=assistances, drafter=drafters, moment=st.integers(0, 12))
def test_an_aborted_request_has_counted_no_draft_as_output(
    spec: dict[str, Any], assistance: AssistanceOptions, drafter: FakeDrafter, moment: int
) -> None:
    engine, _ = engine_of(drafter=drafter)
    item = request(**spec, mode=assistance)
    answers: dict[str, Answer] = {}
    engine.add(item)
    for _ in range(moment):
        collect(answers, engine.step())
    engine.abort(item.request_id)
    run(engine, answers=answers)
    answer = answers[item.request_id]
    assert answer.finished is not None
    assert {end.index: end.num_tokens for end in answer.finished.sequences} == {
        end.index: len(answer.ids.get(end.index, [])) for end in answer.finished.sequences
    }


def test_right_drafts_save_steps_and_are_counted() -> None:
    drafter = FakeDrafter(1.0)
    engine, runner = make_engine(drafter=drafter)
    item = request([1, 2, 3], max_new_tokens=19, mode=MODEL)
    finished = run(engine, item)[item.request_id].finished
    assert finished is not None
    # The prompt's draw, then 6 tokens a step: 5 drafts and the token after them.
    assert [step.num_tokens for step in runner.steps] == [3, 6, 6, 6]
    assert (finished.accepted_draft_tokens, finished.rejected_draft_tokens) == (15, 0)
    assert engine.stats.accepted_draft_tokens == 15


def test_wrong_drafts_cost_no_step_and_are_counted() -> None:
    engine, runner = make_engine(drafter=FakeDrafter(0.0))
    item = request([1, 2, 3], max_new_tokens=4, mode=MODEL)
    finished = run(engine, item)[item.request_id].finished
    assert finished is not None
    # Never more drafts than the length limit leaves a use for.
    assert [step.num_tokens for step in runner.steps] == [3, 3, 2, 1]
    assert (finished.accepted_draft_tokens, finished.rejected_draft_tokens) == (0, 3)


def test_a_prompt_lookup_continues_a_repetition() -> None:
    engine, runner = make_engine(script=dict(enumerate([7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9])))
    item = request([1, 7, 8, 9, 7, 8, 9], max_new_tokens=12, mode=LOOKUP)
    answer = run(engine, item)[item.request_id]
    assert answer.ids[0] == [7, 8, 9] * 4
    assert len(runner.steps) < 6
    assert answer.finished is not None
    assert answer.finished.accepted_draft_tokens > 6


@pytest.mark.parametrize("schedule", list(AssistantSchedule))
def test_the_number_of_drafts_follows_the_schedule(schedule: AssistantSchedule) -> None:
    options = AssistanceOptions(num_assistant_tokens=4, schedule=schedule)
    good, bad = FakeDrafter(1.0), FakeDrafter(0.0)
    for drafter, expected in ((good, [4, 6, 8, 10]), (bad, [4, 3, 2, 1, 1])):
        engine, _ = make_engine(ROOMY, drafter=drafter)
        run(engine, request([1, 2], max_new_tokens=60, mode=options))
        asked = [call[0].num_tokens for call in drafter.calls[: len(expected)]]
        assert asked == ([4] * len(expected) if schedule is AssistantSchedule.CONSTANT else expected)


def test_drafts_fill_a_step_up_to_its_bound_and_end_where_it_is_full() -> None:
    config = engine_config(max_draft_rows=10, num_blocks=300, max_batch_tokens=200)
    for count, expected in ((1, 6), (2, 10), (4, 10), (10, 10), (12, 12)):
        engine, runner = make_engine(config, drafter=FakeDrafter(0.0))
        run(engine, *(request([number], max_new_tokens=30, mode=MODEL) for number in range(count)))
        assert runner.steps[5].num_tokens == expected


def test_lookup_drafts_that_a_step_has_no_room_for_wait_for_the_next() -> None:
    script = dict(enumerate([7, 8] * 12))
    engine, runner = make_engine(engine_config(max_draft_rows=3), script=script)
    item = request([7, 8, 7, 8], max_new_tokens=24, mode=LOOKUP)
    answer = run(engine, item)[item.request_id]
    assert answer.ids[0] == [7, 8] * 12
    assert max(step.num_tokens for step in runner.steps[1:]) == 3
    assert answer.finished is not None
    assert answer.finished.rejected_draft_tokens == 0


def test_nobody_gives_way_for_a_draft() -> None:
    """Two requests that fit the pool exactly, but not with drafts beyond what they will keep."""
    config = engine_config(num_blocks=12, block_size=1, reserve_share=0.0)
    engine, _ = make_engine(config, drafter=FakeDrafter(0.0))
    run(engine, *(request([number, 1], max_new_tokens=5, mode=MODEL) for number in (0, 1)))
    assert engine.stats.preemptions == 0


def test_the_drafter_is_told_of_every_sequence_that_is_gone() -> None:
    drafter = FakeDrafter(0.5)
    engine, _ = make_engine(drafter=drafter)
    run(engine, request([1], max_new_tokens=5, num_return_sequences=3, do_sample=True, mode=MODEL))
    run(engine, request([2], max_new_tokens=2))
    assert {order.sequence.seq_id for call in drafter.calls for order in call} <= set(drafter.released)


def test_max_time_ends_a_request_with_drafts_at_its_last_token() -> None:
    now = [0.0]
    engine, _ = make_engine(drafter=FakeDrafter(1.0), clock=lambda: now[0])
    item = request([1, 2], max_new_tokens=60, max_time=1.0, mode=MODEL)
    answers: dict[str, Answer] = {}
    engine.add(item)
    for _ in range(4):
        collect(answers, engine.step())
    now[0] = 2.0
    run(engine, answers=answers)
    answer = answers[item.request_id]
    assert answer.finished is not None
    end = answer.finished.sequences[0]
    assert end.reason is FinishReason.MAX_TIME
    assert end.num_tokens == len(answer.ids[0])


class Alternating:
    """A grammar in which even and odd tokens take turns, and `length` tokens are complete."""

    def __init__(self, length: int, taken: int = 0, parity: int = 0) -> None:
        self.length, self.taken, self.parity = length, taken, parity

    is_cut = False

    def start(self, eos_token_ids: tuple[int, ...], max_tokens: int | None = None) -> Alternating:
        return Alternating(self.length)

    @property
    def is_free(self) -> bool:
        return False

    @property
    def is_done(self) -> bool:
        return self.taken == self.length

    def advance(self, token_id: int) -> bool:
        if self.is_done or token_id % 2 != self.parity:
            return False
        self.taken, self.parity = self.taken + 1, 1 - self.parity
        return True

    def copy(self) -> Alternating:
        return Alternating(self.length, self.taken, self.parity)


class GrammaticalRunner(FakeRunner):
    """Runner that draws the best token that the drawer's own grammar state allows."""

    def draw(self, sequence: Sequence, context: Items[int]) -> SampledToken:
        assert sequence.grammar is not None
        assert not sequence.grammar.is_done
        wanted = super().draw(sequence, context).token_id
        return SampledToken(next(t for t in range(wanted, wanted + 2) if sequence.grammar.copy().advance(t)))


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 30),
    quality=st.sampled_from([0.3, 1.0]),
    assistance=st.sampled_from([LOOKUP, MODEL, MEMORY, LOOKAHEAD]),
    n=st.integers(1, 2),
)
def test_every_verifier_draws_by_its_own_state_of_the_grammar(
    length: int, quality: float, assistance: AssistanceOptions, n: int
) -> None:
    ids = []
    for mode in (PLAIN, assistance):
        drafter = FakeDrafter(quality, vocab_size=VOCABULARY)
        engine = Engine(ROOMY, GrammaticalRunner(ROOMY, vocab_size=VOCABULARY), None, drafter=drafter)
        item = request([1, 0, 1, 0], max_new_tokens=40, mode=mode, do_sample=True, num_return_sequences=n)
        item.grammar = Alternating(length)
        answer = run(engine, item)[item.request_id]
        assert answer.finished is not None
        assert {end.reason for end in answer.finished.sequences} == {FinishReason.CONSTRAINT_DONE}
        ids.append(answer.ids)
    assert ids[0] == ids[1]


def test_a_very_long_prompt_is_indexed_over_several_steps() -> None:
    config = engine_config(num_blocks=40, block_size=512, max_context_tokens=20_000, max_batch_tokens=20_000)
    engine, runner = make_engine(config, script=dict.fromkeys(range(12), 7))
    item = request([*range(100, 9100), 7, 7], max_new_tokens=12, mode=LOOKUP)
    answer = run(engine, item)[item.request_id]
    assert answer.ids[0] == [7] * 12
    # 4096 prompt tokens a step: the third knows them all.
    assert [step.num_tokens for step in runner.steps][:4] == [9002, 1, 1, 4]


def drafts_by_kind(engine: Engine) -> dict[DraftKind, tuple[int, int]]:
    """Accepted and rejected drafts of the kinds that had some."""
    return {kind: counts for kind, counts in engine.stats.draft_tokens.items() if any(counts)}


def test_an_output_is_drafted_for_whoever_has_it_again() -> None:
    engine, runner = make_engine()
    first, again = (request([4, 5, 6], max_new_tokens=40, mode=MEMORY) for _ in range(2))
    ids = run(engine, first)[first.request_id].ids
    assert drafts_by_kind(engine) == {}
    before = len(runner.steps)
    answer = run(engine, again)[again.request_id]
    assert answer.ids == ids
    # The prompt's draw, then up to 7 tokens a step: the first match is of the prompt's 3 tokens and the draw.
    assert len(runner.steps) - before <= 9
    accepted, rejected = engine.stats.draft_tokens[DraftKind.NGRAM_MEMORY]
    assert answer.finished is not None
    assert (accepted, rejected) == (answer.finished.accepted_draft_tokens, 0)
    assert accepted > 25
    assert engine.stats.memory.tenants == 1
    assert engine.stats.memory.tokens == 40 + 3 + 1 + 40 + 3 + 1


@pytest.mark.parametrize(
    "other", [{"cache_salt": "b"}, {"fair_share_key": "b"}, {"cache_salt": "ab", "fair_share_key": ""}]
)
def test_no_tenant_gets_drafts_from_anothers_outputs(other: dict[str, str]) -> None:
    engine, _ = make_engine()
    own = {"cache_salt": "a", "fair_share_key": "a"}
    run(engine, request([4, 5, 6], max_new_tokens=40, mode=MEMORY, **own))
    run(engine, request([4, 5, 6], max_new_tokens=40, mode=MEMORY, **{**own, **other}))
    assert drafts_by_kind(engine) == {}
    run(engine, request([4, 5, 6], max_new_tokens=40, mode=MEMORY, **own))
    assert drafts_by_kind(engine).keys() == {DraftKind.NGRAM_MEMORY}


def test_no_adapter_gets_drafts_from_anothers_outputs() -> None:
    engine, _ = make_engine()

    def asked(generation: str | None) -> dict[DraftKind, tuple[int, int]]:
        item = request([4, 5, 6], max_new_tokens=40, mode=MEMORY)
        if generation is not None:
            item.adapter = Adapter("a", Path(), generation, 8, (), 0, None)
        run(engine, item)
        return drafts_by_kind(engine)

    for generation in (None, "first reading", "second reading"):
        assert asked(generation) == {}
    assert engine.stats.memory.tenants == 3
    assert asked("first reading").keys() == {DraftKind.NGRAM_MEMORY}


def test_only_requests_that_ask_for_it_are_remembered() -> None:
    engine, _ = make_engine()
    for mode in (PLAIN, LOOKUP, LOOKAHEAD):
        run(engine, request([4, 5, 6], max_new_tokens=40, mode=mode))
    assert engine.stats.memory.tenants == 0
    run(engine, request([4, 5, 6], max_new_tokens=40, mode=MEMORY))
    assert DraftKind.NGRAM_MEMORY not in drafts_by_kind(engine)


def test_a_long_output_is_remembered_before_its_end_and_an_aborted_one_as_far_as_it_went() -> None:
    engine, _ = make_engine(engine_config(num_blocks=200, max_context_tokens=2000))
    item = request([4, 5, 6], max_new_tokens=600, mode=MEMORY)
    engine.add(item)
    for _ in range(300):
        engine.step()
    other = request([4, 5, 6], max_new_tokens=40, mode=MEMORY)
    engine.add(other)
    for _ in range(20):
        engine.step()
    assert engine.stats.draft_tokens[DraftKind.NGRAM_MEMORY][0] > 20
    engine.abort(item.request_id)
    engine.step()
    assert engine.stats.memory.tokens > 300
    engine.check_integrity()


def test_lookahead_saves_steps_where_the_text_repeats_itself_and_is_counted() -> None:
    engine, runner = make_engine(script=dict(enumerate([7, 8, 9, 10] * 12)))
    item = request([1, 2], max_new_tokens=48, mode=LOOKAHEAD)
    answer = run(engine, item)[item.request_id]
    assert answer.ids[0] == [7, 8, 9, 10] * 12
    assert len(runner.steps) < 30
    assert drafts_by_kind(engine)[DraftKind.LOOKAHEAD][0] > 18


@pytest.mark.parametrize("mode", [MEMORY, LOOKAHEAD])
def test_drafting_pauses_while_nothing_is_accepted(mode: AssistanceOptions) -> None:
    """Tokens that nothing before them tells: 50 ids at random."""
    engine, runner = make_engine(engine_config(num_blocks=400, max_context_tokens=2000))
    engine.add(item := request([3, 4], max_new_tokens=400, mode=mode, do_sample=True, seed=3))
    wrong = TenantMemory(4096)
    assert mode is LOOKAHEAD or item.past_outputs is not None
    if mode is MEMORY:
        # Whatever two tokens come, 49 is expected after them.
        for first in range(50):
            for second in range(50):
                wrong.add([first, second, 49])
        item.past_outputs = wrong
        wrong.add = lambda token_ids: None  # type: ignore[method-assign]
    run(engine)
    drafted = [step for step in runner.steps if step.scheduled[0].verifiers]
    # Without pauses all of them would be; the pauses are 8, 16, 32 … 128 tokens, with 4 attempts between.
    assert 4 <= len(drafted) < 100


@pytest.mark.parametrize(
    ("modes", "kind"),
    [
        (
            {"ngram_memory_num_tokens": 4, "ngram_memory_match": 2, "prompt_lookup_num_tokens": 4},
            DraftKind.NGRAM_MEMORY,
        ),
        ({"prompt_lookup_num_tokens": 4, "lookahead_window": 4}, DraftKind.PROMPT_LOOKUP),
        ({"lookahead_window": 4}, DraftKind.LOOKAHEAD),
    ],
)
def test_the_first_kind_that_has_drafts_gives_them(modes: dict[str, int], kind: DraftKind) -> None:
    engine, _ = make_engine(script=dict(enumerate([7, 8, 9] * 12)))
    mode = AssistanceOptions(**modes)
    # The second time there is a past output.
    for _ in range(2):
        before = drafts_by_kind(engine)
        run(engine, request([1, 7, 8, 9, 7, 8, 9], max_new_tokens=36, mode=mode))
    accepted = {one: right - before.get(one, (0, 0))[0] for one, (right, _) in drafts_by_kind(engine).items()}
    assert accepted[kind] > 20
    assert sum(accepted.values()) == accepted[kind]


class FinicalRunner(FakeRunner):
    """Runner that has no token after the id 3: as options that leave none, or as a model that gives no number."""

    reason = "exhausted"

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        result = super().execute(output)
        drawers = [
            one for entry in output.scheduled for one in (*entry.sample, *(verifier for _, verifier in entry.verifiers))
        ]
        lost = frozenset(one.seq_id for one in drawers if one.token_ids[-1] == 3)
        sampled = {seq_id: token for seq_id, token in result.sampled.items() if seq_id not in lost}
        return replace(result, sampled=sampled, **{self.reason: lost})


@pytest.mark.parametrize("reason", ["exhausted", "failed"])
def test_a_row_after_a_wrong_draft_may_have_no_token(reason: str) -> None:
    """The text 7 8 3 in the prompt is drafted, and 7 8 9 is what comes."""
    runner = FinicalRunner(ROOMY, script=dict(enumerate([7, 8, 9] * 8)))
    runner.reason = reason
    engine = Engine(ROOMY, runner, None)
    item = request([7, 8, 3, 7, 8, 3, 1], max_new_tokens=24, mode=LOOKUP)
    answer = run(engine, item)[item.request_id]
    assert answer.finished is not None
    assert answer.finished.error is None
    assert answer.ids[0] == [7, 8, 9] * 8
    assert answer.finished.rejected_draft_tokens > 0


@pytest.mark.parametrize("reason", ["exhausted", "failed"])
def test_a_row_after_a_right_draft_must_have_one(reason: str) -> None:
    runner = FinicalRunner(ROOMY, script=dict(enumerate([7, 8, 3] * 8)))
    runner.reason = reason
    item = request([7, 8, 3, 7, 8, 3, 1], max_new_tokens=24, mode=LOOKUP)
    answer = run(Engine(ROOMY, runner, None), item)[item.request_id]
    assert answer.finished is not None
    assert answer.finished.error is not None
