"""The table of number formats, held to torch, safetensors, numpy and the protos."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from penstock.common.dtypes import BY_NAME, DTYPES, Dtype, dtype_name, stored_bytes
from penstock.common.errors import StartupError
from penstock.generation.devices.torch_dtypes import named_dtype, stored_name, torch_dtype
from penstock.generation.wire.dtype_messages import from_dtype, to_dtype
from penstock.v1 import common_pb2
from safetensors.torch import save

ALL = pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.name)


@ALL
def test_the_table_is_as_torch_safetensors_and_numpy_have_it(dtype: Dtype) -> None:
    ours = torch_dtype(dtype)
    written = save({"a": torch.zeros(3, dtype=ours)})
    assert f'"dtype":"{dtype.stored}"'.encode() in written
    assert (dtype_name(ours), stored_name(ours)) == (dtype.name, dtype.stored)
    assert dtype.num_bytes == ours.itemsize == np.dtype(dtype.bits).itemsize == stored_bytes(dtype.stored, 99)


def test_a_format_that_is_not_in_the_table_has_the_size_that_the_caller_says() -> None:
    assert stored_bytes("F4_E2M1", 7) == 7


def test_the_protos_formats_are_all_in_the_table() -> None:
    numbers = set(common_pb2.DType.values()) - {common_pb2.D_TYPE_UNSPECIFIED}
    named = {number: to_dtype(number) for number in numbers}
    assert set(named.values()) < set(BY_NAME)
    assert {number: from_dtype(f"torch.{name}") for number, name in named.items()} == {one: one for one in numbers}


def test_formats_that_the_protos_lack_are_unspecified() -> None:
    assert from_dtype("float8_e5m2") == common_pb2.D_TYPE_UNSPECIFIED
    assert to_dtype(common_pb2.D_TYPE_UNSPECIFIED) == ""


def test_dtype_is_named_in_full_or_short() -> None:
    assert named_dtype("bf16") is named_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(StartupError, match="float32, fp32, bfloat16, bf16, float16, fp16"):
        named_dtype("int8")
