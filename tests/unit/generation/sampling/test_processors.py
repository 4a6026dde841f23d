"""Each processor against transformers' class on random scores, in batches where only some rows use it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import cpu_device, new_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.sampling.batch import SamplingBatch
from penstock.generation.sampling.ops.counted_draws import Stream, keys_of, stream_keys, uniforms
from penstock.generation.sampling.processors import (
    PROCESSORS,
    XTC,
    BadWords,
    LogitBias,
    MinNewTokens,
    MinP,
    OpenAIPenalties,
    Processor,
    Renormalize,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
)
from penstock.generation.sampling.processors.base import Stage
from penstock.generation.sampling.row_plan import RowPlan
from penstock.generation.sampling.state import SamplingState
from penstock.generation.sampling.trackers import NgramFollowers, TokenCounts
from torch import Tensor
from transformers.generation import logits_process as reference

CPU = torch.device("cpu")
VOCAB = 97
torch.set_num_threads(1)


def scores(rows: int, seed: int, vocab: int = VOCAB, *, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, vocab, generator=generator) * 4
    return drawn.to(torch.bfloat16).float() if ties else drawn


def process(kind: type[Processor], sequences: list[Sequence], given_NV: Tensor) -> Tensor:
    """Return the scores after `kind`, for every row of the batch, wanted or not."""
    states = [SamplingState(one) for one in sequences]
    for state in states:
        state.catch_up()
    rows = [row for row, one in enumerate(sequences) if kind.wants(one.params)]
    result = given_NV.clone()
    batch = SamplingBatch(states, CPU, cpu_device().sampling_kernels())
    kind(rows, [states[row] for row in rows], CPU).apply(result, batch.context())
    return result


def warp(kind: type[Processor], options: list[SamplingParams], given_RV: Tensor) -> Tensor:
    """Return the scores after `kind`, for sampled rows with these options."""
    states = [SamplingState(sequence([1], one, seq_id=row)) for row, one in enumerate(options)]
    rows = [row for row, one in enumerate(options) if kind.is_in_draw or kind.wants(one)]
    result = given_RV.clone()
    every_R = torch.arange(len(given_RV))
    context = SamplingBatch(states, CPU, cpu_device().sampling_kernels()).context().of_rows(every_R, every_R)
    kind(rows, [states[row] for row in rows], CPU).apply(result, context)
    return result


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_repetition_penalty_covers_prompt_and_output(seed: int) -> None:
    penalties = [1.0, 1.05, 1.7, 0.8]
    batch = [
        sequence(ids(seed, 30), params(repetition_penalty=penalty), seq_id=row, output=ids(seed + 1, 5))
        for row, penalty in enumerate(penalties)
    ]
    before = scores(4, seed)
    after = process(RepetitionPenalty, batch, before)
    for row, (one, penalty) in enumerate(zip(batch, penalties, strict=True)):
        expected = reference.RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([one.token_ids]), before[row : row + 1]
        )
        torch.testing.assert_close(after[row], expected[0], atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 300), max_size=200), max_size=4))
def test_tokens_are_counted_alike_one_by_one_and_many_at_once(parts: list[list[int]]) -> None:
    counts = TokenCounts()
    for part in parts:
        counts.extend(part)
        for token_id in part[:3]:
            counts.add(token_id)
    expected = Counter(token_id for part in parts for token_id in [*part, *part[:3]])
    assert len(counts) == len(expected)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_frequency_and_presence_penalties_count_the_output_only(seed: int) -> None:
    options = [(0.0, 0.0), (0.5, 0.0), (0.0, 1.5), (-1.2, 0.3)]
    output = [3, 3, 3, 8, 90, 8]
    batch = [
        sequence([3, 4, 5], params(frequency_penalty=f, presence_penalty=p), seq_id=row, output=output)
        for row, (f, p) in enumerate(options)
    ]
    before = scores(4, seed)
    after = process(OpenAIPenalties, batch, before)
    counts = torch.bincount(torch.tensor(output), minlength=VOCAB).float()
    for row, (frequency, presence) in enumerate(options):
        expected = before[row] - frequency * counts - presence * (counts > 0)
        torch.testing.assert_close(after[row], expected, atol=1e-5, rtol=0)


def test_output_penalties_of_a_first_draw_change_nothing() -> None:
    before = scores(1, 0)
    assert torch.equal(process(OpenAIPenalties, [sequence([1, 2], params(presence_penalty=2.0))], before), before)


@pytest.mark.parametrize("generated", [0, 2, 3, 4])
def test_no_eos_before_min_new_tokens(generated: int) -> None:
    output = ids(0, generated)
    batch = [
        sequence([1, 2], params(), seq_id=0, output=output),
        sequence([1, 2], params(min_new_tokens=3, eos_token_ids=(5, 96)), seq_id=1, output=output),
        sequence([1, 2], params(min_new_tokens=4, eos_token_ids=(5,)), seq_id=2, output=output),
    ]
    before = scores(3, 1)
    after = process(MinNewTokens, batch, before)
    assert torch.equal(after[0], before[0])
    for row, minimum, eos in ((1, 3, [5, 96]), (2, 4, [5])):
        expected = reference.MinNewTokensLengthLogitsProcessor(2, minimum, eos)(
            torch.tensor([batch[row].token_ids]), before[row : row + 1]
        )
        assert torch.equal(after[row], expected[0])


def test_eos_ids_beyond_the_vocabulary_are_ignored() -> None:
    before = scores(1, 1)
    after = process(MinNewTokens, [sequence([1], params(min_new_tokens=3, eos_token_ids=(VOCAB, 5)))], before)
    assert (after == -math.inf).sum() == 1


def test_logit_bias_is_added_to_its_tokens() -> None:
    batch = [
        sequence([1], params(logit_bias={4: 2.5, 90: -100.0}), seq_id=0),
        sequence([1], params(), seq_id=1),
        sequence([1], params(logit_bias={0: 1.0}), seq_id=2),
    ]
    before = scores(3, 2)
    expected = before.clone()
    expected[0, 4] += 2.5
    expected[0, 90] -= 100
    expected[2, 0] += 1
    assert torch.equal(process(LogitBias, batch, before), expected)


def test_temperature_divides() -> None:
    temperatures = [1.0, 0.7, 2.0]
    before = scores(3, 3)
    after = warp(Temperature, [params(temperature=t) for t in temperatures], before)
    for row, temperature in enumerate(temperatures):
        expected = reference.TemperatureLogitsWarper(temperature)(None, before[row : row + 1])
        torch.testing.assert_close(after[row], expected[0], atol=1e-5, rtol=1e-6)


def test_tiny_temperature_leaves_finite_scores() -> None:
    after = warp(Temperature, [params(temperature=1e-300)], scores(1, 3))
    assert after.isfinite().all()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, VOCAB + 3), min_size=1, max_size=5), st.integers(0, 2**31), st.booleans())
def test_top_k_keeps_the_highest_and_their_ties(ks: list[int], seed: int, ties: bool) -> None:
    before = scores(len(ks), seed, ties=ties)
    after = warp(TopK, [params(top_k=k) for k in ks], before)
    for row, k in enumerate(ks):
        expected = before[row] if k == 0 else reference.TopKLogitsWarper(k)(None, before[row : row + 1])[0]
        assert torch.equal(after[row], expected)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.integers(0, 2**31))
def test_top_p_keeps_the_nucleus(ps: list[float], seed: int) -> None:
    before = scores(len(ps), seed)
    after = warp(TopP, [params(top_p=p) for p in ps], before)
    for row, p in enumerate(ps):
        expected = before[row] if p == 1.0 else reference.TopPLogitsWarper(p)(None, before[row : row + 1])[0]
        differing = (after[row] != expected).nonzero()[:, 0]
        # transformers sums in fp32: it may decide otherwise about a token whose sum is top_p up to rounding.
        probs = before[row].double().softmax(-1)
        above = torch.stack([probs[probs > probs[i]].sum() for i in differing]) if len(differing) else torch.zeros(0)
        assert ((above - p).abs() < 1e-6).all()


def test_top_p_keeps_the_lower_ids_of_equal_scores() -> None:
    before = torch.zeros(1, 10)
    after = warp(TopP, [params(top_p=0.35)], before)
    assert (after[0] == 0).nonzero()[:, 0].tolist() == [0, 1, 2, 3]


def test_top_p_of_zero_keeps_the_most_likely() -> None:
    before = scores(1, 4)
    after = warp(TopP, [params(top_p=0.0)], before)
    assert after.isfinite().nonzero().tolist() == [[0, int(before.argmax())]]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.integers(0, 2**31))
def test_min_p_drops_what_is_unlikely_beside_the_best(ps: list[float], seed: int) -> None:
    before = scores(len(ps), seed)
    after = warp(MinP, [params(min_p=p) for p in ps], before)
    for row, p in enumerate(ps):
        expected = reference.MinPLogitsWarper(p)(None, before[row : row + 1])[0]
        ratios = before[row].double().softmax(-1) / before[row].double().softmax(-1).max()
        assert ((ratios - p).abs()[after[row] != expected] < 1e-6).all()


def test_the_stages_run_one_after_another_and_the_draw_does_warpers_only() -> None:
    assert [kind.stage.value for kind in PROCESSORS] == sorted(kind.stage.value for kind in PROCESSORS)
    assert {kind for kind in PROCESSORS if kind.is_in_draw} == {Temperature, TopK, TopP, MinP}
    assert all(kind.stage is Stage.WARP for kind in PROCESSORS if kind.is_in_draw)


@pytest.mark.parametrize("kind", [kind for kind in PROCESSORS if kind.keeps_odds])
def test_a_processor_that_keeps_the_odds_is_left_out_where_a_token_is_drawn(kind: type[Processor]) -> None:
    known: dict[type[Processor], dict[str, bool]] = {Renormalize: {"renormalize_logits": True}}
    options = known[kind]
    batch = [sequence([1], params(do_sample=row > 0, **options), seq_id=row) for row in range(2)]
    beam = sequence([1], params(**options), seq_id=2)
    beam.draw = DrawSpec(DrawKind.CANDIDATES, 2)
    assert [type(one) for one in new_sampler().batch_of(batch).late_processors] == []
    assert [type(one) for one in new_sampler().batch_of([*batch, beam]).late_processors] == [kind]
    before = scores(2, 1)
    torch.testing.assert_close(process(kind, batch, before).softmax(-1), before.softmax(-1))


def test_greedy_rows_have_no_warper() -> None:
    greedy = params(typical_p=0.5, top_n_sigma=1.0)
    sampled = params(do_sample=True, typical_p=0.5)
    assert not RowPlan.of(greedy).processors
    assert RowPlan.of(sampled).processors == (TypicalP,)


def top_n_sigma(scores_V: npt.NDArray[np.float32], n: float) -> npt.NDArray[np.float32]:
    """llama.cpp's: what is below max - n * sigma of the finite scores goes; n <= 0 is off."""
    finite = scores_V[np.isfinite(scores_V)].astype(np.float64)
    if n <= 0 or not len(finite):
        return scores_V
    sigma = math.sqrt(float(np.mean((finite - finite.mean()) ** 2)))
    return np.where(scores_V < finite.max() - n * sigma, np.float32(-np.inf), scores_V)


