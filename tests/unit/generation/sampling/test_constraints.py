"""Tokens that may be drawn where options conflict, run out, or name ids that the model does not have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import new_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.decoding_mode import SynthIdOptions, WatermarkOptions
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.engine.decoding.beam_options import BeamOptions
from torch import Tensor

CPU = torch.device("cpu")
VOCAB = 50
EOS = (2, 9)
PATHS = ((4, 5), (4, 5, 6), (7,))
torch.set_num_threads(1)


def logits(seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(output: list[int], **options: Any) -> set[int]:
    """Ids with a finite score after this output."""
    one = sequence([1, 3], params(**{"eos_token_ids": EOS} | options), output=output)
    return set(new_sampler().processed_scores(logits(), [one])[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], {4, 7}),
        ([4], {5}),
        # A path ends here, another goes on.
        ([4, 5], {6, *EOS}),
        ([4, 5, 6], set(EOS)),
        ([7], set(EOS)),
        ([7, 2], set(EOS)),
        # It was resumed with something else.
        ([8], set(EOS)),
    ],
)
def test_an_output_is_a_path_of_the_trie_and_then_the_end(output: list[int], expected: set[int]) -> None:
    assert allowed(output, allowed_token_trie=PATHS) == expected


def test_a_constraint_wins_over_what_stands_before_it_and_not_over_what_stands_behind() -> None:
    assert allowed([4, 5, 6], allowed_token_trie=PATHS, min_new_tokens=9) == set(EOS)
    assert allowed([], allowed_token_ids=frozenset({5, 6}), bad_words_ids=((5,), (6,))) == {5, 6}
    assert allowed([], allowed_token_ids=frozenset({5, 6}), suppress_tokens=(5,)) == {6}
    assert allowed([], allowed_token_ids=frozenset({5, 6}), suppress_tokens=(5, 6)) == set()


def test_the_prompt_is_no_part_of_the_path() -> None:
    one = sequence([4, 5], params(allowed_token_trie=PATHS, eos_token_ids=EOS))
    sampler = new_sampler()
    tokens = []
    for seed in range(4):
        tokens.append(sampler.sample(logits(seed), [one])[0].token_id)
        one.append(tokens[-1])
    assert tuple(tokens[: len(tokens) - next(i for i, t in enumerate(reversed(tokens)) if t not in EOS)]) in PATHS


BEYOND: list[dict[str, Any]] = [
    {"suppress_tokens": (VOCAB, VOCAB + 7)},
    {"begin_suppress_tokens": (VOCAB,)},
    {"eos_token_ids": (VOCAB + 1,), "exponential_decay_length_penalty": (0, 2.0)},
    {"bad_words_ids": ((3, VOCAB + 3), (3,))},
    {"sequence_bias": {(VOCAB + 3,): 9.0, (3, VOCAB + 4): 9.0}},
    {"no_repeat_ngram_size": 1},
]


@pytest.mark.parametrize("options", BEYOND, ids=str)
def test_ids_beyond_the_output_layer_are_passed_over(options: dict[str, Any]) -> None:
    """A checkpoint's tokenizer may know more ids than its output layer, and a prompt may hold them."""
    prompt = [1, VOCAB + 5, 3] if "ngram" in str(options) else [1, 3]
    batch = [sequence(prompt, params(**options), seq_id=0), sequence([1], params(), seq_id=1)]
    given_NV = logits(rows=2)
    assert torch.equal(new_sampler().processed_scores(given_NV, batch)[1], given_NV[1])


def test_a_forced_token_that_the_model_does_not_have_leaves_nothing() -> None:
    batch = [
        sequence([1], params(forced_bos_token_id=VOCAB + 1), seq_id=0),
        sequence([1], params(forced_eos_token_ids=(VOCAB,), max_new_tokens=1), seq_id=1),
    ]
    assert not new_sampler().processed_scores(logits(rows=2), batch).isfinite().any()


