"""Beam search and beam sampling over a runner without a model, against a search on plain lists."""

from __future__ import annotations

from typing import Any

import pytest
from factories.engine.fake_engine import Answer, collect, engine_config, make_engine, request, run
from factories.engine.fake_engine import candidates as answer_row
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import Internal, InvalidArgument
from penstock.generation.core.decoding_mode import EarlyStopping
from penstock.generation.core.draw import Candidates, DrawKind, DrawSpec
from penstock.generation.core.request import FinishReason, Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import SampledToken
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.beam_search import BeamSearch
from penstock.generation.engine.decoding.beams import Beam
from penstock.generation.engine.decoding.hypotheses import Hypotheses
from penstock.generation.engine.stopping import Stop, StopCriteria, StopState
from penstock.text.token_bytes import TokenBytes

VOCABULARY = 50
BARRED = -1e9


def answer_of(item: Request, **kwargs: Any) -> Answer:
    engine, _ = make_engine(engine_config(num_blocks=300), **kwargs)
    answer = run(engine, item)[item.request_id]
    assert engine.load().kv_blocks_used == 0
    return answer


def row(ids: list[int], num_prompt: int, seed: int, slot: int | None) -> list[tuple[int, float, float]]:
    """(token, score, key) of every token that may follow."""
    sequence = Sequence(0, 0, SamplingParams(1), seed, ids, num_prompt)
    sequence.draw = DrawSpec(DrawKind.CANDIDATES, num_candidates=VOCABULARY, gumbel_slot=slot)
    found = answer_row(sequence, seed, ids, VOCABULARY).candidates
    assert found is not None
    return list(zip(found.token_ids, found.scores, found.keys, strict=True))