@pytest.mark.parametrize("seed", range(5))
def test_top_n_sigma_is_the_formula_alone_and_beside_others(seed: int) -> None:
    values = [0.0, 0.3, 1.0, 2.0, 4.0, 1e-6, 1e30]
    before = scores(len(values), seed)
    before[:, ids(seed, 9)] = -torch.inf
    batched = warp(TopNSigma, [params(do_sample=True, top_n_sigma=n) for n in values], before)
    for row, n in enumerate(values):
        alone = warp(TopNSigma, [params(do_sample=True, top_n_sigma=n)], before[row : row + 1])[0]
        assert torch.equal(batched[row], alone)
        np.testing.assert_array_equal(alone.numpy(), top_n_sigma(before[row].numpy(), n))
    kept = batched.isfinite().sum(-1).tolist()
    assert kept[0] == kept[6] >= kept[4] > kept[5] == 1


def test_top_n_sigma_comes_before_the_temperature_and_top_k_and_changes_nobody_else() -> None:
    """sigma is of all scores, not of the k that top_k leaves; what stays is the same at every temperature."""
    options = [
        params(do_sample=True, top_n_sigma=1.5, temperature=2.0, top_k=40),
        params(do_sample=True, top_n_sigma=1.5, temperature=0.1),
        params(do_sample=True, temperature=2.0),
        params(top_n_sigma=1.5),
    ]
    before = scores(1, 3).expand(len(options), -1).contiguous()
    batch = [sequence([1, 2], one, seq_id=row) for row, one in enumerate(options)]
    after = new_sampler().processed_scores(before.clone(), batch)
    left = np.isfinite(top_n_sigma(before[0].numpy(), 1.5))
    assert 1 < left.sum() < 40
    np.testing.assert_array_equal(after[0].isfinite().numpy(), left)
    np.testing.assert_array_equal(after[1].isfinite().numpy(), left)
    assert torch.equal(after[2], before[2] / 2)
    assert torch.equal(after[3], before[3])
    # A draw takes no other token than those, whatever kernels draw it.
    drawn = {
        new_sampler().sample(before[:1].clone(), [sequence([1], options[0], output=[2] * place)])[0].token_id
        for place in range(50)
    }
    assert drawn <= set(np.flatnonzero(left).tolist())
    assert len(drawn) > 1


