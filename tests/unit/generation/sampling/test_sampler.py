"""The sampler as a whole: its shortcuts against its own reference, its draws against the exact distribution."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from factories.engine.chi_square import assert_chi_square
from factories.engine.sampling_batches import VOCAB, expected_draw, logits, random_batch
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import new_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import SampledToken
from penstock.generation.sampling.batch import SamplingBatch

CPU = torch.device("cpu")
torch.set_num_threads(1)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 4.0, 12.0]))
def test_tokens_are_those_of_the_reference_on_the_whole_vocabulary(seed: int, scale: float) -> None:
    batch = random_batch(random.Random(seed), 6)
    given_NV = logits(6, seed, scale=scale)
    scores_NV = new_sampler().processed_scores(given_NV, batch)
    tokens = new_sampler().sample(given_NV.clone(), batch)
    assert [token.token_id for token in tokens] == [
        expected_draw(row, one) for row, one in zip(scores_NV, batch, strict=True)
    ]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_a_row_gives_the_same_in_every_batch(seed: int) -> None:
    rng = random.Random(seed)
    batch = random_batch(rng, 7)
    given_NV = logits(7, seed)
    alone = [new_sampler().sample(given_NV[row : row + 1].clone(), [one])[0] for row, one in enumerate(batch)]
    assert new_sampler().sample(given_NV.clone(), batch) == alone
    order = rng.sample(range(7), 5)
    assert new_sampler().sample(given_NV[order], [batch[row] for row in order]) == [alone[row] for row in order]


def test_a_sampler_that_lived_through_the_steps_equals_a_new_one() -> None:
    rng = random.Random(4)
    batch = random_batch(rng, 6, do_sample=True, temperature=1.0)
    lived = new_sampler()
    for step in range(8):
        given_NV = logits(6, step, vocab=VOCAB)
        rows = rng.sample(range(6), rng.randrange(1, 7))
        chosen = [batch[row] for row in rows]
        drawn = lived.sample(given_NV[rows], chosen)
        assert drawn == new_sampler().sample(given_NV[rows], chosen)
        for one, token in zip(chosen, drawn, strict=True):
            one.token_ids.append(token.token_id)


def verifiers(origin: Sequence, drafts: list[int]) -> list[Sequence]:
    """Return what verifies the drafts, as a strategy makes it anew in each step."""
    ids = [*origin.token_ids, *drafts]
    first = len(ids) - len(drafts)
    return [
        replace(origin, seq_id=1000 + place, token_ids=ids[:place], origin=origin)
        for place in range(first, len(ids) + 1)
    ]


OPTIONS = (
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 3.0},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"do_sample": False},
)


def test_drafts_are_verified_with_each_rows_own_options_and_uniforms_from_step_to_step() -> None:
    """Sequences with drafts come and go, with other numbers of drafts in each step."""
    rng = random.Random(7)
    origins = [
        sequence([1, 2], params(**{"do_sample": True, "seed": seed, **options}), seq_id=number)
        for number, (options, seed) in enumerate(product(OPTIONS, (11, 12)))
    ]
    lived = new_sampler()
    for step in range(60):
        chosen = rng.sample(origins, rng.randint(1, 3))
        batch = [
            row for one in chosen for row in verifiers(one, [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))])
        ]
        given_NV = logits(len(batch), step, vocab=VOCAB)
        drawn = lived.sample(given_NV.clone(), batch)
        assert drawn == new_sampler().sample(given_NV.clone(), batch)
        for one in chosen:
            one.token_ids.append(rng.randrange(VOCAB))
        if step % 10 == 9:
            gone = rng.randrange(len(origins))
            lived.release([origins[gone].seq_id])
            options = params(**{"do_sample": True, "seed": step, **rng.choice(OPTIONS)})
            origins[gone] = sequence([3], options, seq_id=100 + step)


def test_a_batch_of_verifiers_is_built_once_for_each_number_of_them_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[SamplingBatch] = []

    class Counted(SamplingBatch):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            built.append(self)

    monkeypatch.setattr("penstock.generation.sampling.sampler.SamplingBatch", Counted)
    origin, sampler = sequence([1], params(do_sample=True, top_p=0.9)), new_sampler()
    for step, count in enumerate((2, 3, 2, 3, 3, 2)):
        sampler.sample(logits(count + 1, step), verifiers(origin, [5] * count))
        origin.token_ids.append(step)
    assert len(built) == 2
    # They hold a copy of the context each.
    assert not any(batch.states for batch in built)
    for count in range(40):
        sampler.sample(logits(count + 1, count), verifiers(origin, [5] * count))
    assert len(sampler._alike) <= 16
    sampler.release([origin.seq_id])
    assert not sampler._alike


def test_a_released_sequence_is_counted_anew() -> None:
    one = sequence([1], params(repetition_penalty=2.0, presence_penalty=1.0), output=[5, 6])
    sampler = new_sampler()
    sampler.sample(logits(1, 0), [one])
    one.token_ids[2] = 7
    sampler.release([0, 99])
    given_NV = logits(1, 1)
    assert torch.equal(sampler.processed_scores(given_NV, [one]), new_sampler().processed_scores(given_NV, [one]))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 300},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options: dict[str, Any]) -> None:
    draws, vocab = 8000, 500
    given_V = logits(1, 11, vocab=vocab, scale=2.0)[0]
    one = sequence([4, 5], params(do_sample=True, **options))
    probs = new_sampler().processed_scores(given_V[None], [one])[0].double().softmax(-1)
    observed = torch.zeros(vocab, dtype=torch.float64)
    for first in range(0, draws, 2000):
        # One sequence each, with seeds as n > 1 derives them.
        batch = [
            sequence([4, 5], params(do_sample=True, seed=derive_seed(7, first + i), **options), seq_id=first + i)
            for i in range(2000)
        ]
        tokens = new_sampler().sample(given_V.repeat(2000, 1), batch)
        observed += torch.bincount(torch.tensor([t.token_id for t in tokens]), minlength=vocab)
    assert observed[probs == 0].sum() == 0
    assert_chi_square(observed, probs * draws)


@pytest.mark.slow
def test_draws_along_one_sequence_follow_the_exact_distribution() -> None:
    given_V = logits(1, 12, vocab=50, scale=1.5)[0]
    one = sequence([1], params(do_sample=True, seed=12345))
    sampler, observed = new_sampler(), torch.zeros(50, dtype=torch.float64)
    for _ in range(5000):
        token_id = sampler.sample(given_V[None].clone(), [one])[0].token_id
        one.token_ids.append(token_id)
        observed[token_id] += 1
    assert_chi_square(observed, given_V.double().softmax(-1) * 5000)


def test_temperature_zero_is_greedy() -> None:
    given_NV = logits(1, 5)
    token = new_sampler().sample(given_NV.clone(), [sequence([1], params(do_sample=True, temperature=0.0))])[0]
    assert token == SampledToken(int(given_NV.argmax()))


def test_the_first_of_equal_scores_is_the_greedy_choice() -> None:
    given_NV = torch.zeros(1, 100)
    given_NV[0, [40, 60]] = 3.0
    assert new_sampler().sample(given_NV, [sequence([1], params())])[0].token_id == 40


SELECTIONS: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}]
EXTREMES: list[dict[str, Any]] = [
    # The largest and smallest positive values of the API's floats.
    {"logit_bias": {5: 3.4e38}, "temperature": 0.9},
    {"logit_bias": {5: 3.4e38}, "temperature": 1e-30},
    {"logit_bias": {5: 3.4e38, 6: -3.4e38}, "repetition_penalty": 0.9},
    {"logit_bias": dict.fromkeys(set(range(300)) - {5}, -3.4e38)},
    {"logit_bias": {5: 3.4e38}, "repetition_penalty": 1.4e-45, "temperature": 1.4e-45},
    {"logit_bias": {5: 3.4e38, 2: 3.4e38}, "min_new_tokens": 1, "eos_token_ids": (2,), "temperature": 3.4e38},
]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_the_most_extreme_options_leave_a_distribution(extreme: dict[str, Any], selection: dict[str, Any]) -> None:
    one = sequence([7, 8], params(do_sample=True, **extreme, **selection))
    token = new_sampler().sample(logits(1, 3, vocab=300), [one])[0]
    if extreme.get("temperature", 1.0) < 10:
        assert token.token_id == 5


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("penalty", [1.4e-45, 1e-20, 3.4e38])
def test_an_extreme_repetition_penalty_leaves_a_distribution(penalty: float, selection: dict[str, Any]) -> None:
    given_NV = logits(1, 3, vocab=300)
    for scores_NV in (given_NV, -given_NV.abs(), torch.zeros_like(given_NV)):
        options = params(do_sample=True, repetition_penalty=penalty, temperature=1e-30, **selection)
        token = new_sampler().sample(scores_NV.clone(), [sequence(list(range(300)), options)])[0]
        assert 0 <= token.token_id < 300


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("vocab", [300, VOCAB])
def test_one_nan_is_an_error_however_the_row_is_drawn(vocab: int, selection: dict[str, Any]) -> None:
    given_NV = logits(1, 3, vocab=vocab)
    given_NV[0, 123] = math.nan
    with pytest.raises(FloatingPointError):
        new_sampler().sample(given_NV, [sequence([1], params(do_sample=True, **selection))])


def test_nan_logits_are_an_error() -> None:
    for options in (params(), params(do_sample=True), params(do_sample=True, top_k=5)):
        broken = logits(2, 0)
        broken[1] = math.nan
        with pytest.raises(FloatingPointError):
            new_sampler().sample(broken, [sequence([1], options, seq_id=0), sequence([1], options, seq_id=1)])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_logprobs_are_the_log_softmax_of_the_processed_scores(seed: int) -> None:
    batch = random_batch(random.Random(seed), 6, top_logprobs=7)
    given_NV = logits(6, seed)
    scores_NV = new_sampler().processed_scores(given_NV, batch)
    for token, scores_V in zip(new_sampler().sample(given_NV.clone(), batch), scores_NV, strict=True):
        expected = scores_V.double().log_softmax(-1)
        assert token.logprobs is not None
        chosen = token.logprobs.chosen
        assert chosen is not None
        assert (chosen.token_id, chosen.logprob) == (token.token_id, token.logprob)
        assert chosen.logprob == pytest.approx(float(expected[token.token_id]), abs=2e-5)
        assert chosen.rank == 1 + int((scores_V > scores_V[token.token_id]).sum())
        survivors = int(scores_V.isfinite().sum())
        assert len(token.logprobs.top) == min(7, survivors)
        for top, value in zip(token.logprobs.top, expected.topk(min(7, survivors)).values.tolist(), strict=True):
            assert top.logprob == pytest.approx(value, abs=2e-5)
            assert top.logprob == pytest.approx(float(expected[top.token_id]), abs=2e-5)
            assert top.rank == 1 + int((scores_V > scores_V[top.token_id]).sum())


def test_only_rows_that_asked_have_logprobs() -> None:
    batch = [sequence([1], params(top_logprobs=k), seq_id=row) for row, k in enumerate([None, 0, 2])]
    none, chosen_only, two = new_sampler().sample(logits(3, 3), batch)
    assert none.logprob is None
    assert none.logprobs is None
    assert chosen_only.logprobs is not None
    assert chosen_only.logprobs.top == ()
    assert two.logprobs is not None
    assert len(two.logprobs.top) == 2
