"""Every processor and warper, alone and in any combination, against the list that transformers builds itself."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import pytest
import torch
from factories.engine.processors import ReferenceProcessors
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import new_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.decoding_mode import SynthIdOptions, WatermarkOptions
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.beam_options import BeamOptions
from torch import Tensor
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor

CPU = torch.device("cpu")
VOCAB = 131
EOS = (2, 9)
REFERENCE = ReferenceProcessors(VOCAB)
torch.set_num_threads(1)

# Name -> the options that switch it on, with several values; each alone is a case of its own.
CASES: dict[str, list[dict[str, Any]]] = {
    "sequence_bias": [{"sequence_bias": {(3,): 4.0, (5, 6): -3.0, (6,): 1.5, (4, 5, 6): 2.0, (7, 8): -math.inf}}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 1.7}, {"encoder_repetition_penalty": 0.6}],
    "repetition_penalty": [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": size} for size in (1, 2, 3)],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": size} for size in (1, 2, 3)],
    "bad_words_ids": [{"bad_words_ids": ((4,), (5, 6), (2,), (9, 2), (6, 5, 4), (8, 8))}],
    "min_new_tokens": [{"min_new_tokens": 3}],
    "allowed_token_trie": [{"allowed_token_trie": ((4, 5, 6), (4, 5), (7,), (4, 8, 2))}],
    "allowed_token_ids": [{"allowed_token_ids": frozenset({4, 5, 6, 7, 8, 2})}],
    "forced_bos_token_id": [{"forced_bos_token_id": 6}],
    "forced_eos_token_ids": [{"forced_eos_token_ids": (9,), "max_new_tokens": 4}],
    "remove_invalid_values": [{"remove_invalid_values": True}],
    "exponential_decay_length_penalty": [
        {"exponential_decay_length_penalty": (1, 1.4)},
        {"exponential_decay_length_penalty": (0, 0.8)},
    ],
    "suppress_tokens": [{"suppress_tokens": (3, 4, 8)}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": (5, 6)}],
    "temperature": [{"do_sample": True, "temperature": value} for value in (0.3, 1.9)],
    "top_h": [{"do_sample": True, "top_h": value} for value in (0.2, 0.7, 1.0)],
    "top_k": [{"do_sample": True, "top_k": value} for value in (1, 12, 60)],
    "top_p": [{"do_sample": True, "top_p": value} for value in (0.1, 0.8, 0.99)],
    "min_p": [{"do_sample": True, "min_p": value} for value in (0.02, 0.4)],
    "typical_p": [{"do_sample": True, "typical_p": value} for value in (0.1, 0.6, 0.95)],
    "epsilon_cutoff": [{"do_sample": True, "epsilon_cutoff": value} for value in (0.003, 0.1)],
    "eta_cutoff": [{"do_sample": True, "eta_cutoff": value} for value in (0.002, 0.2)],
    "watermark": [
        {"watermark": WatermarkOptions()},
        {"watermark": WatermarkOptions(0.5, 1.3, 7, "lefthash", 3)},
        {"watermark": WatermarkOptions(0.4, 2.5, 15485863, "selfhash", 1)},
        {"watermark": WatermarkOptions(0.3, 2.0, 99_999_999_977, "selfhash", 4)},
    ],
    "synthid": [
        {"watermark": SynthIdOptions(5, (654, 400, 836, 123, 340, 443, 597, 160, 57))},
        {"watermark": SynthIdOptions(2, (7, -3, 1 << 40), context_history_size=2, sampling_table_seed=9)},
        {"watermark": SynthIdOptions(4, (11, 12), sampling_table_size=97, skip_first_ngram_calls=True)},
        {"watermark": SynthIdOptions(1, tuple(range(30)), context_history_size=0)},
    ],
    "renormalize_logits": [{"renormalize_logits": True}],
}
SORTING = {"do_sample", "watermark"}
EACH = [
    pytest.param(options, id=f"{name}-{place}") for name, some in CASES.items() for place, options in enumerate(some)
]


def logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def prompt(rng: random.Random) -> list[int]:
    """Few different tokens, so that n-grams, bad words and biased sequences do occur."""
    return [rng.randrange(3, 9) for _ in range(rng.choice([1, 2, 5, 12, 30]))]


def options_of(rng: random.Random, share: float) -> dict[str, Any]:
    """A random mix; a share of all options is on."""
    chosen: dict[str, Any] = {"do_sample": rng.random() < 0.7}
    for name, some in CASES.items():
        if rng.random() < share:
            chosen |= {key: value for key, value in rng.choice(some).items() if key != "do_sample"}
            if name == "allowed_token_ids":
                chosen.pop("allowed_token_trie", None)
    if "remove_invalid_values" in chosen:
        # It makes equals of all removed tokens, of which transformers' unstable sorts keep any.
        chosen = {name: value for name, value in chosen.items() if name not in SORTING}
    return chosen


def expected(one: Sequence, logits_V: Tensor) -> Tensor:
    """Return the row after transformers' processor."""
    given_1V = logits_V[None]
    if one.draw.log_softmax:
        given_1V = given_1V.log_softmax(-1)
    processors = REFERENCE.of(one.params, one.token_ids[: one.num_prompt_tokens])
    for end in range(one.num_prompt_tokens, len(one.token_ids)):
        # SynthID's state follows the calls.
        for processor in processors:
            if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
                processor(torch.tensor([one.token_ids[:end]]), given_1V)
    return processors(torch.tensor([one.token_ids]), given_1V.clone())[0]


