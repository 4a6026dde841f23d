"""Differences of two readings: zero of equal ones, and a divergence that is torch's own where nothing is left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from penstock.evaluation.difference import Difference, divergence
from penstock.evaluation.reading import Reading

ROWS, VOCABULARY = 300, 40
IDS = torch.randint(VOCABULARY, (ROWS + 1,), generator=torch.Generator().manual_seed(7)).tolist()


def logits(seed: int, noise: float = 0.0) -> torch.Tensor:
    base = torch.randn(ROWS + 1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    return base + noise * torch.randn(ROWS + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def reading(scores: torch.Tensor, most: int = VOCABULARY) -> Reading:
    return Reading.of_logits([scores], IDS, most)


def test_a_reading_beside_itself_has_no_difference() -> None:
    for most in (1, 5, VOCABULARY):
        one = reading(logits(0), most)
        assert Difference.between(one, one) == Difference(0.0, 0.0, 1.0, 0.0, 1.0)


def test_the_divergence_of_a_whole_vocabulary_is_exact() -> None:
    exact, found = logits(0), logits(2, 0.3)
    expected = F.kl_div(found[:-1].log_softmax(-1), exact[:-1].log_softmax(-1), log_target=True, reduction="none")
    assert torch.allclose(divergence(reading(found), reading(exact)).float(), expected.sum(-1), atol=1e-5)


def test_the_divergence_of_the_likeliest_is_a_bound_from_below() -> None:
    exact, found = logits(0), logits(2, 0.3)
    whole = divergence(reading(found), reading(exact))
    sizes = (1, 4, 16, 32)
    parts = [divergence(reading(found, most), reading(exact, most)) for most in sizes]
    for part in parts:
        assert (part <= whole + 1e-6).all()
    assert [float(part.mean()) for part in parts] == sorted(float(part.mean()) for part in parts)
    assert float(parts[-1].mean()) > 0.95 * float(whole.mean())


def test_figures_are_of_the_tokens_of_the_text() -> None:
    exact, found = reading(logits(0)), reading(logits(2, 0.3))
    apart = (found.log_probability - exact.log_probability).double()
    difference = Difference.between(found, exact)
    assert difference.mean == pytest.approx(float(apart.abs().mean()))
    assert difference.p99 > difference.mean
    assert difference.perplexity_ratio == pytest.approx(found.perplexity / exact.perplexity)
    same = (logits(0)[:-1].argmax(-1) == logits(2, 0.3)[:-1].argmax(-1)).double().mean()
    assert difference.agreement == pytest.approx(float(same))
