"""Geometry of the index keys that a pool keeps beside its rows (core.index_heads)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Index keys of a token: `num_layers` rows of `dim` numbers. They keep the model's `dtype` in an int8 pool, too: a
    rounded key would choose other positions."""

    num_layers: int
    dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_layers * self.dim * self.dtype.itemsize


def index_rows(config: ModelConfig, dtype: torch.dtype) -> IndexRows | None:
    """Return the index keys of a model in `dtype`; None: it has none."""
    return None if config.index is None else IndexRows(config.index.num_layers, config.index.dim, dtype)
