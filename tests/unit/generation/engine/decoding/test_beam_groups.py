"""Group beam search and constrained beam search over a runner without a model."""

from __future__ import annotations

import itertools

import pytest
from factories.engine.fake_engine import Answer, engine_config, make_engine, ranking, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.decoding_mode import EarlyStopping
from penstock.generation.core.request import FinishReason
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.constraints import Constraint, Progress
from penstock.generation.engine.decoding.mode_registry import MODES

VOCABULARY = 50


def groups_of_one(prompt: list[int], length: int, num_groups: int) -> list[list[int]]:
    """Run greedy searches beside each other: a token loses 1 for every earlier group that chose it there."""
    outputs: list[list[int]] = [[] for _ in range(num_groups)]
    for _ in range(length):
        taken: list[int] = []
        for output in outputs:
            scores = {token: score - taken.count(token) for token, score in ranking(0, prompt + output, VOCABULARY)}
            taken.append(max(scores, key=lambda token: (scores[token], -token)))
            output.append(taken[-1])
    return outputs


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("prompt", [[1], [1, 2, 3], [1, 2, 3, 4], [1] * 12])
def test_groups_choose_as_if_one_after_the_other_at_every_position(prompt: list[int], block_size: int) -> None:
    engine, _ = make_engine(engine_config(num_blocks=300, block_size=block_size))
    item = request(prompt, max_new_tokens=7, num_return_sequences=4, mode=BeamOptions(4, 4, 1.0, length_penalty=0.0))
    answer = run(engine, item)[item.request_id]
    assert sorted(answer.ids.values()) == sorted(groups_of_one(prompt, 7, 4))
    assert engine.load().kv_blocks_used == 0


def test_groups_run_staggered_one_step_apart_and_the_prompt_is_computed_once() -> None:
    engine, runner = make_engine()
    run(engine, request([1] * 16, max_new_tokens=5, num_return_sequences=6, mode=BeamOptions(6, 3, 1.0)))
    # Each later group computes the prompt's last token again for its first draw; the last tokens are never computed.
    assert [step.num_tokens for step in runner.steps] == [16, 2 + 1, 2 + 2 + 1, 2 + 2 + 2, 2 + 2 + 2, 2 + 2, 2]


def test_groups_hold_the_blocks_of_their_prompt_once() -> None:
    config = engine_config(block_size=4)
    item = request([1] * 16, max_new_tokens=5, num_return_sequences=6, mode=BeamOptions(6, 3, 1.0))
    assert MODES.blocks_needed(config, item.params, 16, 5) == 4 + 6 * 1 + 2
    engine, _ = make_engine(config)
    engine.add(item)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.load().kv_blocks_used)
    assert 4 + 2 < most <= 4 + 6 + 2


def pick(ids: list[int], *taken: int) -> int:
    """Return the choices of a beam that is alone in its group."""
    scores = {token: score - taken.count(token) for token, score in ranking(0, ids, VOCABULARY)}
    return max(scores, key=lambda token: (scores[token], -token))


def test_a_group_that_is_over_counts_as_padding_for_the_others() -> None:
    start = 1
    first = pick([start])
    # The first group ends with its second token, going on with the next best for its part.
    end = pick([start, first])
    second = pick([start], first)
    third = pick([start, second], ranking(0, [start, first], VOCABULARY)[1][0])
    wanted, instead = (token for token, _ in ranking(0, [start, second, third], VOCABULARY)[:2])

    def ids(pad: int) -> list[list[int]]:
        engine, _ = make_engine()
        options = BeamOptions(2, 2, 1.0, early_stopping=EarlyStopping.TRUE, pad_token_id=pad, length_penalty=0.0)
        item = request([start], max_new_tokens=3, num_return_sequences=2, eos_token_ids=(end,), mode=options)
        return sorted(run(engine, item)[item.request_id].ids.values(), key=len)

    assert ids(pad=first) == [[first, end], [second, third, wanted]]
    assert ids(pad=wanted) == [[first, end], [second, third, instead]]


def constrained(prompt: list[int], phrases: tuple[tuple[tuple[int, ...], ...], ...], **fields: object) -> Answer:
    engine, _ = make_engine(engine_config(num_blocks=400))
    item = request(prompt, mode=BeamOptions(4, length_penalty=0.0, constraints=phrases), **fields)
    answer = run(engine, item)[item.request_id]
    assert engine.load().kv_blocks_used == 0
    return answer


