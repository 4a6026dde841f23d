"""A tensor of a model's weights, before its bytes come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.common.dtypes import COMPUTED


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's name) and shape of a tensor that comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor. The dtype was checked."""
        return math.prod(self.shape) * COMPUTED[self.dtype].num_bytes
