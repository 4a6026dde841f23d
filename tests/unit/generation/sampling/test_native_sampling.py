"""Sampling by the C++ kernels: the reference's tokens and logprobs, whatever the batch and the number of threads."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from factories.engine.fake_engine import request, run
from factories.engine.model_engine import ROOMY
from factories.engine.sampling_batches import expected_draw, logits, random_batch
from factories.engine.sequences import params, sequence
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.checkpoint import demo_folder
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.step import SampledToken
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.sampling.batch import SamplingBatch
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.sampling.sampling_kernels import NativeSampling, SamplingKernels
from penstock.generation.sampling.state import SamplingState

CPU = torch.device("cpu")
KERNELS, REFERENCE = NativeSampling(), SamplingKernels()
# Around the sizes of vectors, blocks and parts, and one of many blocks.
VOCABS = (1, 2, 7, 8, 9, 16, 31, 127, 128, 129, 1000, 4096, 4111, 40_009)
# torch sums a row in fp32: up to so much off.
CLOSE = 5e-5


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def assert_alike(found: SampledToken, expected: SampledToken) -> None:
    assert found.token_id == expected.token_id
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        pairs = [(found.logprobs.chosen, expected.logprobs.chosen)]
        pairs += zip(found.logprobs.top, expected.logprobs.top, strict=True)
        for one, other in pairs:
            assert one is not None
            assert other is not None
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 4.0, 12.0]))
def check_tokens(seed: int, scale: float) -> None:
    batch = random_batch(random.Random(seed), 6)
    given_NV = logits(6, seed, scale=scale)
    scores_NV = Sampler(CPU).processed_scores(given_NV, batch)
    expected = Sampler(CPU).sample(given_NV.clone(), batch)
    found = Sampler(CPU, KERNELS).sample(given_NV.clone(), batch)
    assert [token.token_id for token in found] == [
        expected_draw(row, one) for row, one in zip(scores_NV, batch, strict=True)
    ]
    if scale:
        # The reference may list any of equal scores.
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)


def test_tokens_and_logprobs_are_those_of_the_reference() -> None:
    check_tokens()


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(VOCABS), st.integers(1, 5), st.integers(0, 1000), st.booleans())
def check_totals(vocab: int, rows: int, seed: int, removed: bool) -> None:
    scores_NV = logits(rows, seed, vocab=vocab)
    if removed:
        scores_NV[torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < 0.7] = -math.inf
        scores_NV[:, vocab // 2] = 1.0
    totals = scores_NV.double().logsumexp(-1).tolist()
    assert KERNELS.log_totals(scores_NV, list(range(rows))) == pytest.approx(totals, abs=1e-6)


def test_rows_are_summed_as_torch_does() -> None:
    check_totals()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.6, 5.0, 60.0])
def test_the_nucleus_is_the_smallest_set_that_holds_top_p(scale: float, top_p: float) -> None:
    scores_V = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * scale
    rows, neutral = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    temperature, limit = torch.ones(1), torch.tensor([top_p], dtype=torch.float64)
    _, lowest, last, _ = torch.ops.penstock.draw_rows(scores_V[None], rows, temperature, rows, limit, neutral, neutral)
    ordered, ids = scores_V.double().sort(descending=True, stable=True)
    sums = ordered.softmax(-1).cumsum(-1)
    place = int((ids == last).nonzero())
    assert ordered[place] == float(lowest)
    before = 0.0 if place == 0 else float(sums[place - 1])
    # Summed in another order, in fp32 weights.
    assert place == 0 or before < top_p + 1e-6
    assert float(sums[place]) > top_p - 1e-6


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([129, 40_009]), st.booleans())
def check_warpers(seed: int, vocab: int, has_beams: bool) -> None:
    beams = {"mode": BeamOptions(2)} if has_beams else {}
    batch = random_batch(random.Random(seed), 4, do_sample=True, **beams)
    kept = [one for one in batch if one.params.temperature]
    states = [SamplingState(one) for one in kept]
    # Without equals: which of them a beam keeps is any in the reference.
    found = torch.randn(len(kept), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    expected = found.clone()
    for kernels, scores_NV in ((KERNELS, found), (REFERENCE, expected)):
        step = SamplingBatch(states, CPU, kernels)
        kernels.drawing(step, scores_NV, step.context()).warp(torch.arange(len(kept)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_rows_are_warped_as_by_the_reference() -> None:
    check_warpers()


def test_a_row_is_the_same_in_every_batch_and_on_any_number_of_threads() -> None:
    rng, threads = random.Random(3), torch.get_num_threads()
    batch = random_batch(rng, 7, top_logprobs=3)
    given_NV = logits(7, 3)
    alone = [Sampler(CPU, KERNELS).sample(given_NV[row : row + 1].clone(), [one])[0] for row, one in enumerate(batch)]
    try:
        torch.set_num_threads(3)
        assert Sampler(CPU, KERNELS).sample(given_NV.clone(), batch) == alone
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "top_k": 5, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_an_error(options: dict, value: float) -> None:
    given_NV = logits(2, 0)
    given_NV[1, 40_001] = value
    batch = [sequence([1], params(**options), seq_id=row) for row in range(2)]
    with pytest.raises(FloatingPointError):
        Sampler(CPU, KERNELS).sample(given_NV, batch)


def test_prompt_logprobs_are_those_of_the_reference() -> None:
    scores_NV, chosen, num_top = logits(3, 9), torch.tensor([3, 40_008, 0]), [0, 4, 20]
    found = KERNELS.position_logprobs(scores_NV, chosen, num_top)
    for one, other in zip(found, REFERENCE.position_logprobs(scores_NV, chosen, num_top), strict=True):
        assert_alike(SampledToken(0, logprobs=one), SampledToken(0, logprobs=other))


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(VOCABS), st.integers(0, 2**64 - 1), st.integers(0, 40), st.sampled_from([0.5, 4.0]), st.booleans()
)
def check_noise(vocab: int, stream: int, count: int, scale: float, removed: bool) -> None:
    scores_NV = logits(3, stream % 1000, vocab=vocab, scale=scale)
    if removed:
        scores_NV[:, : vocab // 2] = -math.inf
        scores_NV[2] = -math.inf
    given = (scores_NV, [2, 0], [stream, stream ^ 5], [count, 2 * count])
    for (ids, keys), (expected_ids, expected_keys) in zip(
        KERNELS.top_noisy(*given), REFERENCE.top_noisy(*given), strict=True
    ):
        assert ids.tolist() == expected_ids.tolist()
        assert keys.tolist() == pytest.approx(expected_keys.tolist(), rel=1e-12)


def test_the_highest_noisy_scores_are_those_of_the_reference() -> None:
    check_noise()


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 3, 8, 50, 700, 5000]), st.integers(0, 2**64 - 2), st.data())
def check_heads(vocab: int, seed: int, data: st.DataObject) -> None:
    count, token_id = data.draw(st.integers(0, vocab)), data.draw(st.integers(0, vocab - 1))
    head = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count]
    expected = [bool((head == token_id).any())]
    assert KERNELS.in_head(vocab, count, [seed], [token_id]) == expected
    assert REFERENCE.in_head(vocab, count, [seed], [token_id]) == expected


def test_the_head_of_a_permutation_holds_what_torch_puts_there() -> None:
    check_heads()


def test_impossible_arguments_are_refused_not_read() -> None:
    scores_NV, rows = logits(2, 0, vocab=10), torch.tensor([0, 2])
    with pytest.raises(RuntimeError):
        torch.ops.penstock.log_totals(scores_NV, rows)
    with pytest.raises(RuntimeError):
        torch.ops.penstock.log_totals(scores_NV.t(), rows[:1])
    with pytest.raises(RuntimeError):
        torch.ops.penstock.log_totals(scores_NV.double(), rows[:1])
    with pytest.raises(RuntimeError):
        torch.ops.penstock.top_noisy_scores(scores_NV, rows[:1], rows[:1], 0)
    with pytest.raises(IndexError):
        KERNELS.position_logprobs(scores_NV, torch.tensor([3, 10]), [0, 0])


def test_the_demo_model_answers_as_without_kernels() -> None:
    prompt = list(range(20, 60))
    options = [
        {},
        {"top_logprobs": 3, "repetition_penalty": 1.1},
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
        {"do_sample": True, "top_p": 0.95, "top_logprobs": 2},
        {"do_sample": True, "min_p": 0.02, "typical_p": 0.95},
        {"mode": BeamOptions(3)},
    ]
    answers = []
    for instruction_set in (None, "native"):
        device = CPUDevice()
        device.instruction_set = instruction_set
        model = load_model(demo_folder(), dtype="float32", device=device)
        geometry = (model.config.num_layers, ROOMY.num_blocks, ROOMY.block_size, model.config.num_kv_heads)
        kv = KVCachePool(*geometry, model.config.head_dim, model.dtype, model.device)
        engine = Engine(ROOMY, ModelRunner(model, kv, kernels=device.sampling_kernels()), None)
        requests = [request(prompt, request_id=str(i), max_new_tokens=10, **some) for i, some in enumerate(options)]
        answers.append({name: answer.ids for name, answer in run(engine, *requests).items()})
    assert answers[0] == answers[1]