def test_top_n_sigma_leaves_a_beam_a_way_on_and_a_row_of_nothing_as_it_is() -> None:
    beams = params(do_sample=True, top_n_sigma=1e-6, mode=BeamOptions(2), eos_token_ids=(4, 5))
    (after,) = warp(TopNSigma, [beams], scores(1, 0))
    assert int(after.isfinite().sum()) == 3
    nothing = torch.full((1, VOCAB), -torch.inf)
    assert torch.equal(warp(TopNSigma, [params(do_sample=True, top_n_sigma=1.0)], nothing), nothing)


@given(
    size=st.integers(1, 3),
    prompt=st.lists(st.integers(0, 3), max_size=6),
    moves=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 3)), max_size=40),
)
def test_copies_of_ngram_followers_never_see_what_the_others_add(
    size: int, prompt: list[int], moves: list[tuple[int, bool, int]]
) -> None:
    lines: list[tuple[NgramFollowers, list[int]]] = [(NgramFollowers(size, len(prompt)), list(prompt))]
    lines[0][0].follow(prompt, 0)
    for number, branches, token_id in moves:
        followers, ids = lines[number % len(lines)]
        if branches:
            lines.append((followers.copy(), list(ids)))
        ids.append(token_id)
        followers.follow(ids, len(ids) - 1)
    for followers, ids in lines:
        ends = range(size - 1, len(ids))
        last = ids[len(ids) - size + 1 :]
        expected = {ids[end] for end in ends if ids[end - size + 1 : end] == last} if len(ids) >= size - 1 else set()
        assert followers.after(ids) == expected


