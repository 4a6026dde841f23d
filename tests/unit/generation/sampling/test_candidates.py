"""Rows whose strategy chooses the token: the highest processed scores, in one order everywhere."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import new_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.draw import Candidates, DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import Fork
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.sampling.sampler import Sampler
from torch import Tensor

CPU = torch.device("cpu")
VOCAB = 20_011
torch.set_num_threads(1)


def logits(rows: int, seed: int, vocab: int = VOCAB, *, ties: bool = True) -> Tensor:
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    return drawn.to(torch.bfloat16).float() if ties else drawn


def beam(
    prompt: list[int], spec: dict[str, Any], *, seq_id: int = 0, output: list[int] | None = None, **options: Any
) -> Sequence:
    one = sequence(prompt, params(**({"mode": BeamOptions(4)} | options)), seq_id=seq_id, output=output)
    one.draw = DrawSpec(DrawKind.CANDIDATES, **spec)
    return one


def draw(sampler: Sampler, given_NV: Tensor, batch: list[Sequence]) -> list[Candidates]:
    found = [token.candidates for token in sampler.sample(given_NV.clone(), batch)]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def best(scores_V: Tensor, count: int) -> list[int]:
    """Highest first, equals by ascending id, nothing that is -inf."""
    order = scores_V.sort(descending=True, stable=True)
    finite = int((order.values > -math.inf).sum())
    return list(order.indices[: min(count, finite)].tolist())


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([1, 8, 15, 16, 40, 300]), st.booleans())
def test_candidates_are_the_highest_processed_scores(seed: int, count: int, log_softmax: bool) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "do_sample": rng.random() < 0.5,
        "temperature": 0.6,
        "top_k": 50,
    }
    batch = [
        beam(
            [rng.randrange(VOCAB) for _ in range(9)],
            {"num_candidates": count, "log_softmax": log_softmax, "extra_ids": (4, 9)},
            seq_id=row,
            **(options if rng.random() < 0.7 else {}),
        )
        for row in range(4)
    ]
    given_NV = logits(4, seed)
    expected_NV = new_sampler().processed_scores(given_NV, batch)
    for found, scores_V in zip(draw(new_sampler(), given_NV, batch), expected_NV, strict=True):
        assert list(found.token_ids) == best(scores_V, count)
        # torch's log_softmax is 2e-5 off for some rows of this size.
        assert found.scores == pytest.approx(scores_V[list(found.token_ids)].tolist(), abs=5e-5)
        assert found.keys == found.scores
        assert found.extra_scores == pytest.approx(scores_V[[4, 9]].tolist(), abs=5e-5)
        assert found.log_total == pytest.approx(float(scores_V.double().logsumexp(0)), abs=5e-5)


def test_equal_scores_come_by_ascending_id_even_where_they_have_no_end() -> None:
    flat = torch.zeros(2, VOCAB)
    flat[1, 7000] = 1.0
    first, second = draw(new_sampler(), flat, [beam([1], {"num_candidates": 5}, seq_id=row) for row in range(2)])
    assert first.token_ids == (0, 1, 2, 3, 4)
    assert second.token_ids == (7000, 0, 1, 2, 3)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32))
def test_rows_of_every_kind_give_in_one_batch_what_they_give_alone(seed: int) -> None:
    rng = random.Random(seed)
    batch = [
        beam([5, 6], {"num_candidates": 8, "log_softmax": True}, seq_id=0),
        sequence([5, 6], params(do_sample=True, seed=rng.randrange(99), top_p=0.9), seq_id=1),
        beam([5, 6], {"num_candidates": 4, "gumbel_slot": 2}, seq_id=2, do_sample=True, top_k=30, seed=7),
        sequence([5, 6], params(top_logprobs=3), seq_id=3),
        beam([5, 6], {"num_candidates": 40}, seq_id=4, repetition_penalty=1.2, top_logprobs=2),
    ]
    given_NV = logits(5, seed)
    together = new_sampler().sample(given_NV.clone(), batch)
    for row, one in enumerate(batch):
        assert new_sampler().sample(given_NV[row : row + 1].clone(), [one]) == [together[row]]


def test_rows_are_normalised_to_the_same_bits_side_by_side_and_apart() -> None:
    given_NV = logits(3, 5)
    expected_NV = given_NV.log_softmax(-1)
    spec = {"num_candidates": 20, "log_softmax": True}
    between = sequence([1], params(), seq_id=9)
    for rows in ((0, 1, 2), (0, 2)):
        batch = [beam([1], spec, seq_id=row) if row in rows else between for row in range(3)]
        tokens = new_sampler().sample(given_NV.clone(), batch)
        for row in rows:
            found = tokens[row].candidates
            assert found is not None
            assert list(found.scores) == expected_NV[row, list(found.token_ids)].tolist()


def test_a_row_with_few_finite_scores_has_few_candidates_and_a_dead_one_none() -> None:
    given_NV = torch.full((2, VOCAB), -math.inf)
    given_NV[0, [30, 20]] = torch.tensor([1.0, 2.0])
    few, none = draw(new_sampler(), given_NV, [beam([1], {"num_candidates": 6}, seq_id=row) for row in range(2)])
    assert few.token_ids == (20, 30)
    assert few.log_total == pytest.approx(math.log(math.e + math.e**2))
    assert none == Candidates((), (), (), (), -math.inf)


@pytest.mark.parametrize("spec", [{}, {"log_softmax": True}, {"gumbel_slot": 0}])
def test_a_nan_is_an_error(spec: dict[str, Any]) -> None:
    given_NV = logits(1, 1)
    given_NV[0, 77] = math.nan
    with pytest.raises(FloatingPointError):
        new_sampler().sample(given_NV, [beam([1], {"num_candidates": 3, **spec}, do_sample="gumbel_slot" in spec)])


@pytest.mark.parametrize("slot", [None, 1])
def test_top_logprobs_come_with_the_candidates(slot: int | None) -> None:
    given_NV = logits(1, 3)
    spec = {"num_candidates": 40, "gumbel_slot": slot}
    one = beam([1], spec, top_logprobs=4, do_sample=slot is not None)
    token = new_sampler().sample(given_NV.clone(), [one])[0]
    expected = given_NV[0].double().log_softmax(0)
    assert token.logprobs is not None
    assert token.logprobs.chosen is None
    assert [top.token_id for top in token.logprobs.top] == best(given_NV[0], 4)
    for top in token.logprobs.top:
        assert top.logprob == pytest.approx(float(expected[top.token_id]), abs=2e-5)
    assert token.candidates is not None
    assert list(token.candidates.ranks) == [1 + int((given_NV[0] > score).sum()) for score in token.candidates.scores]


def test_noise_depends_on_seed_position_slot_and_token_alone() -> None:
    given_NV = logits(1, 5, ties=False)

    def keys(
        given_NV: Tensor = given_NV, slot: int = 0, seed: int = 3, output: tuple[int, ...] = ()
    ) -> dict[int, float]:
        one = beam([1], {"num_candidates": 50, "gumbel_slot": slot}, do_sample=True, seed=seed, output=list(output))
        found = draw(new_sampler(), given_NV, [one])[0]
        assert list(found.keys) == sorted(found.keys, reverse=True)
        noise = [key - score for key, score in zip(found.keys, found.scores, strict=True)]
        return dict(zip(found.token_ids, noise, strict=True))

    base = keys()
    assert base == keys()
    for other in (keys(slot=1), keys(seed=4), keys(output=(8,))):
        shared = base.keys() & other.keys()
        assert all(abs(base[token_id] - other[token_id]) > 1e-9 for token_id in shared)
    # Other scores, same noise.
    shifted = keys(given_NV + logits(1, 6, ties=False) * 0.1)
    assert len(base.keys() & shifted.keys()) > 3
    for token_id in base.keys() & shifted.keys():
        assert base[token_id] == pytest.approx(shifted[token_id], abs=1e-6)


def test_temperature_zero_has_no_noise() -> None:
    given_NV = logits(1, 5)
    one = beam([1], {"num_candidates": 5, "gumbel_slot": 1}, do_sample=True, temperature=0.0)
    found = draw(new_sampler(), given_NV, [one])[0]
    assert list(found.token_ids) == best(given_NV[0], 5)
    assert found.keys == found.scores


def test_a_fork_goes_on_from_its_parents_counts() -> None:
    sampler, spec = new_sampler(), {"num_candidates": 3}
    options = {"repetition_penalty": 1.4, "presence_penalty": 0.5}
    parent = beam([1, 2, 3], spec, seq_id=1, output=[4], **options)
    sampler.sample(logits(1, 0), [parent])
    children = [beam([1, 2, 3], spec, seq_id=2 + place, output=[4, 50 + place], **options) for place in range(2)]
    grandchild = beam([1, 2, 3], spec, seq_id=9, output=[4, 60], **options)
    sampler.fork([Fork(1, 2, 4), Fork(1, 3, 4), Fork(2, 9, 4)])
    parent.append(49)
    sampler.release([8])
    batch = [parent, *children, grandchild]
    given_NV = logits(4, 1)
    assert draw(sampler, given_NV, batch) == draw(new_sampler(), given_NV, batch)


def test_a_child_of_fewer_tokens_than_its_parent_counted_is_counted_anew() -> None:
    sampler, spec = new_sampler(), {"num_candidates": 3}
    parent = beam([1, 2, 3], spec, seq_id=1, output=[4, 5, 6], repetition_penalty=1.4)
    sampler.sample(logits(1, 0), [parent])
    sampler.fork([Fork(1, 2, 4)])
    child = beam([1, 2, 3], spec, seq_id=2, output=[4, 7], repetition_penalty=1.4)
    given_NV = logits(1, 1)
    assert draw(sampler, given_NV, [child]) == draw(new_sampler(), given_NV, [child])


def test_drafts_that_are_refused_leave_no_count_and_probes_no_state() -> None:
    rng = random.Random(5)
    options = params(repetition_penalty=1.5, frequency_penalty=0.7, do_sample=True, seed=3)
    lived, plain = sequence([1, 2, 3], options, seq_id=1), sequence([1, 2, 3], options, seq_id=1)
    sampler, next_id = new_sampler(), 100
    for step in range(12):
        confirmed = lived.num_tokens
        drafts = [rng.randrange(20) for _ in range(rng.randrange(4))]
        lived.token_ids += drafts
        lived.num_draft_tokens = len(drafts)
        for place in range(confirmed - 1, lived.num_tokens if drafts else confirmed - 1):
            verifier = sequence([1, 2, 3], options, seq_id=next_id, output=lived.token_ids[3 : place + 1])
            verifier.origin = lived
            lived.verifiers.append((place, verifier))
            next_id += 1
        drawers = [verifier for _, verifier in lived.verifiers] or [lived]
        given_NV = logits(1, step, vocab=20).repeat(len(drawers), 1)
        drawn = [token.token_id for token in sampler.sample(given_NV.clone(), drawers)]
        fresh = new_sampler()
        for drawer, token_id, row in zip(drawers, drawn, given_NV, strict=True):
            plain.token_ids[:] = drawer.token_ids
            assert fresh.sample(row[None].clone(), [plain])[0].token_id == token_id
            fresh.release([1])
        accepted = rng.randrange(len(drafts) + 1)
        lived.roll_back(confirmed + accepted)
        lived.append(drawn[accepted])
    assert set(sampler._states) == {1}
    assert sampler._forked == {}
    sampler.release([1])
    assert sampler._states == {}


def test_a_fork_that_never_draws_is_forgotten_with_its_release() -> None:
    sampler = new_sampler()
    parent = beam([1, 2], {"num_candidates": 2}, seq_id=1, repetition_penalty=1.1)
    sampler.sample(logits(1, 0), [parent])
    sampler.fork([Fork(1, 2, 2)])
    sampler.release([1, 2])
    assert (sampler._states, sampler._forked) == ({}, {})


def test_a_shortened_sequence_is_counted_anew() -> None:
    sampler, options = new_sampler(), params(repetition_penalty=2.0)
    one = sequence([1, 2], options, output=[5, 6, 7])
    sampler.sample(logits(1, 0), [one])
    one.roll_back(3)
    given_NV = logits(1, 1)
    assert sampler.sample(given_NV.clone(), [one]) == new_sampler().sample(given_NV.clone(), [one])
    assert torch.equal(sampler.processed_scores(given_NV, [one]), new_sampler().processed_scores(given_NV, [one]))
