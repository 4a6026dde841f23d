"""The bytes that files keep: what a version of the layout is, whichever instructions made it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest
import torch
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear.native import (
    LAYOUT_VERSION,
    SAME_DENSE,
    Format,
    NativeLinear,
    NativeLinearMethod,
    can_read,
    formats,
)

# Digests of the parts below, by version and format. Other bytes under the same version would be read as if they were
# these: after a change of the bytes, raise LAYOUT_VERSION and add a line. Earlier versions have the formats that are
# still read.
DIGESTS = {
    2: {
        Format.F32: "4bdf81acf9fb7af45fbaea3c95251e103fb4053914a35e57c7a159d7b6ff7685",
        Format.BF16: "094d931ca84372d3fcbdd54be5ff7fae8c69688282215516c6419646d2faf55c",
    },
    3: {
        Format.F32: "4bdf81acf9fb7af45fbaea3c95251e103fb4053914a35e57c7a159d7b6ff7685",
        Format.BF16: "094d931ca84372d3fcbdd54be5ff7fae8c69688282215516c6419646d2faf55c",
        Format.INT8: "2daef062841f2fb56dbd5a934bb7a1642760952fa3ee0a4a70161122bff30ebb",
        Format.INT4: "9e3f2c5ebc9553f44087e1f54cc82e0ebd2c931fe57027ec80af5673358cfe13",
        Format.ROTATED_INT8: "d559a3a18930a73c90499e19ec4fb93a72747712a86166444c9080a0e9d48b9c",
    },
}


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def numbers(*shape: int) -> torch.Tensor:
    """The same on every machine: multiples of an eighth."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 % 1009 - 504).float() / 8).view(shape)


# Blocks of GGUF are in no packed file.
@pytest.mark.parametrize("format", [format for format in Format if format is not Format.GGUF])
def test_a_version_of_the_layout_means_these_bytes(format: Format) -> None:
    method = NativeLinearMethod(format)
    dtype = torch.float32 if format is Format.F32 else torch.bfloat16
    inputs = 192 if format is Format.ROTATED_INT8 else 43
    weight, bias = numbers(72, inputs).to(dtype), numbers(72).to(dtype)
    digest = hashlib.sha256()
    for linear in (method.linear(weight, bias), method.gated(weight, bias, LayerKernels())):
        assert isinstance(linear, NativeLinear)
        for name, part in linear.packed.parts().items():
            digest.update(json.dumps([name, str(part.dtype), list(part.shape)]).encode())
            digest.update(part.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == DIGESTS[LAYOUT_VERSION][format]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_formats_are_read_of_earlier_versions_that_had_the_same_bytes(dtype: torch.dtype) -> None:
    assert SAME_DENSE
    for version in SAME_DENSE:
        for format in formats(dtype, "none"):
            assert DIGESTS[version][format] == DIGESTS[LAYOUT_VERSION][format]
        assert [can_read(str(version), one) for one in ("none", "int8", "int4")] == [True, False, False]
    assert not can_read("1", "none")