def test_a_copy_of_ngram_followers_costs_no_set_per_ngram() -> None:
    ids = list(range(100))
    followers = NgramFollowers(2, 0)
    followers.follow(ids, 0)
    twin = followers.copy()
    assert all(twin._of_output[ngram] is held for ngram, held in followers._of_output.items())


def test_the_bias_of_many_tokens_is_held_as_arrays_once_per_request() -> None:
    options = params(bad_words_ids=tuple((token_id,) for token_id in range(50)))
    sampler = new_sampler()
    batch = [sequence([1], options, seq_id=row) for row in range(3)]
    sampler.sample(scores(3, 0), batch)
    assert len({id(state.plan) for state in sampler._states.values()}) == 1
    ((ids_E, values_E),) = sampler._states[0].plan.prepared[BadWords].after([1])  # type: ignore[attr-defined]
    assert ids_E.tolist() == list(range(50))
    assert values_E.tolist() == [-math.inf] * 50


def xtc(probs: npt.NDArray[np.float64], threshold: float) -> set[int]:
    """Ids that text-generation-webui and llama.cpp remove: all at least as likely as the threshold but the last of
    them, in descending order. Of equals the lowest id is taken as the last."""
    choices = [token_id for token_id, prob in enumerate(probs) if prob > 0 and prob >= threshold]
    return set(choices) - {min(choices, key=lambda token_id: (probs[token_id], token_id))} if choices else set()


