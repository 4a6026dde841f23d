"""The choice of experts by the kernels: torch's numbers, and a rule for equal scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.generation.core.model_config import Experts, Routing
from penstock.generation.layers.expert_choice import choice_of
from penstock.generation.layers.layer_kernels import NativeKernels
from torch import Tensor

NATIVE = NativeKernels(torch.float32)


@st.composite
def rules(draw: st.DrawFn) -> tuple[Experts, Tensor | None]:
    """Experts by any rule, and a bias if there is one."""
    groups, size = draw(st.sampled_from([1, 1, 2, 4, 8])), draw(st.integers(1, 9))
    of_row = draw(st.integers(1, groups))
    per_row = draw(st.integers(1, size * of_row))
    routing = Routing(
        is_sigmoid=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        num_groups=groups,
        groups_of_row=of_row,
        ranked_by=draw(st.integers(1, min(2, size))),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    experts = Experts(groups * size, per_row, 8, sums_to_one=draw(st.booleans()), layers=(True,), routing=routing)
    seed = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return experts, torch.rand(experts.count, generator=seed) if routing.has_bias else None


@given(rules(), st.sampled_from([1, 2, 33, 70]), st.integers(0, 10**6))
def test_they_choose_as_torch_does(rule: tuple[Experts, Tensor | None], rows: int, seed: int) -> None:
    experts, bias = rule
    scores = 3 * torch.randn(rows, experts.count, generator=torch.Generator().manual_seed(seed))
    chosen, shares = choice_of(experts, bias, NATIVE)(scores)
    wanted, wanted_shares = choice_of(experts, bias)(scores)
    # torch's exponential has other last bits, so a row with two scores as near as that may have the other.
    same = (chosen == wanted).all(-1)
    assert len(same) - int(same.sum()) <= rows // 50
    torch.testing.assert_close(shares[same], wanted_shares[same], rtol=3e-6, atol=1e-9)
    for row in range(0, rows, 32):
        alone, own = choice_of(experts, bias, NATIVE)(scores[row : row + 1])
        assert torch.equal(alone[0], chosen[row])
        assert torch.equal(own[0], shares[row])


@pytest.mark.parametrize("groups", [1, 3])
def test_of_equal_scores_the_first_expert_is_chosen(groups: int) -> None:
    routing = Routing(num_groups=groups, groups_of_row=1)
    experts = Experts(12, 3, 8, sums_to_one=True, layers=(True,), routing=routing)
    chosen, shares = choice_of(experts, None, NATIVE)(torch.ones(5, 12))
    assert chosen.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(shares, torch.full((5, 3), 1 / 3))


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_scores_that_are_no_numbers_choose_some_experts(worst: float, *, is_sigmoid: bool) -> None:
    """The answer is lost, and nothing else: its ids are experts, each once."""
    routing = Routing(is_sigmoid=is_sigmoid, num_groups=2, groups_of_row=1, ranked_by=2)
    experts = Experts(8, 3, 8, sums_to_one=True, layers=(True,), routing=routing)
    for count in (1, 8):
        scores = torch.randn(2, 8)
        scores[0, :count] = worst
        chosen, _ = choice_of(experts, None, NATIVE)(scores)
        for row in chosen.tolist():
            assert row == sorted(set(row))
            assert len(row) == 3
            assert 0 <= row[0] <= row[-1] < 8


def test_no_rows_have_no_experts() -> None:
    experts = Experts(4, 2, 8, sums_to_one=True, layers=(True,))
    chosen, shares = choice_of(experts, None, NATIVE)(torch.empty(0, 4))
    assert chosen.shape == shares.shape == (0, 2)
