"""Blocks of GGUF's types on the C++ kernels: exactly the file's numbers, times rows rounded by groups of 32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories.models.gguf_blocks import NAMES, Blocks, inputs_of
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from penstock.generation.layers.layer_kernels import NativeKernels
from penstock.generation.layers.linear.base import Linear, NotFinite
from penstock.generation.layers.linear.gguf_blocks import panel_table, panel_types
from penstock.generation.layers.linear.int8 import quantize_rows
from penstock.generation.layers.linear.native import Format, NativeLinearMethod
from torch import Tensor

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def linear_of(weight: Blocks, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
    """The product of the kernels."""
    found = NativeLinearMethod(Format.F32).blocks(weight, bias, NativeKernels() if gated else None)
    assert found is not None
    return found


def some_rows(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with some channels far larger than the others."""
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    x[:, ::13] *= 20
    return x.to(dtype)


def rounded(x: Tensor) -> Tensor:
    """Rows as groups of 32 bytes mean them, in float64."""
    numbers, scales = quantize_rows(x.float().reshape(-1, 32))
    return (numbers * scales).view(x.shape).double()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_numbers_of_the_file(name: str) -> None:
    weight = Blocks([(name, 75)], 2 * inputs_of(name))
    rows = linear_of(weight).rows()
    assert rows is not None
    assert torch.equal(rows(torch.arange(75)), weight.numbers)
    assert torch.equal(rows(torch.tensor([74, 3, 3])), weight.numbers[[74, 3, 3]])
    halved = Blocks([(name, 75)], 2 * inputs_of(name), torch.bfloat16)
    found = linear_of(halved).rows()
    assert found is not None
    assert torch.equal(found(torch.arange(75)), weight.numbers.bfloat16())
    with pytest.raises(IndexError):
        rows(torch.tensor([75]))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_what_the_library_reads(name: str) -> None:
    library = pytest.importorskip("gguf")
    weight = Blocks([(name, 75)], 2 * inputs_of(name))
    expected = library.quants.dequantize(weight.rows[0].numpy(), library.GGMLQuantizationType[name])
    rows = linear_of(weight).rows()
    assert rows is not None
    assert torch.equal(rows(torch.arange(75)), torch.from_numpy(expected))


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_of_these_numbers_and_rounded_rows(name: str) -> None:
    # More groups than are unpacked at once, and no whole number of these.
    inputs = inputs_of(name) * (3 if inputs_of(name) == 256 else 21)
    weight, bias = Blocks([(name, 75)], inputs), torch.randn(75)
    linear, numbers = linear_of(weight, bias), weight.numbers.double().T
    for count in (1, 2, 3, 4, 5, 12, 13, 40, 300):
        x = some_rows(count, inputs)
        exact = rounded(x) @ numbers + bias
        assert torch.allclose(linear(x).double(), exact, rtol=0, atol=3e-6 * float(exact.abs().max())), count


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_and_gates(name: str) -> None:
    inputs = inputs_of(name)
    weight = Blocks([(name, 40), (name, 40)], inputs, torch.bfloat16)
    x = some_rows(3, inputs, torch.bfloat16)
    gate, value = (rounded(x) @ weight.numbers.double().T).bfloat16().float().chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * value
    found = linear_of(weight, gated=True)(x)
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.float(), exact, rtol=3e-2, atol=1e-2 * float(exact.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_with_any_rows_beside_it(name: str) -> None:
    inputs = inputs_of(name) * 20
    linear, x = linear_of(Blocks([(name, 100)], inputs)), some_rows(30, inputs)
    whole = linear(x)
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 30)):
        assert torch.equal(linear(x[first:last]), whole[first:last])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(linear(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_matrices_of_several_types_are_one_product() -> None:
    parts = [("Q4_K", 64), ("IQ4_NL", 32), ("Q6_K", 32), ("Q8_0", 20)]
    weight, x = Blocks(parts, 512), some_rows(7, 512)
    linear = linear_of(weight)
    exact = rounded(x) @ weight.numbers.double().T
    assert linear.quantised_as == "q4_k+iq4_nl+q6_k+q8_0"
    assert torch.allclose(linear(x).double(), exact, rtol=0, atol=3e-6 * float(exact.abs().max()))
    rows = linear.rows()
    assert rows is not None
    assert torch.equal(rows(torch.arange(148)), weight.numbers)


def test_a_weight_has_the_bytes_of_the_file() -> None:
    weight = Blocks([("Q6_K", 64)], 512)
    stored = sum(rows.numel() for rows in weight.rows)
    # The table is beside them.
    assert stored <= linear_of(weight).num_bytes <= stored + 64


def test_two_types_cannot_share_a_panel() -> None:
    assert panel_types([("Q8_0", 40), ("Q6_K", 24)], gated=False) is None
    assert panel_types([("Q8_0", 32), ("Q6_K", 32)], gated=True) is None
    assert NativeLinearMethod(Format.F32).blocks(Blocks([("Q8_0", 40), ("Q6_K", 24)], 256), None) is None
    types = panel_types([("Q8_0", 40), ("Q8_0", 24)], gated=False)
    assert types is not None
    assert types.tolist() == [8, 8]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "MXFP4"])
def test_a_scale_that_is_no_number_names_its_row(name: str) -> None:
    weight = Blocks([(name, 40)], inputs_of(name))
    for octets in weight.rows[0][33].view(-1, weight.rows[0].shape[1]):
        octets[208 if name == "Q6_K" else 0 :][:2] = torch.tensor([torch.inf]).half().view(torch.uint8)
    with pytest.raises(NotFinite) as caught:
        linear_of(weight)
    assert caught.value.row == 33


def test_wrong_sizes_raise() -> None:
    weight = Blocks([("Q8_0", 40)], 64)
    packed = linear_of(weight).packed  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="input"):
        torch.ops.penstock.linear(
            torch.zeros(1, 96), packed.weight, int(Format.GGUF), 40, None, None, None, None, 0, False
        )
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.ops.penstock.pack_blocks(weight.rows[0], 0, 40, 64, packed.weight[:-64], False)
    with pytest.raises(RuntimeError, match="not of their panel's type"):
        torch.ops.penstock.pack_blocks(weight.rows[0][:, :34].contiguous(), 0, 40, 64, packed.weight, False)
    with pytest.raises(RuntimeError, match="no such block"):
        torch.ops.penstock.block_panel_bytes(10, 256)
    with pytest.raises(RuntimeError, match="no whole ones"):
        panel_table(torch.tensor([14]), 64)
