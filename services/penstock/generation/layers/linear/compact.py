"""bfloat16 weights in some three quarters of their bytes, without loss (csrc/linear/compact.h).

A step of few rows waits for the memory, and reads so much less. The kernels give the same bits as with whole weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# More of a whole weight's bytes are no gain: its exponents are too many.
_MOST_SHARE = 15 / 16


class CompactPacking:
    """Makes packed weights compact: each lies whole in memory that the next one has again."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 for a whole weight, not initialised. It is valid until the next call."""
        if self._whole.numel() < num_bytes:
            # The old one is given back first.
            self._whole = torch.empty(0, dtype=torch.uint8)
            self._whole = torch.empty(num_bytes, dtype=torch.uint8)
        return self._whole[:num_bytes]

    @staticmethod
    def finish(whole: Tensor, inputs: int, take: Callable[[int], Tensor]) -> Tensor:
        """Return a packed weight of `inputs` inputs in memory that `take` gives: compact, or whole if that is hardly
        larger."""
        plans, num_bytes = torch.ops.penstock.plan_compact(whole, inputs)
        if num_bytes > _MOST_SHARE * whole.numel():
            return take(whole.numel()).copy_(whole)
        weight = take(num_bytes)
        torch.ops.penstock.write_compact(whole, inputs, plans, weight)
        return weight
