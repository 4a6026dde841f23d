"""Linear layers on the C++ kernels: the reference within the format's rounding, and whatever the batch is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from factories.models.native import PRODUCT_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear.base import Linear, NotFinite, WholeRows
from penstock.generation.layers.linear.int4_search import search_rows
from penstock.generation.layers.linear.int8 import int8_numbers, quantize_rows
from penstock.generation.layers.linear.int8_groups import GROUP, turned_groups
from penstock.generation.layers.linear.native import Format, NativeLinear, NativeLinearMethod
from penstock.generation.rounding.rotation import halved, rotated, rotation_block

# Formats that a weight is rounded to; those of blocks come from a file (test_native_gguf.py).
ROUNDED = [format for format in Format if format is not Format.GGUF]
# Largest difference relative to the largest value: of the dtype's rounding, or of sums in another order.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


@st.composite
def layers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Weight, bias and input, in float32. With AVX2 some have panels enough for the way of several rows."""
    rows, outputs = draw(st.integers(1, 40)), draw(st.integers(1, 130)) * 2
    # Of the multiples of 16 blocks are turned, each of 64, 32 or 16.
    inputs = draw(st.one_of(st.integers(1, 200), st.integers(1, 12).map(lambda blocks: blocks * 16)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(outputs, inputs, generator=generator)
    # Some channels far larger than the others, as in real models.
    weight[:, :: draw(st.integers(1, 50))] *= 4
    x = torch.randn(rows, inputs, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 50.0]))
    bias = torch.randn(outputs, generator=generator) if draw(st.booleans()) else None
    return weight, bias, x


def quantised(weight_OI: torch.Tensor, x_TI: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as the format quantises them, in float64: products of these are exact."""
    if format is Format.INT8:
        pairs = (quantize_rows(weight_OI), quantize_rows(x_TI))
        return tuple((values * scale).double() for values, scale in pairs)  # type: ignore[return-value]
    if format is Format.TURNED_GROUPS and weight_OI.shape[1] % GROUP == 0:
        block = rotation_block(weight_OI.shape[1])
        lines = turned_groups(weight_OI).view(-1, 2 + GROUP)
        scale = lines[:, :2].contiguous().view(torch.float16).double()
        turned = rotated(x_TI, block) * (halved(block) / block)
        numbers, scales = quantize_rows(turned.view(-1, GROUP))
        weight = lines[:, 2:].contiguous().view(torch.int8).double() * scale
        return weight.view(weight_OI.shape), (numbers * scales).view(x_TI.shape).double()
    if format in (Format.ROTATED_INT8, Format.TURNED_GROUPS):
        block = rotation_block(weight_OI.shape[1])
        (values, scale), (numbers, scales) = (quantize_rows(rotated(one, block)) for one in (weight_OI, x_TI))
        return (values * (scale / block)).double(), (numbers * scales).double()
    if format is Format.INT4:
        weight, inputs = meaning(NativeLinearMethod(format).linear(weight_OI, None)), weight_OI.shape[1]
        padded = F.pad(x_TI.float(), (0, -inputs % 32)).unflatten(1, (-1, 32))  # type: ignore[no-untyped-call]
        numbers, scales = quantize_rows(padded.flatten(0, 1))
        return weight, (numbers * scales).view(x_TI.shape[0], -1)[:, :inputs].double()
    return weight_OI.double(), x_TI.double()


def meaning(linear: Linear) -> torch.Tensor:
    """Return the weight that an int4 layer which was not gated keeps, in float64."""
    assert isinstance(linear, NativeLinear)
    packed = linear.packed
    outputs, inputs = packed.shape
    # (panels, granules, 32, 4 bytes): the low halves of a granule's bytes are its first four inputs.
    granules = packed.weight.view(-(-outputs // 32), -1, 32, 4)
    values = torch.stack((granules & 15, granules >> 4), dim=3).permute(0, 2, 1, 3, 4).flatten(2).flatten(0, 1)
    lines = packed.scale.view(granules.shape[0], -1, 2, 32)
    units = lines[:, :1].contiguous().view(torch.bfloat16).double().flatten(1)
    scale = lines[:, 1:, 0].double() * units.unsqueeze(1)
    scale, zero = (one.permute(0, 2, 1).flatten(0, 1) for one in (scale, lines[:, 1:, 1].double()))
    weight = (values.double().unflatten(1, (-1, 32)) - zero.unsqueeze(2) / 16) * scale.unsqueeze(2)
    return weight.flatten(1)[:outputs, :inputs]


def weighted_error(found: torch.Tensor, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Return each row's squared error, by the importance of its inputs."""
    error = (found.double() - weight.double()) ** 2
    return (error if importance is None else error * importance).sum(1)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1e-30)


