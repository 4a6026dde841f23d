"""int8 by oneDNN: where its product saturates, two that do not give the bits of one that is exact."""

from __future__ import annotations

import pytest
import torch
from penstock.generation.host.cpu_features import Int8Product, int8_product
from penstock.generation.layers.linear import int8
from penstock.generation.layers.linear.int8 import Int8Linear

needs_exact = pytest.mark.skipif(
    int8_product() is not Int8Product.EXACT, reason="oneDNN's int8 product saturates on this CPU"
)


@needs_exact
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (896, 33), (4864, 16)])
def test_every_cpu_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int) -> None:
    draw = torch.Generator().manual_seed(inputs)
    weight, bias, x = (torch.randn(shape, generator=draw) for shape in ((outputs, inputs), (outputs,), (40, inputs)))
    exact = Int8Linear(weight, bias).as_float(x)
    monkeypatch.setattr(int8, "int8_product", lambda: Int8Product.SATURATES)
    assert torch.equal(Int8Linear(weight, bias).as_float(x), exact)