def search(prompt: list[int], length: int, num_beams: int, eos: tuple[int, ...], seed: int | None) -> list[Any]:
    """Search as transformers does: equal beams of which all but the first are barred, and flat lists.

    Return (score, output) of the ended sequences, best first. It stops only when all have ended. No length penalty.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, prompt)] + [(BARRED, prompt)] * (num_beams - 1)
    ended: list[tuple[float, list[int]]] = []
    for step in range(1, length + 1):
        extensions = [
            (score + key, score + token_score, [*ids, token])
            for place, (score, ids) in enumerate(beams)
            for token, token_score, key in row(ids, len(prompt), seed or 0, None if seed is None else place)
        ]
        extensions.sort(key=lambda one: -one[0])
        # The drawn are then taken by their scores; without draws that is their order.
        kept = sorted(extensions[: max(2, 1 + len(eos)) * num_beams], key=lambda one: -one[1])
        stops = [ids[-1] in eos or step == length for _, _, ids in kept]
        ended += [(score, ids) for (_, score, ids), stop in zip(kept[:num_beams], stops, strict=False) if stop]
        going = [(score, ids) for (_, score, ids), stop in zip(kept, stops, strict=True) if not stop]
        beams = sorted(going, key=lambda one: -one[0])[:num_beams]
        ended = sorted(ended, key=lambda one: -one[0])[:num_beams]
    return [(score, ids[len(prompt) :]) for score, ids in ended]


@pytest.mark.parametrize("seed", [None, 3, 4])
@pytest.mark.parametrize("eos", [(), (4,), (4, 9, 14, 19, 24, 29, 34)])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_one_beam_to_begin_with_finds_what_equal_barred_beams_find(
    num_beams: int, eos: tuple[int, ...], seed: int | None
) -> None:
    for prompt in ([1], [2, 2, 3], [0, 1, 2, 3, 4, 5, 6]):
        item = request(
            prompt,
            max_new_tokens=7,
            eos_token_ids=eos,
            do_sample=seed is not None,
            seed=seed or 0,
            num_return_sequences=num_beams,
            mode=BeamOptions(num_beams, length_penalty=0.0, early_stopping=EarlyStopping.NEVER),
        )
        answer = answer_of(item)
        assert answer.finished is not None
        expected = search(prompt, 7, num_beams, eos, seed)
        assert [answer.ids[index] for index in range(num_beams)] == [ids for _, ids in expected]
        scores = [finish.cumulative_logprob for finish in answer.finished.sequences]
        assert scores == pytest.approx([score for score, _ in expected])


def test_beams_compute_their_prompt_once_and_one_row_each_a_step() -> None:
    engine, runner = make_engine()
    run(engine, request([1] * 16, max_new_tokens=5, mode=BeamOptions(3)))
    assert [step.num_tokens for step in runner.steps] == [16, 3, 3, 3, 3]


def test_nothing_is_said_before_the_end_and_then_everything_at_once() -> None:
    item = request([1, 2], max_new_tokens=6, num_return_sequences=3, mode=BeamOptions(4))
    answer = answer_of(item)
    assert [delta.index for delta in answer.deltas] == [0, 1, 2]
    assert all(delta.finish is not None for delta in answer.deltas)
    scores = [delta.finish.cumulative_logprob for delta in answer.deltas if delta.finish]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]


def test_logprobs_of_a_beam_sum_up_to_its_score_and_lead_along_its_own_way() -> None:
    for sampling in ({}, {"do_sample": True, "seed": 8}):
        item = request(
            [1, 2], max_new_tokens=6, num_return_sequences=3, top_logprobs=2,
            mode=BeamOptions(3, length_penalty=0.0), **sampling,
        )  # fmt: skip
        for delta in answer_of(item).deltas:
            chosen = [entry.chosen for entry in delta.logprobs if entry.chosen is not None]
            assert tuple(entry.token_id for entry in chosen) == delta.token_ids
            assert delta.finish is not None
            assert sum(entry.logprob for entry in chosen) == pytest.approx(delta.finish.cumulative_logprob)
            for entry, position in zip(chosen, delta.logprobs, strict=True):
                assert len(position.top) == 2
                assert (entry in position.top) == (entry.rank <= 2)


def test_a_stop_string_ends_a_beam_wherever_its_tokens_are_cut() -> None:
    table = TokenBytes({token: bytes([97 + token % 3]) for token in range(VOCABULARY)}, special=[])
    options = {"max_new_tokens": 10, "num_return_sequences": 4, "mode": BeamOptions(4, length_penalty=0.0)}
    answer = answer_of(request([1, 2], stop_strings=("abc", "cc"), **options), stop_text=table)
    assert answer.finished is not None
    reasons = {finish.reason for finish in answer.finished.sequences}
    assert FinishReason.STOP_STRING in reasons
    for finish in answer.finished.sequences:
        text = "".join(chr(97 + token % 3) for token in answer.ids[finish.index])
        ends = [text.find(stop) + len(stop) for stop in ("abc", "cc") if stop in text]
        assert (min(ends) == len(text)) if finish.reason is FinishReason.STOP_STRING else not ends


def test_max_time_returns_the_best_so_far() -> None:
    now = [0.0]
    engine, _ = make_engine(clock=lambda: now[0])
    item = request(
        [1, 2, 3], max_new_tokens=50, max_time=5.0, num_return_sequences=2, mode=BeamOptions(3, length_penalty=0.0)
    )
    engine.add(item)
    answers: dict[str, Answer] = {}
    for _ in range(4):
        collect(answers, engine.step())
    assert answers[item.request_id].ids == {}
    now[0] = 6.0
    answer = run(engine, answers=answers)[item.request_id]
    assert answer.finished is not None
    expected = search([1, 2, 3], 4, 3, (), None)[:2]
    assert [answer.ids[0], answer.ids[1]] == [ids for _, ids in expected]
    assert [finish.reason for finish in answer.finished.sequences] == [FinishReason.MAX_TIME] * 2
    assert engine.load().kv_blocks_used == 0


def test_max_time_before_the_first_token_returns_nothing_of_everything() -> None:
    now = [0.0]
    engine, _ = make_engine(engine_config(max_batch_tokens=16), clock=lambda: now[0])
    item = request([1] * 40, max_time=5.0, num_return_sequences=2, mode=BeamOptions(2))
    engine.add(item)
    engine.step()
    now[0] = 6.0
    answer = run(engine)[item.request_id]
    assert answer.ids == {0: [], 1: []}


def test_a_request_that_is_cut_off_counts_no_token_since_none_was_said() -> None:
    engine, _ = make_engine()
    item = request([1, 2, 3], max_new_tokens=50, num_return_sequences=2, mode=BeamOptions(3))
    engine.add(item)
    answers: dict[str, Answer] = {}
    for _ in range(4):
        collect(answers, engine.step())
    engine.abort(item.request_id, Internal("gone", reason="TEST"))
    answer = run(engine, answers=answers)[item.request_id]
    assert answer.finished is not None
    assert answer.finished.completion_tokens == 0
    assert [finish.reason for finish in answer.finished.sequences] == [FinishReason.ERROR] * 2
    assert engine.load().kv_blocks_used == 0


def test_sequences_that_were_delivered_whole_have_ended_and_parts_of_one_are_refused() -> None:
    options = {"max_new_tokens": 6, "num_return_sequences": 2, "eos_token_ids": (4,), "mode": BeamOptions(3)}
    answer = answer_of(request([1, 2], resumed_token_ids=[[7, 4], [1, 2, 3, 5, 6, 7]], **options))
    assert answer.finished is not None
    reasons = [finish.reason for finish in answer.finished.sequences]
    assert reasons == [FinishReason.STOP_EOS, FinishReason.LENGTH]
    assert answer_of(request([1, 2], resumed_token_ids=[[], []], **options)).ids[0]
    engine, _ = make_engine()
    for resumed in ([[7, 4], [1, 2]], [[7, 4], []], [[7, 4, 4], [4]]):
        with pytest.raises(InvalidArgument, match="resumed_token_ids"):
            engine.add(request([1, 2], resumed_token_ids=resumed, **options))


class Repeating:
    """A grammar of one token, over and over."""

    is_done = is_free = is_cut = False

    def start(self, eos_token_ids: tuple[int, ...], max_tokens: int | None = None) -> Repeating:
        return self

    def advance(self, token_id: int) -> bool:
        return token_id == 7

    def copy(self) -> Repeating:
        return self


def test_delivered_ids_that_do_not_obey_the_constraint_are_refused() -> None:
    engine, _ = make_engine()
    item = request([1, 2], max_new_tokens=2, mode=BeamOptions(3), resumed_token_ids=[[7, 8]])
    item.grammar = Repeating()
    with pytest.raises(InvalidArgument, match="do not obey the constraint"):
        engine.add(item)


@settings(max_examples=30, deadline=None)
@given(
    scores=st.lists(st.lists(st.integers(-4, 0), min_size=0, max_size=5), min_size=1, max_size=4),
    count=st.integers(1, 8),
)
def test_the_best_extensions_of_all_beams_are_those_of_a_stable_sort(scores: list[list[int]], count: int) -> None:
    search = BeamSearch(request([1], mode=BeamOptions(4)), StopCriteria(SamplingParams(9), 9, None), lambda: 0)
    beams = [
        Beam(Sequence(row, 0, SamplingParams(9), 0, [1], 1), -row / 2, StopState(None)) for row in range(len(scores))
    ]
    drawn = {}
    for beam, found in zip(beams, scores, strict=True):
        best = tuple(float(score) for score in sorted(found, reverse=True))
        drawn[beam.sequence] = SampledToken(-1, candidates=Candidates(tuple(range(len(best))), best, best))
    every = [(beam, place, beam.score + score) for beam in beams for place, score in enumerate(_scores(drawn, beam))]
    every.sort(key=lambda one: -one[2])
    ranked = search.ranked(beams, drawn, count)
    assert [(one.beam, one.token_id, one.score) for one in ranked] == every[:count]


def _scores(drawn: dict[Sequence, SampledToken], beam: Beam) -> tuple[float, ...]:
    found = drawn[beam.sequence].candidates
    assert found is not None
    return found.scores


def test_where_fewer_sequences_exist_than_are_asked_for_the_best_come_again() -> None:
    item = request([1, 2], max_new_tokens=1, num_return_sequences=5, mode=BeamOptions(5))
    engine, _ = make_engine(vocab_size=3)
    answer = run(engine, item)[item.request_id]
    assert sorted({tuple(ids) for ids in answer.ids.values()}) == [(0,), (1,), (2,)]
    assert answer.ids[3] == answer.ids[0]
    assert answer.ids[4] == answer.ids[1]


@pytest.mark.parametrize(("penalty", "best"), [(1000.0, 0.0), (-1000.0, -float("inf")), (0.0, -3.0)])
def test_a_length_penalty_beyond_a_float_is_its_limit(penalty: float, best: float) -> None:
    hypotheses = Hypotheses(1, BeamOptions(2, length_penalty=penalty), 500)
    hypotheses.add(tuple(range(200)), -3.0, Stop(FinishReason.LENGTH))
    assert [one.score for one in hypotheses] == [best]


def test_when_a_search_is_decided() -> None:
    def decided(early: EarlyStopping, best: float, length: int = 4, penalty: float = 1.0) -> bool:
        hypotheses = Hypotheses(2, BeamOptions(2, length_penalty=penalty, early_stopping=early), 10)
        hypotheses.add((1, 2), -2.0, Stop(FinishReason.STOP_EOS))
        assert not hypotheses.is_decided(-1e9, 1)
        hypotheses.add((1, 2), -4.0, Stop(FinishReason.STOP_EOS))
        return hypotheses.is_decided(best, length)

    assert decided(EarlyStopping.TRUE, 0.0)
    # The worst has -2 per token.
    assert not decided(EarlyStopping.FALSE, -7.9)
    assert decided(EarlyStopping.FALSE, -8.0)
    assert not decided(EarlyStopping.NEVER, -19.9)
    assert decided(EarlyStopping.NEVER, -20.0)
    assert decided(EarlyStopping.NEVER, -2.0, penalty=-1.0)
