"""Tensors that travel with an output token. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorData:
    """One tensor as bytes: row-major, little-endian. `dtype` is torch's name without its prefix (float32, int64)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Tensors of one output position; None: not asked for."""

    # (V), or (k) with top_k: processed scores, as transformers' output_scores; (k): their ids.
    scores: TensorData | None = None
    score_ids: TensorData | None = None
    # (V), or (k) with top_k: the model's own logits; (k): their ids.
    logits: TensorData | None = None
    logit_ids: TensorData | None = None
    # (layers + 1, hidden): the row that the token was drawn from, as transformers' hidden_states.
    hidden_states: TensorData | None = None
    # (layers, heads, context).
    attentions: TensorData | None = None
    # Beam modes: the beam that the token was drawn from, as transformers' beam_indices.
    beam_index: int | None = None
