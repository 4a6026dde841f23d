"""Requests' inputs_embeds on their way in: room for all of them, and conversion to rows that the model reads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.common.dtypes import COMPUTED
from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.generation.core.prompt_embeds import PromptEmbeds
from penstock.generation.core.tensors import TensorData

# numpy has no bfloat16: its bits are the upper half of a float32.
_BFLOAT16_EXPONENT = 0x7F80
# Values to convert at a time: their memory fits a core's cache.
_PIECE = 1 << 15


class EmbedsIntake:
    """Conversion of requests' inputs_embeds off the event loop, one at a time, and the bound on their total bytes.

    Used from the event loop only.
    """

    def __init__(self, dtype: str, block_size: int, most_bytes: int, retry_seconds: float) -> None:
        """`dtype` is the model's. Above `most_bytes` more are refused and told to wait for `retry_seconds`; one
        request alone never is."""
        self._dtype = dtype
        self._block_size = block_size
        self._most_bytes = most_bytes
        self._retry_seconds = retry_seconds
        self._turn = asyncio.Lock()
        # Bytes of requests that are not submitted yet.
        self._coming = 0

    @contextlib.contextmanager
    def room(self, tensor: TensorData | None, live_bytes: int) -> Iterator[None]:
        """Hold room for a request's `tensor` until it is submitted; `live_bytes` are those of submitted requests.

        Raises ResourceExhausted.
        """
        if tensor is None:
            yield
            return
        num_bytes = max(len(tensor.data), math.prod(tensor.shape) * COMPUTED[self._dtype].num_bytes)
        held = live_bytes + self._coming
        if held and held + num_bytes > self._most_bytes:
            raise ResourceExhausted(
                f"inputs_embeds of other requests take {held} bytes of --max-live-embeds-bytes {self._most_bytes}",
                reason="QUEUE_FULL",
                retry_after_seconds=self._retry_seconds,
            )
        self._coming += num_bytes
        try:
            yield
        finally:
            self._coming -= num_bytes

    async def convert(self, tensor: TensorData, num_placeholders: int) -> PromptEmbeds:
        """Convert a request's tensor. Raises the errors of `to_prompt_embeds`.

        A conversion cannot be stopped: when cancelled, this call still ends with the conversion, so that turn and room
        are held as long as the memory.
        """
        async with self._turn:
            work = asyncio.to_thread(to_prompt_embeds, tensor, self._dtype, self._block_size, num_placeholders)
            converting = asyncio.create_task(work)
            try:
                return await asyncio.shield(converting)
            finally:
                while not converting.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([converting])


def to_prompt_embeds(tensor: TensorData, dtype: str, block_size: int, num_placeholders: int) -> PromptEmbeds:
    """Return `tensor` (rows, hidden size), already checked by `validate`, as embeddings in `dtype`, the model's.

    Takes a core for some milliseconds. Raises InvalidArgument for a value that is not finite, or is not in that type.
    """
    given = np.frombuffer(tensor.data, dtype=COMPUTED[tensor.dtype].bits)
    data = bytearray(len(given) * COMPUTED[dtype].num_bytes)
    taken = np.frombuffer(data, dtype=COMPUTED[dtype].bits)
    for first in range(0, len(given), _PIECE):
        piece = _converted(given[first : first + _PIECE], tensor.dtype, dtype)
        if not _is_finite(piece, dtype):
            raise InvalidArgument("inputs_embeds", f"must hold finite values only, also in the model's {dtype}")
        taken[first : first + _PIECE] = piece
    num_rows, hidden = tensor.shape
    each = block_size * hidden * COMPUTED[dtype].num_bytes
    view = memoryview(data)
    digests = tuple(hashlib.sha256(view[first : first + each]).digest() for first in range(0, len(data), each))
    return PromptEmbeds(data, num_rows, num_placeholders, digests)


def _converted(values: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """Return the values as `target` stores them, rounded to the nearest, ties to even."""
    if source == target:
        return values
    if source == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if target == "bfloat16":
        return _to_bfloat16(values.astype(np.float32))
    # A value out of range becomes infinite, and the caller refuses it.
    with np.errstate(over="ignore"):
        return values.astype(COMPUTED[target].bits)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounded bits of a NaN may be those of a number.
    return np.where(np.isnan(values), np.uint16(_BFLOAT16_EXPONENT), rounded)


def _is_finite(values: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool(((values & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(values).all())