def assert_same_rows(batch: list[Sequence], logits_NV: Tensor, scores_NV: Tensor) -> None:
    for one, logits_V, scores_V in zip(batch, logits_NV, scores_NV, strict=True):
        is_synthid = isinstance(one.params.watermark, SynthIdOptions)
        if scores_V.isfinite().any():
            expected_V = expected(one, logits_V)
            if is_synthid:
                # There it brings removed tokens back with the lowest number. A layer that nearly all the probability
                # wins leaves the others a difference of nearly equal numbers: it is right as a probability.
                expected_V, scores_V = expected_V.softmax(-1), scores_V.softmax(-1)
            torch.testing.assert_close(scores_V, expected_V, atol=1e-5 if not is_synthid else 1e-6, rtol=1e-5)
        elif not is_synthid:
            # Options that leave nothing: some of transformers' classes refuse to go on. SynthID's brings all back.
            with contextlib.suppress(ValueError):
                assert not expected(one, logits_V).isfinite().any()


def walk(batch: list[Sequence], rng: random.Random, steps: int) -> None:
    """Several steps with one sampler, each compared with transformers and with a sampler that knows nothing."""
    lived = new_sampler()
    for _ in range(steps):
        logits_NV = logits(len(batch), rng.randrange(2**32))
        scores_NV = lived.processed_scores(logits_NV, batch)
        assert_same_rows(batch, logits_NV, scores_NV)
        fresh_NV = new_sampler().processed_scores(logits_NV, batch)
        torch.testing.assert_close(scores_NV, fresh_NV, atol=0, rtol=0, equal_nan=True)
        for one, scores_V in zip(batch, scores_NV, strict=True):
            likely = [token_id for token_id in range(3, 9) if scores_V[token_id] > -math.inf]
            one.append(rng.choice(likely) if likely else int(scores_V.argmax()))


@pytest.mark.parametrize("options", EACH)
def test_each_option_alone_equals_transformers_beside_rows_without_it(options: dict[str, Any]) -> None:
    rng = random.Random(repr(options))
    plain = {"do_sample": True, "temperature": 0.8}
    batch = [
        sequence(prompt(rng), params(**{"eos_token_ids": EOS, "max_new_tokens": 6} | chosen), seq_id=row)
        for row, chosen in enumerate([options, {}, options, plain, options])
    ]
    walk(batch, rng, 5)


@pytest.mark.parametrize("options", EACH)
def test_each_option_does_something(options: dict[str, Any]) -> None:
    """So that no case above is satisfied by doing nothing."""

    def is_changed(seed: int) -> bool:
        rng = random.Random(seed)
        output = [rng.randrange(3, 9)] * rng.randrange(4)
        one = sequence(prompt(rng), params(**{"eos_token_ids": EOS} | options), output=output)
        logits_NV = logits(1, seed)
        logits_NV[0, 77] = -math.inf
        return not torch.equal(new_sampler().processed_scores(logits_NV, [one]), logits_NV)

    assert any(is_changed(seed) for seed in range(300))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.25, 0.5]))
def test_any_mix_of_options_in_any_mix_of_rows_equals_transformers(seed: int, share: float) -> None:
    rng = random.Random(seed)
    batch = [
        sequence(
            prompt(rng),
            params(**{"eos_token_ids": rng.choice([EOS, (5,)]), "max_new_tokens": 5} | options_of(rng, share)),
            seq_id=row,
        )
        for row in range(4)
    ]
    walk(batch, rng, 4)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.3]))
