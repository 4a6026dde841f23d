"""Compact weights: the bits of whole ones in every product and row, for any exponents, in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories.models.native import PRODUCT_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear.base import Linear
from penstock.generation.layers.linear.compact import CompactPacking
from penstock.generation.layers.linear.native import Format, NativeLinear, NativeLinearMethod

# Whole tiles of every instruction set, one more and one less; more rows than one task has.
ROWS = (1, 2, 3, 4, 5, 6, 11, 12, 13, 24, 25, 263, 264, 265, 300)
# Inputs of an odd granule, of fewer than a turn of the loop, and of sums in several parts.
INPUTS = (2, 6, 30, 64, 250, 576, 2062, 4160)
WHOLE, COMPACT = NativeLinearMethod(Format.BF16), NativeLinearMethod(Format.BF16, compact=True)


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def drawn(outputs: int, inputs: int, *, outside: float = 0.0, zeros: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Draw a normal matrix in bfloat16. A share of the numbers, `outside`, has any exponent, and one is 0."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16() * 0.02
    drawn = torch.rand(weight.shape, generator=generator)
    any_bits = torch.randint(-(2**15), 2**15, weight.shape, generator=generator).to(torch.int16)
    any_number = any_bits.view(torch.bfloat16)
    any_number = torch.where(any_number.isfinite(), any_number, 1.0).clamp(-1e30, 1e30)
    weight = torch.where(drawn < outside, any_number, weight)
    return torch.where(drawn > 1 - zeros, 0.0, weight)


def stored(linear: Linear) -> torch.Tensor:
    assert isinstance(linear, NativeLinear)
    return linear.packed.weight


def is_compact(weight: torch.Tensor) -> bool:
    return stored(COMPACT.linear(weight, None)).numel() < stored(WHOLE.linear(weight, None)).numel()


def assert_same(weight: torch.Tensor, rows: tuple[int, ...] = ROWS) -> None:
    x = torch.randn(max(rows), weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    pairs = [[method.linear(weight, None), method.gated(weight, None, LayerKernels())] for method in (WHOLE, COMPACT)]
    for whole, compact in zip(*pairs, strict=True):
        for count in rows:
            assert torch.equal(compact(x[:count]), whole(x[:count])), count
            assert torch.equal(compact.as_float(x[:count]), whole.as_float(x[:count])), count


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outside", [0.0, 1e-4, 1e-3])
def test_products_have_the_bits_of_whole_weights(inputs: int, outside: float) -> None:
    weight = drawn(70, inputs, outside=outside, zeros=0.05)
    # Fewer inputs have no turn of the loop and stay whole.
    assert is_compact(weight) == (inputs >= 30)
    assert_same(weight)


@pytest.mark.parametrize("inputs", [250, 2050, 2062, 4160])
def test_exceptions_at_the_ends_of_parts_and_panels_are_kept(inputs: int) -> None:
    weight = drawn(160, inputs)
    granules = (inputs + 1) // 2
    for granule in (0, 1, 511, 512, 513, 514, 515, 516, 1023, 1024, granules - 2, granules - 1):
        if granule < granules:
            weight[granule % 160, 2 * granule : 2 * granule + 2] = 1e30
    assert is_compact(weight)
    assert_same(weight, (1, 2, 5, 12, 13, 25, 40))


def test_a_panel_of_nothing_but_exceptions_beside_others() -> None:
    weight = drawn(640, 2050)
    bits = torch.randint(-(2**15), 2**15, (32, 2050), generator=torch.Generator().manual_seed(3)).to(torch.int16)
    weight[64:96] = bits.view(torch.bfloat16)
    assert is_compact(weight)
    x = torch.randn(40, 2050, generator=torch.Generator().manual_seed(1)).bfloat16()
    compact, whole = COMPACT.linear(weight, None), WHOLE.linear(weight, None)
    for count in (1, 5, 12, 13, 40):
        # Bits of a number that is none may differ in its payload.
        found, expected = compact.as_float(x[:count]), whole.as_float(x[:count])
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert whole.as_float(x).isnan().any()


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 130).map(lambda half: 2 * half),
    inputs=st.integers(1, 700),
    outside=st.sampled_from([0.0, 1e-4, 1e-3]),
    zeros=st.sampled_from([0.0, 0.1, 0.9]),
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
def test_any_shape_has_the_bits_of_whole_weights(
    outputs: int, inputs: int, outside: float, zeros: float, rows: int, seed: int
) -> None:
    assert_same(drawn(outputs, inputs, outside=outside, zeros=zeros, seed=seed), (rows,))


@pytest.mark.parametrize("inputs", [1, 5, 64, 577])
@pytest.mark.parametrize("outside", [0.0, 1e-3])
def test_rows_are_those_of_the_weight(inputs: int, outside: float) -> None:
    weight = drawn(300, inputs, outside=outside, zeros=0.01)
    rows = COMPACT.head(weight).rows()
    assert rows is not None
    ids = torch.randint(0, 300, (40,))
    assert torch.equal(rows(ids).view(torch.int16), weight[ids].view(torch.int16))
    with pytest.raises(IndexError):
        rows(torch.tensor([300]))


def test_a_normal_weight_takes_little_more_than_twelve_bits() -> None:
    weight = drawn(512, 2048)
    found = stored(COMPACT.linear(weight, None)).numel() / weight.numel() * 8
    assert 12 <= found < 12.2


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_scale_is_as_small(scale: float) -> None:
    weight = (drawn(64, 2048).float() * scale).bfloat16()
    assert_same(weight, (1, 13))
    assert stored(COMPACT.linear(weight, None)).numel() < 0.8 * 2 * weight.numel()


def test_numbers_that_are_none_stay_what_they_are() -> None:
    weight = drawn(64, 640)
    weight[3, 7], weight[40, 600], weight[41, 601] = torch.nan, torch.inf, -torch.inf
    rows = COMPACT.head(weight).rows()
    assert rows is not None
    assert torch.equal(rows(torch.arange(64)).view(torch.int16), weight.view(torch.int16))


def test_exponents_of_every_size_leave_it_whole() -> None:
    weight = drawn(64, 640, outside=0.5)
    assert torch.equal(stored(COMPACT.linear(weight, None)), stored(WHOLE.linear(weight, None)))


def test_zeros_alone_are_compact() -> None:
    assert_same(torch.zeros(64, 640, dtype=torch.bfloat16), (1, 13))


@pytest.mark.parametrize("format", [Format.F32, Format.INT8, Format.INT4])
def test_other_formats_are_as_without(format: Format) -> None:
    weight = drawn(64, 640).float()
    compact = NativeLinearMethod(format, compact=True).linear(weight, None)
    assert torch.equal(stored(compact), stored(NativeLinearMethod(format).linear(weight, None)))


def test_a_wrong_table_is_refused() -> None:
    weight, x = drawn(64, 640), torch.randn(1, 640).bfloat16()
    linear = COMPACT.linear(weight, None)
    line = 64 + 160 * 192
    # Exceptions of the first panel and of the last: where they begin, and how many there are.
    for place in (40, line + 32, line + 40):
        kept = stored(linear)[place].clone()
        stored(linear)[place] += 1
        with pytest.raises(RuntimeError, match="weight"):
            linear(x)
        stored(linear)[place] = kept
    assert torch.equal(linear(x), WHOLE.linear(weight, None)(x))


def test_a_packing_keeps_one_room() -> None:
    packing = CompactPacking()
    first = packing.room(1000)
    assert packing.room(500).data_ptr() == first.data_ptr()
    assert packing.room(2000).numel() == 2000
