"""No log-probability is above 0: every kernel, mode of drawing, and scores far from 0."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from factories.engine.sampling_batches import logits, random_batch
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.request import Logprob, at_most_0
from penstock.generation.engine.decoding.beams import BeamLogprobs
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.sampling.sampling_kernels import NativeSampling, QueuedSampling, SamplingKernels

KERNELS = {"native": NativeSampling(), "torch": SamplingKernels(), "queued": QueuedSampling()}


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def too_high(entries: list[Logprob]) -> list[float]:
    return [one.logprob for one in entries if not one.logprob <= 0.0]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("offset", [0.0, 97.3, -1011.7])
def test_no_logprob_is_above_0(name: str, offset: float) -> None:
    rng = random.Random(5)
    for round_ in range(12):
        rows = 6
        temperature = rng.choice([0.2, 0.7, 1.3])
        fixed = {"temperature": temperature, "top_k": rng.choice([0, 1, 40]), "top_logprobs": 5}
        batch = random_batch(rng, rows, do_sample=True, **fixed, renormalize_logits=False)
        scores_NV = (logits(rows, round_, scale=12.0) + offset).contiguous()
        found = Sampler(torch.device("cpu"), KERNELS[name]).sample(scores_NV, batch)
        entries = [
            entry for one in found if one.logprobs for entry in (one.logprobs.chosen, *one.logprobs.top) if entry
        ]
        assert len(entries) >= rows
        assert too_high(entries) == []


@pytest.mark.parametrize("name", KERNELS)
def test_no_logprob_of_a_prompt_is_above_0(name: str) -> None:
    scores_RV = logits(9, 3, scale=40.0) * 3 + 333.3
    chosen_R = scores_RV.argmax(-1)
    for one in KERNELS[name].position_logprobs(scores_RV, chosen_R, [20] * 9):
        assert one.chosen is not None
        assert too_high([one.chosen, *one.top]) == []


@pytest.mark.parametrize("name", KERNELS)
def test_no_logprob_of_a_beam_is_above_0(name: str) -> None:
    rng = random.Random(1)
    batch = random_batch(rng, 4, do_sample=False, temperature=1.0, top_logprobs=5)
    for one in batch:
        one.draw = DrawSpec(kind=DrawKind.CANDIDATES, num_candidates=6, log_softmax=True)
    for drawn in Sampler(torch.device("cpu"), KERNELS[name]).sample(logits(4, 2, scale=30.0) + 300.7, batch):
        assert drawn.candidates is not None
        for token_id, score in zip(drawn.candidates.token_ids, drawn.candidates.scores, strict=True):
            made = BeamLogprobs.of(None, replace(drawn), token_id, score).last
            assert made.chosen is not None
            assert too_high([made.chosen, *made.top]) == []


def test_a_log_probability_that_is_no_number_stays_one() -> None:
    assert at_most_0(5.4e-6) == 0.0
    assert at_most_0(-0.25) == -0.25
    assert at_most_0(float("nan")) != at_most_0(float("nan"))