def test_beams_are_processed_as_log_probabilities_and_keep_a_token_beside_the_ends(seed: int, share: float) -> None:
    rng = random.Random(seed)
    batch = []
    for row in range(3):
        chosen = options_of(rng, share)
        # A constraint counts all beams of a request together: below.
        chosen.pop("allowed_token_trie", None)
        chosen.pop("allowed_token_ids", None)
        eos = rng.choice([EOS, (5,), ()])
        fixed = {"eos_token_ids": eos, "max_new_tokens": 5, "mode": BeamOptions(3)}
        if not eos:
            for name in ("min_new_tokens", "exponential_decay_length_penalty"):
                chosen.pop(name, None)
        one = sequence(prompt(rng), params(**chosen | fixed), seq_id=row)
        one.draw = DrawSpec(DrawKind.CANDIDATES, num_candidates=6, log_softmax=True)
        batch.append(one)
    walk(batch, rng, 3)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.booleans())
def test_a_constraint_that_some_beams_can_meet_is_forced_on_none(seed: int, all_stuck: bool) -> None:
    rng = random.Random(seed)
    options = params(
        mode=BeamOptions(3), eos_token_ids=EOS, allowed_token_ids=frozenset({4, 5}), bad_words_ids=((7, 4), (7, 5))
    )
    start = prompt(rng)
    batch = [sequence(start, options, seq_id=row, output=[7 if all_stuck or row else 6]) for row in range(3)]
    for one in batch:
        one.draw = DrawSpec(DrawKind.CANDIDATES, num_candidates=2, log_softmax=True)
    logits_NV = logits(3, seed)
    processors = REFERENCE.of(options, start)
    ids_NT = torch.tensor([one.token_ids for one in batch])
    torch.testing.assert_close(
        new_sampler().processed_scores(logits_NV, batch), processors(ids_NT, logits_NV.log_softmax(-1))
    )


def test_invalid_values_are_removed_where_asked_and_only_there() -> None:
    logits_NV = logits(2, 1)
    logits_NV[:, [3, 4, 5]] = torch.tensor([math.nan, math.inf, -math.inf])
    batch = [
        sequence([1, 2], params(remove_invalid_values=True), seq_id=0),
        sequence([1, 2], params(), seq_id=1),
    ]
    scores_NV = new_sampler().processed_scores(logits_NV, batch)
    torch.testing.assert_close(scores_NV[0], expected(batch[0], logits_NV[0]))
    assert torch.equal(scores_NV[1].nan_to_num(), logits_NV[1].nan_to_num())
    assert new_sampler().sample(logits_NV[:1].clone(), batch[:1])[0].token_id == 4
    with pytest.raises(FloatingPointError):
        new_sampler().sample(logits_NV[1:].clone(), batch[1:])


def test_tokens_that_other_groups_took_lose_the_penalty_once_for_each() -> None:
    options = params(mode=BeamOptions(6, num_beam_groups=3, diversity_penalty=0.75))
    batch = [sequence([1, 2], options, seq_id=row) for row in range(3)]
    taken = [(), (5,), (5, 8, 5, 5)]
    for one, ids in zip(batch, taken, strict=True):
        one.draw = DrawSpec(DrawKind.CANDIDATES, num_candidates=4, log_softmax=True, taken_ids=ids)
    logits_NV = logits(3, 7)
    counts_NV = torch.stack([torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=VOCAB) for ids in taken])
    expected_NV = logits_NV.log_softmax(-1) - 0.75 * counts_NV
    torch.testing.assert_close(new_sampler().processed_scores(logits_NV, batch), expected_NV)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_with_any_options_a_row_draws_in_every_batch_what_it_draws_alone(seed: int) -> None:
    rng = random.Random(seed)
    batch = []
    for row in range(5):
        chosen = options_of(rng, 0.25) | {"eos_token_ids": EOS, "seed": rng.randrange(2**62), "max_new_tokens": 9}
        one = sequence(prompt(rng), params(top_logprobs=rng.choice([None, 2]), **chosen), seq_id=row)
        if rng.random() < 0.4:
            one.draw = DrawSpec(
                DrawKind.CANDIDATES, 5, log_softmax=rng.random() < 0.5, gumbel_slot=rng.choice([None, 1])
            )
        batch.append(one)
    logits_NV = logits(5, seed)
    alone = []
    for row, one in enumerate(batch):
        try:
            alone.append(new_sampler().sample(logits_NV[row : row + 1].clone(), [one])[0])
        except FloatingPointError:
            alone.append(None)
    rows = [row for row, token in enumerate(alone) if token is not None]
    if rows:
        together = new_sampler().sample(logits_NV[rows], [batch[row] for row in rows])
        assert together == [alone[row] for row in rows]
