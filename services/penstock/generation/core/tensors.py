"""Tensors that travel with an output token. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorData:
    """Row-major, little-endian; `dtype` is torch's name without its prefix (float32, int64)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Of one output position; None: not asked for."""

    # (V) or, with top_k, (k): processed scores as transformers' output_scores has them, and their ids (k).
    scores: TensorData | None = None
    score_ids: TensorData | None = None
    # (V) or (k): the model's own logits.
    logits: TensorData | None = None
    logit_ids: TensorData | None = None
    # (layers + 1, hidden): as transformers' hidden_states, of the row that the token was drawn from.
    hidden_states: TensorData | None = None
    # (layers, heads, context).
    attentions: TensorData | None = None
