"""The draft model's bookkeeping, on a runner that checks the KV it is told to read."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from factories.engine.fake_engine import FakeRunner, engine_config, make_engine, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.decoding_mode import PLAIN
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftRequest, RunnerOutput, SampledToken, SchedulerOutput
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.runner.drafter import ModelDrafter

MODEL = AssistanceOptions(num_assistant_tokens=5, confidence_threshold=0.0)


class Model(FakeRunner):
    """Draft model that agrees with the served one except at every `wrong_every`-th position."""

    wrong_every = 0
    probabilities: tuple[float, ...] = ()

    def draw(self, sequence: Sequence, context: Items[int]) -> SampledToken:
        token = super().draw(sequence, context)
        if self.wrong_every and len(context) % self.wrong_every == 0:
            return SampledToken((token.token_id + 1) % self.vocab_size)
        return token


def make_drafter(**changes: Any) -> tuple[ModelDrafter, Model]:
    config = engine_config(**{"num_blocks": 64, "max_batch_tokens": 64, **changes})
    model = Model(config)
    drafter = ModelDrafter(
        model,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_context_tokens=config.max_context_tokens,
        max_prefill_tokens=config.max_batch_tokens - config.max_running_sequences,
    )
    return drafter, model


def a_sequence(prompt: list[int], seq_id: int = 0, **options: Any) -> Sequence:
    return Sequence(seq_id, 0, SamplingParams(50, **options), 0, list(prompt), len(prompt))


def rows(model: FakeRunner) -> list[int]:
    """Rows of each forward pass since the last call."""
    counts = [step.num_tokens for step in model.steps]
    model.steps.clear()
    return counts


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=6),
    num_blocks=st.integers(1, 64),
    block_size=st.integers(1, 5),
    max_batch_tokens=st.integers(17, 40),
    wrong_every=st.sampled_from([0, 2, 3, 7]),
    copies=st.integers(1, 2),
)
def test_whatever_its_pool_a_drafter_changes_no_id(
    prompts: list[list[int]], num_blocks: int, block_size: int, max_batch_tokens: int, wrong_every: int, copies: int
) -> None:
    drafter, model = make_drafter(num_blocks=num_blocks, block_size=block_size, max_batch_tokens=max_batch_tokens)
    model.wrong_every = wrong_every
    expected = []
    for mode in (PLAIN, MODEL):
        engine, _ = make_engine(engine_config(num_blocks=200), drafter=drafter)
        items = [request(p, max_new_tokens=12, do_sample=True, num_return_sequences=copies, mode=mode) for p in prompts]
        answers = run(engine, *items)
        drafter.check_integrity()
        expected.append([answers[item.request_id].ids for item in items])
    assert expected[0] == expected[1]


def test_only_what_is_new_is_computed_and_refused_drafts_are_rolled_back() -> None:
    drafter, model = make_drafter()
    one = a_sequence([1, 2, 3, 4, 5])
    (drafts,) = drafter.draft([DraftRequest(one, 3)])
    assert (len(drafts), rows(model)) == (3, [5, 1, 1])
    # All accepted, and a token after them: the last draft and that token are new.
    one.token_ids += [*drafts, 40]
    (drafts,) = drafter.draft([DraftRequest(one, 3)])
    assert rows(model) == [2, 1, 1]
    # One accepted: the token in place of the second is new.
    one.token_ids += [drafts[0], (drafts[1] + 1) % 50]
    drafter.draft([DraftRequest(one, 2)])
    assert rows(model) == [1, 1]


def test_all_orders_of_a_step_share_its_forward_passes() -> None:
    drafter, model = make_drafter()
    many = [a_sequence([number, 1], seq_id=number) for number in range(5)]
    answers = drafter.draft([DraftRequest(one, 2 + number) for number, one in enumerate(many)])
    assert [len(drafts) for drafts in answers] == [2, 3, 4, 5, 6]
    assert rows(model) == [10, 5, 4, 3, 2, 1]


def test_a_long_prompt_is_taken_in_over_several_calls_and_holds_nobody_up() -> None:
    drafter, model = make_drafter(max_batch_tokens=36)
    long, short = a_sequence([7] * 50, seq_id=1), a_sequence([3], seq_id=2)
    lengths = []
    for _ in range(3):
        answers = drafter.draft([DraftRequest(long, 2), DraftRequest(short, 2)])
        lengths.append([len(drafts) for drafts in answers])
        short.token_ids += answers[1][:1]
    assert lengths == [[0, 2], [0, 2], [2, 2]]
    assert max(rows(model)) == 20


def test_a_full_pool_forgets_who_was_drafted_for_least_recently() -> None:
    drafter, model = make_drafter(num_blocks=4, block_size=4)
    first, second, third = (a_sequence([number] * 6, seq_id=number) for number in range(3))
    for one in (first, second, first, third):
        assert drafter.draft([DraftRequest(one, 2)]) != [[]]
    rows(model)
    drafter.draft([DraftRequest(first, 2)])
    assert rows(model) == [1, 1]
    drafter.draft([DraftRequest(second, 2)])
    assert rows(model) == [6, 1]
    drafter.check_integrity()


def test_a_sequence_that_the_pool_or_the_context_cannot_hold_gets_no_drafts() -> None:
    drafter, _ = make_drafter(num_blocks=4, block_size=4, max_context_tokens=12)
    assert drafter.draft([DraftRequest(a_sequence([1] * 13, seq_id=1), 5)]) == [[]]
    (drafts,) = drafter.draft([DraftRequest(a_sequence([1] * 10, seq_id=2), 5)])
    assert len(drafts) == 3
    drafter, _ = make_drafter(num_blocks=2, block_size=4)
    assert drafter.draft([DraftRequest(a_sequence([1] * 9), 5)]) == [[]]
    assert drafter.num_used_blocks == 0


def test_what_is_released_is_forgotten_there_and_at_the_runner() -> None:
    drafter, model = make_drafter()
    one, two = a_sequence([1, 2], seq_id=1), a_sequence([3, 4], seq_id=2)
    _, drafts = drafter.draft([DraftRequest(one, 2), DraftRequest(two, 2)])
    drafter.release([1, 99])
    two.token_ids += drafts
    drafter.draft([DraftRequest(two, 1)])
    assert model.steps[-1].released == (1,)
    drafter.clear()
    assert drafter.num_used_blocks == 0


class Unsure(Model):
    """Draft model whose probabilities fall below a half at the third output token."""

    def draw(self, sequence: Sequence, context: Items[int]) -> SampledToken:
        assert sequence.params.top_logprobs == 0
        return SampledToken(5, logprob=-1.0 if sequence.num_output_tokens == 2 else -0.1)


def test_drafting_stops_after_a_token_below_the_threshold() -> None:
    config = engine_config()
    drafter = ModelDrafter(Unsure(config), num_blocks=64, block_size=4, max_context_tokens=200, max_prefill_tokens=64)
    for threshold, expected in ((0.3, 8), (0.5, 3)):
        drafter.clear()
        answer = drafter.draft([DraftRequest(a_sequence([1, 2]), 8, threshold)])
        assert len(answer[0]) == expected


def test_drafting_stops_before_an_end_of_sequence_id() -> None:
    drafter, model = make_drafter()
    model.script = {0: 7, 1: 8, 2: 9}
    assert drafter.draft([DraftRequest(a_sequence([1], eos_token_ids=(9,)), 6)]) == [[7, 8]]
    assert len(drafter.draft([DraftRequest(a_sequence([1], 1, eos_token_ids=(9,), ignore_eos=True), 6)])[0]) == 6


def test_a_draft_that_is_not_a_number_ends_the_drafting_and_nothing_else() -> None:
    class Broken(Model):
        def execute(self, output: SchedulerOutput) -> RunnerOutput:
            result = super().execute(output)
            return RunnerOutput({}, {}, frozenset(result.sampled)) if len(self.steps) > 1 else result

    drafter = ModelDrafter(
        Broken(engine_config()), num_blocks=64, block_size=4, max_context_tokens=200, max_prefill_tokens=64
    )
    assert len(drafter.draft([DraftRequest(a_sequence([1, 2]), 4)])[0]) == 1
