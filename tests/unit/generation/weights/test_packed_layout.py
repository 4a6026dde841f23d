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
    SAME_BYTES,
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
        Format.ROTATED_INT8: "d559a3a18930a73c90499e19ec4fb93a72747712a86166444c9080a0e9d48b9c",
    },
    4: {
        Format.F32: "4bdf81acf9fb7af45fbaea3c95251e103fb4053914a35e57c7a159d7b6ff7685",
        Format.BF16: "094d931ca84372d3fcbdd54be5ff7fae8c69688282215516c6419646d2faf55c",
        Format.INT8: "2daef062841f2fb56dbd5a934bb7a1642760952fa3ee0a4a70161122bff30ebb",
        Format.INT4: "509cf89c5fb3feaa602c1b70a71b6ea3159b83329f01599adcae4a2bd9a28e9b",
        Format.ROTATED_INT8: "d559a3a18930a73c90499e19ec4fb93a72747712a86166444c9080a0e9d48b9c",
        Format.TURNED_GROUPS: "e236f65f629c5a795087553b9f6aea6b8de04873db4feae3ab5795c1bff71f17",
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
    inputs = 192 if format in (Format.ROTATED_INT8, Format.TURNED_GROUPS) else 43
    weight, bias = numbers(72, inputs).to(dtype), numbers(72).to(dtype)
    digest = hashlib.sha256()
    for linear in (method.linear(weight, bias), method.gated(weight, bias, LayerKernels())):
        assert isinstance(linear, NativeLinear)
        for name, part in linear.packed.parts().items():
            digest.update(json.dumps([name, str(part.dtype), list(part.shape)]).encode())
            digest.update(part.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == DIGESTS[LAYOUT_VERSION][format]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", list(SAME_BYTES))
def test_earlier_versions_with_the_same_bytes_are_read(quantization: str, dtype: torch.dtype) -> None:
    assert SAME_BYTES[quantization]
    for version in SAME_BYTES[quantization]:
        for format in formats(dtype, quantization):
            assert DIGESTS[version][format] == DIGESTS[LAYOUT_VERSION][format]
        assert can_read(str(version), quantization)


def test_other_versions_are_refused() -> None:
    readable = {
        (version, one) for version in range(1, 6) for one in ("none", "int8", "int4") if can_read(str(version), one)
    }
    assert readable == {(2, "none"), (3, "none"), (4, "none"), (3, "int8"), (4, "int8"), (4, "int4")}
