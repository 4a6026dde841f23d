"""int8 and int4 on an NPU: every documented limit of the products is refused before the call, and within them an exact
emulation of the operators gives what the CPU's formats do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from factories.models.emulated_npu import EmulatedNPU, calls
from penstock.common.errors import StartupError
from penstock.generation.attention.npu_operators import OperatorLimit
from penstock.generation.layers.linear import npu_products as npu
from penstock.generation.layers.linear.base import LinearMethod, NotFinite, WholeRows
from penstock.generation.layers.linear.int4 import quantize_groups
from penstock.generation.layers.linear.int4_search import GROUP
from penstock.generation.layers.linear.int8 import Int8Linear
from penstock.generation.layers.linear.npu_products import NPUInt4Linear, NPUInt8Linear
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of a result, in standard deviations of the exact ones.
ROUNDED = {BF16: 0.02, FP16: 0.004}


def method(quantization: str, dtype: torch.dtype = BF16) -> LinearMethod:
    device = EmulatedNPU()
    device.start(num_threads=1)
    return device.linear_method(dtype, quantization)


@pytest.fixture(autouse=True, scope="module")
def _operators() -> None:
    method("int8")


def of(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def numbers(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


INT8 = torch.int8
WEIGHT = of(64, 8, dtype=INT8)
MANY = npu.MOST_FEATURES + 1


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (
            lambda: npu.dynamic_quant(of(2, 8)),
            r"npu_dynamic_quant: input must be .* float16 or bfloat16, found \(2, 8\)",
        ),
        (lambda: npu.dynamic_quant(of(8, dtype=BF16)), "npu_dynamic_quant: input must be"),
        (lambda: npu.dynamic_quant(of(0, 8, dtype=BF16)), "not empty"),
        (lambda: npu.check_int8(of(64, 8), of(8), None), "npu_quant_matmul: x2 must be contiguous"),
        (lambda: npu.check_int8(of(8, 64, dtype=INT8).t(), of(8), None), "x2 must be contiguous"),
        (lambda: npu.check_int8(of(1, MANY, dtype=INT8), of(MANY), None), "x2 must have 1 to 65535 inputs"),
        (lambda: npu.check_int8(of(MANY, 1, dtype=INT8), of(1), None), "x2 must have 1 to 65535 inputs"),
        (lambda: npu.check_int8(WEIGHT, of(8, dtype=BF16), None), r"scale must be \(8,\) float32"),
        (lambda: npu.check_int8(WEIGHT, of(1), None), r"scale must be \(8,\) float32"),
        (lambda: npu.check_int8(WEIGHT, of(8), of(8, dtype=BF16)), r"bias must be \(8,\) float32"),
        (lambda: npu.quant_matmul(of(2, 64), of(2), WEIGHT, of(8), None, BF16), r"x1 must be \(T, 64\) int8"),
        (lambda: npu.quant_matmul(of(2, 8, dtype=INT8), of(2), WEIGHT, of(8), None, BF16), r"x1 must be \(T, 64\)"),
        (lambda: npu.quant_matmul(of(2, 64, dtype=INT8), of(3), WEIGHT, of(8), None, BF16), "pertoken_scale must be"),
        (lambda: npu.quant_matmul(of(2, 64, dtype=INT8), of(2), WEIGHT, of(8), None, FP32), "output_dtype must be"),
    ],
)
def test_int8_products_refuse_what_is_outside_their_limits(refused: Callable[[], object], named: str) -> None:
    with pytest.raises(OperatorLimit, match=named):
        refused()


PACKED = of(64, 1, dtype=torch.int32)


def int4(
    packed: Tensor = PACKED,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 32,
) -> None:
    npu.check_int4(packed, of(2, 8, dtype=BF16) if scale is None else scale, offset, bias, group)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda: npu.int4_packed(of(64, 12, dtype=torch.int32)), "npu_convert_weight_to_int4pack: .* multiple of 8"),
        (lambda: npu.int4_packed(of(64, 8)), "weight must be contiguous 2-D int32"),
        (lambda: npu.int4_packed(of(8, 64, dtype=torch.int32).t()), "weight must be contiguous 2-D int32"),
        (lambda: npu.int4_packed(of(64, 8, dtype=torch.int32) + 8), "from -8 to 7"),
        (lambda: npu.int4_packed(of(64, 8, dtype=torch.int32) - 9), "from -8 to 7"),
        (lambda: int4(of(64, 8, dtype=INT8)), r"npu_weight_quant_batchmatmul: weight must be contiguous \(I, O / 8\)"),
        (lambda: int4(of(1, 64, dtype=torch.int32).t()[::2]), "weight must be contiguous"),
        (lambda: int4(of(MANY, 1, dtype=torch.int32)), "weight must have 1 to 65535 inputs"),
        (
            lambda: int4(of(1, 8192, dtype=torch.int32), of(1, 65536, dtype=BF16), group=0),
            "weight must have 1 to 65535",
        ),
        (lambda: int4(group=64), "antiquant_group_size must be 0, or a multiple of 32 from 32 to 63"),
        (lambda: int4(group=40), "antiquant_group_size must be"),
        (lambda: int4(group=-32), "antiquant_group_size must be"),
        (lambda: int4(scale=of(1, 8, dtype=BF16)), r"antiquant_scale must be \(2, 8\)"),
        (lambda: int4(scale=of(2, 8, dtype=BF16), group=0), r"antiquant_scale must be \(1, 8\)"),
        (lambda: int4(scale=of(2, 8)), r"antiquant_scale must be \(2, 8\) float16 or bfloat16"),
        (lambda: int4(offset=of(2, 8, dtype=FP16)), "antiquant_offset must have antiquant_scale's"),
        (lambda: int4(offset=of(1, 8, dtype=BF16)), "antiquant_offset must have antiquant_scale's"),
        (
            lambda: int4(bias=of(8, dtype=BF16)),
            r"bias must be contiguous \(8,\) torch.float32 with x in torch.bfloat16",
        ),
        (lambda: int4(scale=of(2, 8, dtype=FP16), bias=of(8)), "torch.float16 with x in torch.float16"),
        (lambda: int4(bias=of(16)[::2]), "bias must be contiguous"),
        (lambda: int4(bias=of(1, 8)), "bias must be contiguous"),
        *(
            (lambda x=x: npu.weight_quant_matmul(x, PACKED, of(2, 8, dtype=BF16), None, None, 32), named)
            for x, named in (
                (of(2, 64, dtype=FP16), r"x must be \(T, 64\) torch.bfloat16, as antiquant_scale"),
                (of(2, 32, dtype=BF16), r"x must be \(T, 64\)"),
                (of(1, 2, 64, dtype=BF16), r"x must be \(T, 64\)"),
                (of(0, 64, dtype=BF16), "x must have 1 to 2147483647 rows"),
            )
        ),
    ],
)
def test_int4_products_refuse_what_is_outside_their_limits(refused: Callable[[], object], named: str) -> None:
    with pytest.raises(OperatorLimit, match=named):
        refused()


def test_what_is_within_the_limits_is_let_through() -> None:
    npu.check_int8(WEIGHT, of(8), of(8))
    int4(offset=of(2, 8, dtype=BF16), bias=of(8))
    int4(scale=of(2, 8, dtype=FP16), bias=of(8, dtype=FP16))
    int4(scale=of(1, 8, dtype=BF16), group=0)


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max() / exact.std()) <= times * ROUNDED[dtype]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 96), (13, 33), (5, 32), (9, 7), (64, 200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_gives_what_the_cpus_format_does(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_bias: bool
) -> None:
    weight, x = numbers(outputs, inputs, dtype=dtype), numbers(rows, inputs, dtype=dtype, seed=1)
    bias = numbers(outputs, dtype=dtype, seed=2) if has_bias else None
    before = calls.copy()
    found = method("int8", dtype).linear(weight.clone(), bias)
    # What is turned is rounded to the dtype once more: a number near the middle of two bytes may become the other.
    assert_near(found(x), Int8Linear(weight, bias).as_float(x).double(), dtype, 2.5)
    assert (calls - before) == {"npu_dynamic_quant": 1, "npu_quant_matmul": 1}
    assert (found.quantised_as, found.out_features, found.in_features) == ("int8", outputs, inputs)
    assert found.mean_scale == pytest.approx(Int8Linear(weight, bias).mean_scale)
    found = method("int4", dtype).linear(weight.clone(), bias)
    # The CPU's product multiplies in bfloat16.
    values, scale = quantize_groups(weight)
    exact = ((values - 8) * scale.double().repeat_interleave(GROUP, dim=1))[:, :inputs]
    assert_near(found(x), x.double() @ exact.T + (0 if bias is None else bias.double()), dtype)
    assert (found.quantised_as, found.out_features, found.in_features) == ("int4", outputs, inputs)
    assert found.mean_scale == pytest.approx(float(scale.float().abs().mean()), rel=1e-2)
    assert found(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("inputs", [96, 40, 20])
def test_whole_numbers_of_a_checkpoint_are_used_as_they_are(inputs: int) -> None:
    groups = -(-inputs // 32)
    random = torch.Generator().manual_seed(3)
    values = torch.randint(0, 16, (12, inputs), generator=random, dtype=torch.uint8)
    scale = torch.rand(12, groups, generator=random).bfloat16().float() + 0.5
    # Zero points are whole numbers; one group is constant.
    offset = -scale * torch.randint(0, 16, (12, groups), generator=random)
    scale[0, 0], offset[0, 0] = 0.0, 1.5
    x = numbers(3, inputs, seed=4)
    for rows in (WholeRows(values, scale), WholeRows(values, scale, offset)):
        wide = rows.scale.repeat_interleave(32, dim=1)[:, :inputs].double()
        number = values.double()
        shift = -8 * wide if rows.offset is None else offset.repeat_interleave(32, dim=1)[:, :inputs].double()
        linear = NPUInt4Linear(rows, None, BF16)
        assert_near(linear(x), x.double() @ (number * wide + shift).T, BF16)
        assert linear.quantised_as == ("int4" if rows.offset is None else "int4-asymmetric")
    bytes_OI = torch.randint(-128, 128, (12, inputs), generator=random, dtype=torch.int8)
    whole = WholeRows(bytes_OI, scale[:, 0] + 0.1)
    assert_near(NPUInt8Linear(whole, None)(x), Int8Linear(whole, None).as_float(x).double(), BF16)


def test_a_layer_with_more_outputs_than_a_product_takes_several() -> None:
    weight, x = numbers(MANY + 3, 8), numbers(2, 8, seed=1)
    for linear, name in (
        (NPUInt8Linear(weight, None), "npu_quant_matmul"),
        (NPUInt4Linear(weight, None, BF16), "npu_weight_quant_batchmatmul"),
    ):
        before = calls[name]
        found = linear(x)
        assert calls[name] == before + 2
        assert found.shape == (2, MANY + 3)
        ends = [*range(5), *range(npu.MOST_FEATURES - 100, MANY + 3)]
        small = type(linear)(weight[ends], None, *((BF16,) if isinstance(linear, NPUInt4Linear) else ()))
        assert torch.equal(found[:, ends], small(x))


def test_sizes_and_numbers_that_cannot_be_kept_name_their_cause() -> None:
    with pytest.raises(StartupError, match="a linear layer has 65536 inputs") as caught:
        NPUInt8Linear(of(1, MANY, dtype=BF16), None)
    assert caught.value.flag == "--quantization"
    weight = numbers(4, 64)
    weight[2, 5] = torch.inf
    for make in (method("int8").linear, method("int4").linear):
        with pytest.raises(NotFinite):
            make(weight.clone(), None)


def test_the_head_of_int4_is_int8() -> None:
    assert isinstance(method("int4").head(numbers(16, 64)), NPUInt8Linear)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_take_a_half_or_a_quarter_of_the_bytes(quantization: str) -> None:
    linear = method(quantization).linear(numbers(64, 128), None)
    scales = 64 * 4 if quantization == "int8" else 64 * 4 * 2
    assert linear.num_bytes == 64 * 128 // (1 if quantization == "int8" else 2) + scales
