"""A loaded model without an engine: sequences in slots of their own, stepped by the caller."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.evaluation.number_format import NumberFormat
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.devices.base import Device
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model

_BLOCK_SIZE = 16


class SteppedModel:
    """One model and a pool for `sequences` of at most `longest` tokens each."""

    def __init__(self, folder: Path, device: Device, format: NumberFormat, sequences: int, longest: int) -> None:
        """Load the model. Raises StartupError, also for a model that keeps states beside keys and values."""
        self.weights: LanguageModel = load_model(
            folder, dtype=format.dtype, quantization=format.quantization, device=device
        )
        if self.weights.state_layout:
            raise StartupError(
                f"MODEL: {self.weights.config.model_type} keeps states beside keys and values: serve it, and give "
                "--endpoint",
                flag="MODEL",
            )
        self._blocks = -(-longest // _BLOCK_SIZE)
        weights = self.weights
        shape = KVShape.of(
            weights.config,
            weights.dtype,
            _BLOCK_SIZE,
            requested=format.kv_cache_dtype,
            num_kv_heads=weights.num_kv_heads,
        )
        self.kv = shape.pool(sequences * self._blocks, weights.device)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token."""
        return self.kv.bytes_per_block / _BLOCK_SIZE

    @torch.inference_mode()
    def step(self, rows: list[list[int]], computed: list[int]) -> Tensor:
        """Compute the next tokens of every sequence, after `computed` of each: logits (rows, vocabulary)."""
        tables = torch.arange(len(rows) * self._blocks, dtype=torch.int32).view(len(rows), -1)
        counts = [len(row) for row in rows]
        lengths = [before + count for before, count in zip(computed, counts, strict=True)]
        metadata, positions = AttentionMetadata.build(counts, lengths, tables, _BLOCK_SIZE)
        ids = torch.tensor([token for row in rows for token in row])
        hidden = self.weights.forward(ids, positions, metadata, self.kv)
        return self.weights.compute_logits(hidden)
