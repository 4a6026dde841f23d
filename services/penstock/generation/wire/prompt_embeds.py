"""Conversion of a request's inputs_embeds to the rows that the model reads. It takes a core for milliseconds: call it
off the event loop."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.common.errors import InvalidArgument
from penstock.generation.core.prompt_embeds import PromptEmbeds
from penstock.generation.core.tensors import TensorData

# numpy's types; bfloat16, which it does not have, is the upper half of a float32.
_STORED: dict[str, npt.DTypeLike] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_BFLOAT16_EXPONENT = 0x7F80


def to_prompt_embeds(tensor: TensorData, dtype: str, block_size: int, num_placeholders: int) -> PromptEmbeds:
    """Return `tensor` (rows, hidden size), which `validate` has let pass, as embeddings in `dtype`, the model's.

    Raises InvalidArgument for a value that is not finite, or is not in that type.
    """
    values = _converted(np.frombuffer(tensor.data, dtype=_STORED[tensor.dtype]), tensor.dtype, dtype)
    if not _is_finite(values, dtype):
        raise InvalidArgument("inputs_embeds", f"must hold finite values only, also in the model's {dtype}")
    data = bytearray(values.view(np.uint8).data)
    num_rows, hidden = tensor.shape
    each = block_size * hidden * values.itemsize
    view = memoryview(data)
    digests = tuple(hashlib.sha256(view[first : first + each]).digest() for first in range(0, len(data), each))
    return PromptEmbeds(data, num_rows, num_placeholders, digests)


def _converted(values: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """Return the values as `target` stores them, rounded to the nearest, of two to the even one."""
    if source == target:
        return values
    if source == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if target == "bfloat16":
        return _to_bfloat16(values.astype(np.float32))
    # What has no room becomes infinite, and the caller refuses it.
    with np.errstate(over="ignore"):
        return values.astype(_STORED[target])


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounded bits of a NaN may be those of a number.
    return np.where(np.isnan(values), np.uint16(_BFLOAT16_EXPONENT), rounded)


def _is_finite(values: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool(((values & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(values).all())
