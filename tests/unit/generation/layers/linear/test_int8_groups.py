"""int8-groups: a scale for each 32 inputs of turned blocks, in weights and rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from penstock.common.errors import StartupError
from penstock.generation.devices.cpu import cpu_method
from penstock.generation.devices.npu import NPUDevice
from penstock.generation.layers.layer_kernels import NativeKernels
from penstock.generation.layers.linear.base import Linear, NotFinite
from penstock.generation.layers.linear.int8_groups import turned_groups
from penstock.generation.layers.linear.native import Format, NativeLinear, NativeLinearMethod, part_sizes
from penstock.generation.rounding.rotation import halved, rotated, rotation_block
from torch import Tensor


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


METHOD = NativeLinearMethod(Format.TURNED_GROUPS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor, *, as_half: bool) -> Tensor:
    """Return rows as they are multiplied: turned, and rounded in groups of 32, in float64."""
    block = rotation_block(x.shape[1])
    by = halved(block) if as_half else block // halved(block)
    groups = (rotated(x, block) / by).view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scale = scale.half().float() if as_half else scale
    whole = (groups / scale.clamp_min(1e-30)).round()
    return (whole.double() * scale.double()).flatten(1)


def error_of(linear: Linear, weight: Tensor, x: Tensor) -> float:
    exact = x.double() @ weight.double().t()
    return float((linear(x) - exact).norm() / exact.norm())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shape", [(40, 64), (96, 576), (33, 96), (64, 1536)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 33])
def test_the_product_is_that_of_the_rounded_numbers(shape: tuple[int, int], rows: int) -> None:
    weight, x = numbers(*shape) / 8, numbers(rows, shape[1], seed=1)
    linear = METHOD.linear(weight, numbers(shape[0], seed=2))
    expected = rounded(x, as_half=False) @ rounded(weight, as_half=True).t() + numbers(shape[0], seed=2)
    # A number that lies between two whole ones may become either.
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-3, atol=0.02)
    assert error_of(METHOD.linear(weight, None), weight, x) < 0.009


def test_it_is_nearer_than_int8_where_rows_have_outliers() -> None:
    weight, x = numbers(64, 1024), numbers(16, 1024, seed=1)
    x[:, ::97] *= 50.0
    weight[:, ::97] *= 0.05
    by_row = NativeLinearMethod(Format.ROTATED_INT8).linear(weight, None)
    assert error_of(METHOD.linear(weight, None), weight, x) < 0.8 * error_of(by_row, weight, x)


def test_a_row_is_the_same_with_any_rows_beside_it() -> None:
    weight, x = numbers(96, 576), numbers(40, 576, seed=1)
    linear = METHOD.linear(weight, None)
    together = linear(x)
    for first, last in ((0, 1), (39, 40), (3, 5), (7, 20)):
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_gates_are_those_of_the_halves() -> None:
    weight, x = numbers(128, 96) / 4, numbers(6, 96, seed=1)
    gated = METHOD.gated(weight, None, NativeKernels(torch.float32))
    gate, up = METHOD.linear(weight, None)(x).chunk(2, dim=1)
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-5)


def test_it_takes_eight_and_a_half_bits() -> None:
    linear = METHOD.linear(numbers(320, 640), None)
    # And a word for each panel of outputs.
    assert linear.num_bytes <= 320 * 640 * 8.5 / 8 + 11 * 8 + 64
    assert linear.quantised_as == "int8-groups"
    sizes = part_sizes((320, 640), Format.TURNED_GROUPS, gated=False, has_bias=False)
    assert sizes == {"weight": (torch.uint8, linear.num_bytes)}
    assert linear.rows() is None


def test_its_mean_scale_is_that_of_numbers_that_keep_their_length() -> None:
    weight = numbers(64, 256) * 3
    scale = weight.view(64, -1, 32).abs().amax(-1) / 127
    assert METHOD.linear(weight, None).mean_scale == pytest.approx(float(scale.mean()), rel=0.05)


def test_inputs_that_are_no_whole_groups_have_a_scale_a_row() -> None:
    linear = METHOD.linear(numbers(32, 48), None)
    assert isinstance(linear, NativeLinear)
    assert linear.format is Format.ROTATED_INT8
    assert linear.quantised_as == "int8"


def test_a_group_of_zeros_is_zeros() -> None:
    weight = numbers(32, 128)
    weight[3] = 0.0
    found = METHOD.linear(weight, None)(numbers(2, 128, seed=1))
    assert torch.equal(found[:, 3], torch.zeros(2))
    assert not found.isnan().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_named(bad: float) -> None:
    weight = numbers(70, 64)
    weight[37, 5] = bad
    with pytest.raises(NotFinite) as caught:
        METHOD.linear(weight, None)
    assert caught.value.row == 37


def test_a_row_is_a_scale_and_its_numbers_for_each_group() -> None:
    found = turned_groups(numbers(3, 128))
    assert (found.dtype, found.shape) == (torch.uint8, (3, 4 * 34))


def test_others_refuse_it_by_name() -> None:
    with pytest.raises(StartupError, match=r"int8-groups is for the C\+\+ kernels.*use int8") as caught:
        cpu_method(torch.float32, "int8-groups", native=False)
    assert caught.value.flag == "--quantization"
    with pytest.raises(StartupError, match="--device npu has none: use int8"):
        NPUDevice().linear_method(torch.bfloat16, "int8-groups")