EXTREMES: list[dict[str, Any]] = [
    {"sequence_bias": {(5,): 3.4e38, (3, 5): 3.4e38, (6,): -3.4e38}},
    {"sequence_bias": {(5,): 3.4e38}, "repetition_penalty": 1e-30, "temperature": 1e-30},
    {"encoder_repetition_penalty": 1e-38},
    {"encoder_repetition_penalty": 3.4e38, "repetition_penalty": 3.4e38},
    {"eos_token_ids": EOS, "exponential_decay_length_penalty": (0, 3.4e38)},
    {"eos_token_ids": EOS, "exponential_decay_length_penalty": (0, 1e-38)},
    {"watermark": WatermarkOptions(bias=3.4e38)},
    {"watermark": WatermarkOptions(bias=-3.4e38, hashing_key=2**63 - 1, seeding_scheme="selfhash", context_width=2)},
    {"watermark": SynthIdOptions(3, (2**63 - 1, -(2**63), 0))},
    {"typical_p": 1e-38},
    {"epsilon_cutoff": 0.999999, "eta_cutoff": 0.999999},
    {"top_h": 1e-38},
    {"top_n_sigma": 1e-38},
]


@pytest.mark.parametrize("options", EXTREMES, ids=str)
def test_the_most_extreme_options_leave_a_token_and_touch_nobody_else(options: dict[str, Any]) -> None:
    batch = [
        sequence([5, 6, 3], params(do_sample=True, **options), seq_id=0, output=[5, 8]),
        sequence([1], params(), seq_id=1),
    ]
    given_NV = logits(rows=2)
    tokens = new_sampler().sample(given_NV.clone(), batch)
    assert 0 <= tokens[0].token_id < VOCAB
    assert tokens[1].token_id == int(given_NV[1].argmax())


def test_what_was_removed_stays_removed() -> None:
    """A penalty or a bias does not revive a token that an earlier step, or the model, took away."""
    given_NV = logits()
    given_NV[0, 5] = -math.inf
    options = params(
        repetition_penalty=0.5,
        encoder_repetition_penalty=2.0,
        bad_words_ids=((6,),),
        logit_bias={5: 50.0, 6: 50.0, 2: 50.0},
        min_new_tokens=9,
        eos_token_ids=(2,),
        exponential_decay_length_penalty=(0, 9.0),
        watermark=WatermarkOptions(0.9, 90.0),
    )
    one = sequence([5, 6, 2], options, output=[6, 5])
    scores_V = new_sampler().processed_scores(given_NV, [one])[0]
    assert scores_V[[5, 6, 2]].tolist() == [-math.inf] * 3


def test_processed_scores_leave_no_trace() -> None:
    """They may be asked for beside any step, of any of its rows."""
    options = params(do_sample=True, repetition_penalty=1.3, no_repeat_ngram_size=2, top_p=0.9, seed=4)
    watched = [sequence([1, 3], options, seq_id=seq_id) for seq_id in range(3)]
    plain = [sequence([1, 3], options, seq_id=seq_id) for seq_id in range(3)]
    asked, unasked = new_sampler(), new_sampler()
    for step in range(8):
        given_NV = logits(step, rows=3)
        asked.processed_scores(given_NV[1:2], watched[1:2])
        drawn = asked.sample(given_NV.clone(), watched)
        assert drawn == unasked.sample(given_NV.clone(), plain)
        for batch in (watched, plain):
            for one, token in zip(batch, drawn, strict=True):
                one.append(token.token_id)


def test_a_request_of_beams_and_one_of_tokens_share_a_step() -> None:
    beams = [sequence([1, 3], params(mode=BeamOptions(2)), seq_id=seq_id) for seq_id in range(2)]
    for one in beams:
        one.draw = DrawSpec(DrawKind.CANDIDATES, 4, log_softmax=True)
    alone = sequence([1, 3], params(), seq_id=2)
    given_NV = logits(rows=3)
    tokens = new_sampler().sample(given_NV.clone(), [beams[0], alone, beams[1]])
    assert [token.candidates is None for token in tokens] == [False, True, False]
    assert tokens[1].token_id == int(given_NV[1].argmax())
    # The same sequences draw a token when their strategy wants one.
    beams[0].draw = DrawSpec()
    assert new_sampler().sample(given_NV[:1].clone(), beams[:1])[0].token_id == int(given_NV[0].argmax())


@settings(max_examples=30, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(4, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8),
    output=st.lists(st.integers(4, 6), max_size=5),
)
def test_what_a_trie_allows_is_what_some_path_goes_on_with(paths: list[tuple[int, ...]], output: list[int]) -> None:
    begun = [path for path in paths if path[: len(output)] == tuple(output)]
    following = {path[len(output)] for path in begun if len(path) > len(output)}
    ends = set(EOS) if not following or any(len(path) == len(output) for path in begun) else set()
    assert allowed(output, allowed_token_trie=tuple(paths)) == following | ends
