"""Packed linear layers compute what F.linear computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.host.cpu_features import packing_obstacle
from penstock.generation.layers.linear import dense
from penstock.generation.layers.linear.dense import PackedLinear, PlainLinear, cpu_linear_method

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PACKABLE = [dtype for dtype in TOLERANCE if packing_obstacle(dtype) is None]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from(PACKABLE),
)
def test_packed_equals_plain(rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(outputs, inputs).to(dtype) / inputs**0.5
    offset = torch.randn(outputs).to(dtype) if bias else None
    x = torch.randn(rows, inputs).to(dtype)
    found = PackedLinear(weight, offset)(x)
    assert found.dtype is dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, offset), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_packing_keeps_no_reference_to_the_weight() -> None:
    weight = torch.randn(8, 8)
    linear = PackedLinear(weight, None)
    before = linear(torch.ones(1, 8))
    weight.zero_()
    assert torch.equal(linear(torch.ones(1, 8)), before)


def test_what_can_be_packed_is_packed_and_the_rest_computed_all_the_same() -> None:
    assert torch.float32 in PACKABLE
    for dtype in TOLERANCE:
        method = cpu_linear_method(dtype)
        assert method.name == ("packed" if dtype in PACKABLE else "plain")
        weight, x = torch.randn(40, 24).to(dtype), torch.randn(5, 24).to(dtype)
        found = method.linear(weight.clone(), None)(x)
        assert found.dtype is dtype
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(found.double(), exact, atol=10 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_what_cannot_be_packed_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "packing_obstacle", lambda dtype: "no such instruction")
    assert cpu_linear_method(torch.float16).name == "plain"


def test_an_unpackable_dtype_is_found_out_by_trying() -> None:
    assert packing_obstacle(torch.float64) is not None
    assert packing_obstacle(torch.float32) is None


def test_both_count_their_bytes() -> None:
    weight, bias = torch.zeros(6, 4), torch.zeros(6)
    assert PackedLinear(weight, bias).num_bytes == PlainLinear(weight, bias).num_bytes == (24 + 6) * 4
