"""Draws against exact probabilities by chi-square at fixed seeds: sampling, and Gumbel top-k without replacement."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from factories.engine.chi_square import assert_chi_square
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import new_sampler
from penstock.generation.core.decoding_mode import SynthIdOptions, WatermarkOptions
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.beam_options import BeamOptions
from torch import Tensor

CPU = torch.device("cpu")
DRAWS = 4000
AT_A_TIME = 2000
torch.set_num_threads(1)


def logits(vocab: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5},
    {"top_k": 30},
    {"top_p": 0.85},
    {"typical_p": 0.7},
    {"top_h": 0.8},
    {"epsilon_cutoff": 0.004},
    {"eta_cutoff": 0.01},
    {"top_n_sigma": 1.5},
    {"watermark": WatermarkOptions()},
    {"watermark": SynthIdOptions(3, (4, 5, 6))},
    {"watermark": SynthIdOptions(3, (4, 5, 6)), "top_k": 20},
    {"watermark": WatermarkOptions(seeding_scheme="selfhash"), "top_k": 50},
    {"renormalize_logits": True, "min_p": 0.02},
    {"repetition_penalty": 1.4, "bad_words_ids": ((5, 3), (9,)), "sequence_bias": {(4, 5, 7): 2.0}, "top_p": 0.95},
    {"allowed_token_ids": frozenset(range(20)), "temperature": 0.6},
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_drawn_with_the_processed_probabilities(options: dict[str, Any]) -> None:
    given_V = logits(300, 11)
    one = sequence([4, 5], params(do_sample=True, **options))
    probs_V = new_sampler().processed_scores(given_V[None], [one])[0].double().softmax(-1)
    observed_V = torch.zeros(300, dtype=torch.float64)
    for first in range(0, DRAWS, AT_A_TIME):
        batch = [
            sequence([4, 5], params(do_sample=True, seed=derive_seed(21, first + place), **options), seq_id=place)
            for place in range(AT_A_TIME)
        ]
        tokens = new_sampler().sample(given_V.repeat(AT_A_TIME, 1), batch)
        observed_V += torch.bincount(torch.tensor([token.token_id for token in tokens]), minlength=300)
    assert observed_V[probs_V == 0].sum() == 0
    assert_chi_square(observed_V, probs_V * DRAWS)


@pytest.mark.parametrize(
    ("chance", "threshold", "options"),
    [(0.5, 0.05, {}), (0.3, 0.02, {"temperature": 0.7, "top_k": 40}), (1.0, 0.03, {"min_p": 0.05, "top_p": 0.9})],
    ids=str,
)
def test_xtc_draws_from_the_mixture_of_both_distributions(
    chance: float, threshold: float, options: dict[str, Any]
) -> None:
    """Of many seeds: with the chance from what XTC leaves, else from what the others leave. A chance that shared the
    token's uniform would skew it."""
    given_V = logits(300, 12, 1.6)
    plain = sequence([4, 5], params(do_sample=True, **options))
    whole_V = new_sampler().processed_scores(given_V[None], [plain])[0].double().softmax(-1)
    choices = (whole_V >= threshold).nonzero()[:, 0]
    assert len(choices) > 1
    left_V = whole_V.clone()
    left_V[choices] = 0
    left_V[choices[whole_V[choices].argmin()]] = whole_V[choices].min()
    expected_V = chance * left_V / left_V.sum() + (1 - chance) * whole_V
    observed_V = torch.zeros(300, dtype=torch.float64)
    with_xtc = {**options, "xtc_probability": chance, "xtc_threshold": threshold}
    for first in range(0, DRAWS, AT_A_TIME):
        batch = [
            sequence([4, 5], params(do_sample=True, seed=derive_seed(23, first + place), **with_xtc), seq_id=place)
            for place in range(AT_A_TIME)
        ]
        tokens = new_sampler().sample(given_V.repeat(AT_A_TIME, 1), batch)
        observed_V += torch.bincount(torch.tensor([token.token_id for token in tokens]), minlength=300)
    assert observed_V[expected_V == 0].sum() == 0
    assert_chi_square(observed_V, expected_V * DRAWS)


def beam(seed: int, slot: int, seq_id: int, count: int, **options: Any) -> Sequence:
    one = sequence([4, 5], params(do_sample=True, mode=BeamOptions(2), seed=seed, **options), seq_id=seq_id)
    one.draw = DrawSpec(DrawKind.CANDIDATES, count, log_softmax=True, gumbel_slot=slot)
    return one


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 4}], ids=str)
def test_the_best_keys_of_two_beams_are_draws_without_replacement(options: dict[str, Any]) -> None:
    """The keys draw like transformers' beam sampling: multinomial over the flattened scores of the beams, here three of
    2 x 6."""
    vocab, offsets = 6, torch.tensor([-0.4, -1.1])
    given_2V = torch.stack([logits(vocab, 1, 1.0), logits(vocab, 2, 1.0)])
    pair = [beam(0, slot, slot, vocab, **options) for slot in range(2)]
    flat = (new_sampler().processed_scores(given_2V, pair) + offsets[:, None]).flatten().double().softmax(-1).tolist()
    counts: dict[tuple[int, ...], int] = {}
    for first in range(0, DRAWS, AT_A_TIME):
        batch = [
            beam(derive_seed(5, first + place), slot, 2 * place + slot, vocab, **options)
            for place in range(AT_A_TIME)
            for slot in range(2)
        ]
        found = [token.candidates for token in new_sampler().sample(given_2V.repeat(AT_A_TIME, 1), batch)]
        for place in range(0, len(found), 2):
            keys = []
            for slot, one in enumerate(found[place : place + 2]):
                assert one is not None
                keys += [
                    (key + float(offsets[slot]), slot * vocab + token_id)
                    for key, token_id in zip(one.keys, one.token_ids, strict=True)
                ]
            drawn = tuple(token_id for _, token_id in sorted(keys, reverse=True)[:3])
            counts[drawn] = counts.get(drawn, 0) + 1
    orders = list(itertools.permutations([place for place, prob in enumerate(flat) if prob > 0], 3))
    expected = [flat[a] * flat[b] / (1 - flat[a]) * flat[c] / (1 - flat[a] - flat[b]) for a, b, c in orders]
    assert sum(expected) == pytest.approx(1.0)
    assert counts.keys() <= set(orders)
    observed = torch.tensor([counts.get(order, 0) for order in orders], dtype=torch.float64)
    assert_chi_square(observed, torch.tensor(expected, dtype=torch.float64) * DRAWS)


def test_slots_and_positions_draw_independently() -> None:
    """The pair of first tokens of two slots has the product of their probabilities."""
    vocab, given_V = 5, logits(5, 3, 1.0)
    probs_V = given_V.double().softmax(-1)
    observed = torch.zeros(vocab, vocab, dtype=torch.float64)
    for first in range(0, DRAWS, AT_A_TIME):
        batch = [
            beam(derive_seed(9, first + place), slot, 2 * place + slot, 1)
            for place in range(AT_A_TIME)
            for slot in range(2)
        ]
        tokens = new_sampler().sample(given_V.repeat(2 * AT_A_TIME, 1), batch)
        best = [token.candidates.token_ids[0] for token in tokens if token.candidates is not None]
        for left, right in zip(best[::2], best[1::2], strict=True):
            observed[left, right] += 1
    assert_chi_square(observed.flatten(), (probs_V[:, None] * probs_V).flatten() * DRAWS)