@pytest.mark.parametrize("seed", range(5))
def test_xtc_is_the_formula_alone_and_beside_others(seed: int) -> None:
    thresholds = [0.01, 0.05, 0.1, 0.3, 0.5, 0.0]
    options = [params(do_sample=True, xtc_probability=1.0, xtc_threshold=t) for t in thresholds]
    before = scores(len(options), seed, ties=bool(seed % 2)) / 2
    before[:, ids(seed, 9)] = -torch.inf
    batched = warp(XTC, options, before)
    for row, (one, threshold) in enumerate(zip(options, thresholds, strict=True)):
        alone = warp(XTC, [one], before[row : row + 1])[0]
        assert torch.equal(batched[row], alone)
        removed = xtc(before[row].softmax(-1).numpy().astype(np.float64), float(np.float32(threshold)))
        expected = before[row].clone()
        expected[sorted(removed)] = -torch.inf
        assert torch.equal(alone, expected)
    assert int((batched[0] != before[0]).sum()) > 1
    assert int(batched[5].isfinite().sum()) == 1


def test_xtc_drops_nothing_from_one_choice_and_is_off_above_a_half() -> None:
    peaked = torch.zeros(1, VOCAB)
    peaked[0, 7] = 20.0
    assert torch.equal(warp(XTC, [params(do_sample=True, xtc_probability=1.0)], peaked), peaked)
    for off in ({"xtc_probability": 1.0, "xtc_threshold": 0.51}, {"xtc_threshold": 0.1}):
        assert RowPlan.of(params(do_sample=True, **off)).processors == ()
    nothing = torch.full((1, VOCAB), -torch.inf)
    assert torch.equal(warp(XTC, [params(do_sample=True, xtc_probability=1.0)], nothing), nothing)


def test_xtc_leaves_a_beam_a_way_on() -> None:
    """Three tokens must stay for two end-of-sequence ids: it does not drop what would leave fewer."""
    beams = params(do_sample=True, xtc_probability=1.0, xtc_threshold=0.0, mode=BeamOptions(2), eos_token_ids=(4, 5))
    before = scores(1, 0)
    assert torch.equal(warp(XTC, [beams], before), before)


def test_xtc_draws_its_chance_by_seed_and_position_whatever_the_batch() -> None:
    """The chance at every position, as docs/guide/sampling.md has it; the token's own uniform takes no part."""
    options = params(do_sample=True, xtc_probability=0.4, xtc_threshold=0.2, seed=11)
    before = torch.full((1, VOCAB), -torch.inf)
    before[0, :3] = torch.tensor([2.0, 1.9, 0.0])
    keys = keys_of(stream_keys(np.array([11], np.uint64)), Stream.XTC)
    dropped = []
    for position in range(60):
        other = sequence([1], params(do_sample=True, xtc_probability=1.0, xtc_threshold=0.2, seed=3), seq_id=0)
        plain = sequence([1], params(do_sample=True, seed=4), seq_id=1)
        one = sequence([1], options, seq_id=2, output=[2] * position)
        (alone,) = new_sampler().processed_scores(before.clone(), [one])
        batched = new_sampler().processed_scores(before.repeat(3, 1), [other, one, plain])
        assert torch.equal(batched[1], alone)
        assert torch.equal(batched[2], before[0])
        dropped.append(bool(alone[0].isinf()))
        assert dropped[-1] == bool(uniforms(keys, np.array([position], np.uint64))[0] < 0.4)
    assert 10 < sum(dropped) < 40