def holds(ids: list[int], phrase: tuple[int, ...]) -> bool:
    return any(tuple(ids[start : start + len(phrase)]) == phrase for start in range(len(ids)))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(10, 49), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3),
)
def test_unlikely_phrases_occur_when_just_their_length_is_given(
    prompt: list[int], phrases: list[tuple[int, ...]]
) -> None:
    distinct = [tuple(10 * place + token % 10 for token in phrase) for place, phrase in enumerate(phrases, 1)]
    answer = constrained(prompt, tuple((phrase,) for phrase in distinct), max_new_tokens=sum(map(len, distinct)))
    assert all(holds(answer.ids[0], phrase) for phrase in distinct)


def test_one_of_the_alternatives_occurs() -> None:
    answer = constrained([1, 2], (((41, 42, 43), (48, 49)),), max_new_tokens=2)
    assert answer.ids[0] == [48, 49]


def test_a_sequence_that_ends_before_it_meets_everything_is_no_hypothesis() -> None:
    eos = ranking(0, [1, 2], VOCABULARY)[0][0]
    engine, _ = make_engine()
    free = request([1, 2], max_new_tokens=12, eos_token_ids=(eos,), mode=BeamOptions(4, length_penalty=0.0))
    assert run(engine, free)[free.request_id].ids[0] == [eos]
    answer = constrained([1, 2], (((41, 42),),), max_new_tokens=2, eos_token_ids=(eos,))
    assert holds(answer.ids[0], (41, 42))


def test_what_cannot_be_met_in_time_gives_the_best_there_is() -> None:
    answer = constrained([1, 2], (((41, 42, 43, 44, 45),),), max_new_tokens=3, num_return_sequences=4)
    assert answer.finished is not None
    assert [finish.reason for finish in answer.finished.sequences] == [FinishReason.LENGTH] * 4
    assert all(len(ids) == 3 for ids in answer.ids.values())


def progress(constraints: tuple[tuple[tuple[int, ...], ...], ...], ids: list[int]) -> Progress:
    state = Progress.start(tuple(map(Constraint, constraints)))
    for token_id in ids:
        state = state.add(token_id)
    return state


def test_progress_is_lost_by_a_token_that_breaks_a_phrase_off_and_kept_once_it_is_complete() -> None:
    phrases = (((1, 2, 3),), ((4, 5),))
    banks = [progress(phrases, ids).bank for ids in ([], [1], [1, 2], [1, 2, 9], [1, 2, 3], [1, 2, 3, 4])]
    assert banks == [0, 1, 2, 0, 3, 3 + 2]
    assert not progress(phrases, [1, 2, 3, 4]).is_complete
    # While one is worked on the other makes none: 4 breaks the first off.
    assert progress(phrases, [1, 4, 5]).bank == 0
    assert progress(phrases, [4, 5, 9, 1, 2, 3]).is_complete
    assert progress(phrases, [4, 5, 9, 1, 2, 3, 7, 7]).is_complete


def test_a_disjunctive_constraint_is_met_by_the_shortest_alternative_too() -> None:
    either = (((1, 2, 3), (1, 4), (5,)),)
    assert progress(either, [5]).is_complete
    assert progress(either, [1, 4]).is_complete
    assert progress(either, [1]).advancing == (2, 4)
    assert progress(either, []).advancing == (1, 5)
    assert progress(either, [5]).advancing == ()


def test_a_branch_after_the_first_counts_as_no_progress_as_in_transformers() -> None:
    either = (((1, 2, 3), (1, 4, 5)),)
    banks = {token: reached.bank for token, reached in progress(either, [1]).advances()}
    assert banks == {2: 2, 4: 0}
    assert progress(either, [1, 4]).bank == 2


@given(st.lists(st.integers(1, 5), max_size=12))
def test_progress_is_complete_when_every_phrase_has_been_worked_through(ids: list[int]) -> None:
    phrases = (((1, 2),), ((3,),))
    if progress(phrases, ids).is_complete:
        assert holds(ids, (1, 2))
        assert 3 in ids
    for permutation in itertools.permutations([(1, 2), (3,)]):
        assert progress(phrases, list(itertools.chain.from_iterable(permutation))).is_complete


@pytest.mark.parametrize("prompt", [[1], [1, 2]])
def test_who_was_forked_is_released_however_early_the_request_goes(prompt: list[int]) -> None:
    for steps in range(1, 5):
        engine, runner = make_engine(engine_config(num_blocks=100))
        item = request(prompt, max_new_tokens=6, mode=BeamOptions(4, num_beam_groups=4, diversity_penalty=1.0))
        engine.add(item)
        for _ in range(steps):
            engine.step()
        engine.abort(item.request_id)
        run(engine, request([9], max_new_tokens=1))
        forked = {fork.child for step in runner.steps for fork in step.forks}
        assert forked <= {seq_id for step in runner.steps for seq_id in step.released}
