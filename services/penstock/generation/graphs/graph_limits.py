"""Bounds on graphs, tensors at the server and named sequences."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import values_of
from penstock.generation.core.graph_options import GraphOptions
from penstock.generation.graphs.graph import GraphStage


@dataclass(frozen=True, kw_only=True)
class GraphLimits(GraphOptions):
    """All bounds, for one model."""

    # Of shapes: every length with the smallest batch, then with the next one.
    stages: tuple[GraphStage, ...]
    # Time that a refused caller is told to wait.
    retry_seconds: float

    @classmethod
    def of(cls, options: GraphOptions, context: int, retry_seconds: float) -> GraphLimits:
        """Return the limits for a model with sequences of at most `context` tokens. No stage is longer."""
        lengths = sorted({min(length, context) for length in options.graph_lengths})
        batches = sorted(set(options.graph_batches))
        return cls(
            **values_of(GraphOptions, options),
            stages=tuple(GraphStage(batch, length) for batch in batches for length in lengths),
            retry_seconds=retry_seconds,
        )