@pytest.mark.parametrize("format", ROUNDED)
@settings(max_examples=12, deadline=None)
@given(layer=layers(), as_bf16=st.booleans())
def test_linear_is_the_product_of_what_the_format_keeps(
    format: Format, layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], as_bf16: bool
) -> None:
    dtype = torch.bfloat16 if format is Format.BF16 or (as_bf16 and format is not Format.F32) else torch.float32
    weight, bias, x = (None if tensor is None else tensor.to(dtype) for tensor in layer)
    assert weight is not None
    assert x is not None
    linear = NativeLinearMethod(format).linear(weight, bias)
    kept, inputs = quantised(weight, x, format)
    expected = inputs @ kept.T
    if bias is not None:
        expected += bias.double()
    found = linear(x)
    assert found.dtype is dtype
    assert_near(found, expected, TOLERANCE[dtype])
    exact = linear.as_float(x)
    assert exact.dtype is torch.float32
    assert_near(exact, expected, 1e-4)
    for row in {0, x.shape[0] // 2, x.shape[0] - 1}:
        assert torch.equal(linear(x[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("format", ROUNDED)
@settings(max_examples=12, deadline=None)
@given(layer=layers())
def test_gated_is_silu_of_one_half_times_the_other(
    format: Format, layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
) -> None:
    dtype = torch.bfloat16 if format is Format.BF16 else torch.float32
    weight, bias, x = (None if tensor is None else tensor.to(dtype) for tensor in layer)
    assert weight is not None
    assert x is not None
    method = NativeLinearMethod(format)
    found = method.gated(weight, bias, LayerKernels())(x)
    expected = LayerKernels().silu_mul(method.linear(weight, bias)(x))
    assert found.dtype is dtype
    assert_near(found, expected.double(), 2 * TOLERANCE[dtype])


@given(layer=layers(), bf16=st.booleans())
@settings(max_examples=20, deadline=None)
def test_rows_of_the_packed_weight_are_the_weight(
    layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], bf16: bool
) -> None:
    weight = layer[0].bfloat16() if bf16 else layer[0]
    rows = NativeLinearMethod(Format.BF16 if bf16 else Format.F32).head(weight).rows()
    assert rows is not None
    ids = torch.randint(0, weight.shape[0], (7,))
    assert torch.equal(rows(ids), weight[ids])
    with pytest.raises(IndexError):
        rows(torch.tensor([weight.shape[0]]))


@given(layer=layers())
@settings(max_examples=20, deadline=None)
def test_int8_is_the_product_of_what_is_turned_stage_by_stage(
    layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
) -> None:
    weight, bias, x = layer
    found = NativeLinearMethod(Format.ROTATED_INT8).linear(weight, bias)(x)
    values, scale, block = int8_numbers(weight)
    # Torch's own layer turns by one product: a number between two integers may be rounded to the other one.
    rounded, scale_T1 = quantize_rows(rotated(x.float(), block))
    wanted = rounded.double() @ values.double().t() * scale.double().flatten() * scale_T1.double()
    assert_near(found, wanted if bias is None else wanted + bias.double(), 1e-5)


@pytest.mark.parametrize("format", ROUNDED)
def test_a_nan_reaches_its_row_and_no_other(format: Format) -> None:
    dtype = torch.bfloat16 if format is Format.BF16 else torch.float32
    # Rows and panels enough for the way of several rows with AVX2.
    x = torch.randn(13, 64).to(dtype)
    x[1, 5] = float("nan")
    found = NativeLinearMethod(format).linear(torch.randn(208, 64).to(dtype), None)(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("format", ROUNDED)
def test_inputs_that_are_summed_in_several_parts(format: Format) -> None:
    """More granules than stay in the cache; and rows of several tiles, which take turns with each part."""
    several = {
        Format.F32: 2310,
        Format.BF16: 5002,
        Format.INT8: 9001,
        Format.INT4: 17001,
        Format.ROTATED_INT8: 9024,
        Format.TURNED_GROUPS: 9024,
    }
    inputs = several[format]
    dtype = torch.bfloat16 if format is Format.BF16 else torch.float32
    weight, x = (torch.randn(rows, inputs).to(dtype) for rows in (200, 30))
    linear = NativeLinearMethod(format).linear(weight, None)
    kept, given = quantised(weight, x, format)
    found = linear.as_float(x)
    assert_near(found, given @ kept.T, 1e-4)
    # Each has another tile, or another order of the parts.
    for rows in (1, 2, 5, 8, 13, 17):
        assert torch.equal(linear.as_float(x[7 : 7 + rows]), found[7 : 7 + rows])


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_the_largest_whole_numbers_are_summed_exactly(format: Format, rows: int) -> None:
    """All of one sign, so that sums of products are as large as 16 bits have to hold."""
    weight = torch.full((40, 192), 7.0)
    weight[::2, ::32] = -8.0
    weight[1::2] *= -1
    x = torch.ones(rows, 192)
    linear = NativeLinearMethod(format).linear(weight, None)
    kept, given = quantised(weight, x, format)
    assert_near(linear(x), given @ kept.T, 1e-6)


def test_many_rows_and_panels_in_several_threads() -> None:
    weight, x = torch.randn(1000, 96).bfloat16(), torch.randn(517, 96).bfloat16()
    linear = NativeLinearMethod(Format.BF16).linear(weight, None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = linear(x)
        torch.set_num_threads(1)
        assert torch.equal(linear(x), found)
    finally:
        torch.set_num_threads(threads)
    assert_near(found, (x.double() @ weight.double().T), 1e-2)


def test_no_rows_give_no_rows() -> None:
    for format in ROUNDED:
        dtype = torch.bfloat16 if format is Format.BF16 else torch.float32
        linear = NativeLinearMethod(format).linear(torch.randn(40, 33).to(dtype), None)
        assert linear(torch.empty(0, 33, dtype=dtype)).shape == (0, 40)


class InPieces:
    """A weight that comes some rows at a time."""

    def __init__(self, weight: torch.Tensor, rows: int, importance: torch.Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.importance = importance
        self._weight = weight
        self._rows = rows

    def pieces(self) -> Iterator[torch.Tensor]:
        return iter(self._weight.split(self._rows))

    def joined(self) -> torch.Tensor:
        return self._weight.clone()


@pytest.mark.parametrize("format", ROUNDED)
@settings(max_examples=12, deadline=None)
@given(layer=layers(), rows=st.integers(1, 70), gated=st.booleans())
def test_pieces_of_a_weight_are_packed_as_the_whole(
    format: Format, layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], rows: int, gated: bool
) -> None:
    dtype = torch.bfloat16 if format is Format.BF16 else torch.float32
    weight, bias, _ = (None if tensor is None else tensor.to(dtype) for tensor in layer)
    assert weight is not None
    method = NativeLinearMethod(format)
    make = (lambda w: method.gated(w, bias, LayerKernels())) if gated else (lambda w: method.linear(w, bias))
    whole, pieces = make(weight), make(InPieces(weight, rows))
    assert list(whole.packed.parts()) == list(pieces.packed.parts())
    assert all(map(torch.equal, whole.packed.parts().values(), pieces.packed.parts().values()))


def best_group(x: torch.Tensor, importance: torch.Tensor) -> float:
    """Return the least error of a group with any scale and any zero in reach, by trying many ranges: in float64."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    ends = torch.linspace(-0.1, 0.25, 29, dtype=torch.float64) * (high - low)
    first, last = (grid.flatten()[:, None] for grid in torch.meshgrid(low + ends, high - ends, indexing="ij"))
    q = ((x - first) / (last - first) * 15).round().clamp(0, 15)
    w = importance.expand_as(q)
    mean_q, mean_x = ((w * one).sum(1, keepdim=True) / w.sum(1, keepdim=True) for one in (q, x.expand_as(q)))
    slope = (w * (q - mean_q) * (x - mean_x)).sum(1, keepdim=True) / (w * (q - mean_q) ** 2).sum(1, keepdim=True)
    error = (w * (slope * (q - mean_q) - (x - mean_x)) ** 2).sum(1)
    return float(error[error.isfinite()].min())


@pytest.mark.parametrize("with_importance", [False, True])
@pytest.mark.parametrize("as_bf16", [False, True])
def test_int4_is_near_the_best_of_many_ranges(with_importance: bool, as_bf16: bool) -> None:
    random = torch.Generator().manual_seed(7)
    weight = torch.randn(72, 96, generator=random).to(torch.bfloat16 if as_bf16 else torch.float32)
    weight[:, ::13] *= 3
    importance = torch.rand(96, generator=random) ** 4 + 1e-3 if with_importance else None
    found = meaning(NativeLinearMethod(Format.INT4).linear(InPieces(weight, 20, importance), None))
    groups, shares = weight.double().view(-1, 32), (torch.ones(96) if importance is None else importance).double()
    best = sum(best_group(group, shares.view(3, 32)[number % 3]) for number, group in enumerate(groups))
    assert float(weighted_error(found, weight, importance).sum()) <= 1.10 * best


@settings(max_examples=12, deadline=None)
@given(layer=layers(), with_importance=st.booleans())
def test_int4_by_torch_has_the_same_error(
    layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], with_importance: bool
) -> None:
    weight = layer[0]
    importance = torch.rand(weight.shape[1]) ** 4 if with_importance else None
    found = meaning(NativeLinearMethod(Format.INT4).linear(InPieces(weight, 19, importance), None))
    whole = search_rows(weight, importance, is_thorough=True).whole()
    assert whole.offset is not None
    scale, offset = (
        one.repeat_interleave(32, dim=1)[:, : weight.shape[1]].double() for one in (whole.scale, whole.offset)
    )
    by_torch = weighted_error(whole.values.double() * scale + offset, weight, importance)
    # Of few numbers a grid may hold all, and a last bit decides which.
    least = 3e-5 * float(weighted_error(torch.zeros_like(weight), weight, importance).sum())
    assert float(weighted_error(found, weight, importance).sum()) == pytest.approx(
        float(by_torch.sum()), rel=1e-2, abs=least
    )


def test_int4_keeps_zeros_and_rows_of_any_size() -> None:
    weight = torch.zeros(40, 64)
    weight[3] = 1e-30
    weight[4] = torch.linspace(-1, 2, 64) * 1e30
    weight[5, 7] = 5.0
    found = meaning(NativeLinearMethod(Format.INT4).linear(weight, None))
    assert not found[[0, 1, 2, *range(6, 40)]].any()
    for row in (3, 4, 5):
        assert_near(found[row], weight[row].double(), 0.05)


def test_int4_with_inputs_that_do_not_count() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    method = NativeLinearMethod(Format.INT4)
    even, none, first = (
        meaning(method.linear(InPieces(weight, 40, importance), None))
        for importance in (None, torch.zeros(64), F.one_hot(torch.tensor(0), 64).float())
    )
    assert torch.equal(none, even)
    # The others are kept nevertheless, as well as may be.
    assert_near(first, weight.double(), 0.25)
    errors = [float((one[:, 0] - weight[:, 0]).square().mean()) for one in (first, even)]
    assert errors[0] < 0.25 * errors[1]


def test_importance_of_other_inputs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="importance is of the weight's inputs"):
        NativeLinearMethod(Format.INT4).linear(InPieces(torch.randn(40, 64), 40, torch.ones(63)), None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", [Format.INT8, Format.INT4])
def test_no_scale_holds_a_weight_that_is_not_finite(format: Format, bad: float) -> None:
    weight = torch.randn(70, 40)
    weight[50, 33] = bad
    with pytest.raises(NotFinite):
        NativeLinearMethod(format).linear(weight, None)
    with pytest.raises(NotFinite):
        NativeLinearMethod(format).gated(InPieces(weight, 16), None, LayerKernels())


class WithOffsets:
    """Random whole numbers with a scale and an offset for each 32 inputs."""

    form = "int4-asymmetric"
    dtype = torch.float32

    def __init__(self, outputs: int, inputs: int) -> None:
        random = torch.Generator().manual_seed(outputs * inputs)
        self.shape = outputs, inputs
        self.values = torch.randint(0, 16, self.shape, generator=random).to(torch.uint8)
        self.scale = torch.rand(outputs, -(-inputs // 32), generator=random) - 0.5
        self.offset = self.scale * -16 * torch.rand(self.scale.shape, generator=random)

    def whole_pieces(self) -> Iterator[WholeRows]:
        for first in range(0, self.shape[0], 19):
            part = slice(first, first + 19)
            yield WholeRows(self.values[part], self.scale[part], self.offset[part])

    @property
    def dense(self) -> torch.Tensor:
        scale, offset = (
            one.double().repeat_interleave(32, dim=1)[:, : self.shape[1]] for one in (self.scale, self.offset)
        )
        return self.values.double() * scale + offset


@pytest.mark.parametrize("as_bf16", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 100), (6, 6), (64, 9001)])
def test_offsets_of_int4_are_part_of_the_product(outputs: int, inputs: int, as_bf16: bool) -> None:
    weight = WithOffsets(outputs, inputs)
    x = torch.randn(30, inputs).to(torch.bfloat16 if as_bf16 else torch.float32)
    bias = torch.randn(outputs)
    method = NativeLinearMethod(Format.INT4)
    linear = method.whole(weight, bias)
    # The product takes x as int4 does.
    _, given = quantised(torch.zeros(2, inputs), x, Format.INT4)
    expected = given @ weight.dense.T + bias.double()
    found = linear.as_float(x)
    assert_near(found, expected, 1e-4)
    assert torch.equal(linear.as_float(x[7:8]), found[7:8])
    gate, value = expected.chunk(2, dim=1)
    assert_near(method.whole(weight, bias, LayerKernels()).as_float(x), F.silu(gate) * value, 2e-2 if as_bf16 else 1e-4)


def test_offsets_that_cannot_be_are_refused() -> None:
    weight = WithOffsets(64, 64)
    packed = NativeLinearMethod(Format.INT4).whole(weight, None).packed
    x = torch.randn(2, 64)
    for offset in (packed.offset[:-1], packed.offset[:0]):
        with pytest.raises(RuntimeError, match="offsets"):
            NativeLinear(replace(packed, offset=offset))(x)
    int8 = NativeLinearMethod(Format.INT8).linear(torch.randn(64, 64), None).packed
    with pytest.raises(RuntimeError, match="offsets"):
        NativeLinear(replace(int8, offset=packed.offset))(x)
    weight.offset[50, 1] = float("inf")
    with pytest.raises(NotFinite):
        NativeLinearMethod(Format.INT4).whole(weight, None)
