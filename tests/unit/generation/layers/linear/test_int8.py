"""int8 by oneDNN: the bits of sums of whole numbers, in the way of this CPU and of one whose product saturates."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.host.cpu_features import Int8Product, int8_product
from penstock.generation.layers.linear import int8
from penstock.generation.layers.linear.int8 import Int8Linear, quantize_rows
from penstock.generation.rounding.rotation import (
    halved,
    rotated,
    rotated_by_product,
    rotation_block,
    rotation_matrix,
)


@pytest.mark.parametrize("product", [int8_product(), Int8Product.SATURATES], ids=["this CPU", "saturates"])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (896, 33), (4864, 16)])
def test_every_cpu_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, product: Int8Product, inputs: int, outputs: int
) -> None:
    draw = torch.Generator().manual_seed(inputs)
    weight, bias, x = (torch.randn(shape, generator=draw) for shape in ((outputs, inputs), (outputs,), (40, inputs)))
    block = rotation_block(inputs)
    values, scale = quantize_rows(rotated_by_product(x, rotation_matrix(block, x.dtype, x.device)))
    weight_values, weight_scale = quantize_rows(rotated(weight, block))
    weight_scale *= halved(block)
    sums = (values.double() @ weight_values.double().t()).float()
    monkeypatch.setattr(int8, "int8_product", lambda: product)
    assert torch.equal(Int8Linear(weight, bias).as_float(x), sums * (weight_scale / block).t() * scale + bias)
