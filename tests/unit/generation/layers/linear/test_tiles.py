"""Products by x86's tile registers: rows alone and in blocks of every size, and int8 as without tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories.models.native import use_instruction_set
from penstock.generation.layers.linear.native import Format, NativeLinearMethod

# Whole tiles of 16 rows or granules, blocks of 32 rows, one more and one less; more rows than one task has.
ROWS = (1, 2, 12, 13, 15, 16, 17, 31, 32, 33, 63, 264, 265, 300)
# Granules of bfloat16 are two inputs, of int8 four; with 4160 inputs the sums of bfloat16 have three parts.
INPUTS = (2, 30, 32, 34, 96, 576, 4160)


@pytest.fixture(scope="module", autouse=True)
def _tiles() -> Iterator[None]:
    yield from use_instruction_set("amx")


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("format", [Format.BF16, Format.INT8, Format.ROTATED_INT8])
def test_a_row_is_the_same_in_blocks_of_every_size(format: Format, inputs: int) -> None:
    torch.manual_seed(inputs)
    linear = NativeLinearMethod(format).linear(torch.randn(70, inputs, dtype=torch.bfloat16), None)
    x = torch.randn(max(ROWS), inputs, dtype=torch.bfloat16)
    alone = torch.cat([linear(row) for row in x.split(1)])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("format", [Format.INT8, Format.ROTATED_INT8])
def test_int8_is_the_same_without_tiles(format: Format, inputs: int) -> None:
    torch.manual_seed(inputs)
    linear = NativeLinearMethod(format).linear(torch.randn(70, inputs), None)
    x = torch.randn(40, inputs)
    by_tiles = linear(x)
    torch.ops.penstock.instruction_set("avx512")
    try:
        assert torch.equal(linear(x), by_tiles)
    finally:
        torch.ops.penstock.instruction_set("amx")


def test_bfloat16_is_as_near_as_its_sums_in_float32() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 2048, dtype=torch.bfloat16), torch.randn(33, 2048, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T
    found = NativeLinearMethod(Format.BF16).linear(weight, None)(x)
    # Half a unit of bfloat16's last place, and a thousandth of it for the sums.
    assert float(((found.double() - exact).abs() / exact.abs().clamp_min(1.0)).max()) < 2**-8 * 1.01
