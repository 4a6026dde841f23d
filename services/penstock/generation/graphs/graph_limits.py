"""Bounds on graphs, tensors at the server and named sequences, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.graphs.graph import GraphStage

if TYPE_CHECKING:
    from penstock.generation.config import GenerationServiceConfig


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The bounds. All of them are for the whole process, over all callers."""

    # Of shapes: every length with the smallest batch, then with the next one.
    stages: tuple[GraphStage, ...]
    # Of the inputs, and of the outputs, of one call.
    max_call_bytes: int
    # Forward streams that are open.
    max_streams: int
    # Tensors at the server, and bytes of all of them; 0: there are none.
    max_tensors: int
    max_tensor_bytes: int
    max_leases: int
    lease_seconds: float
    # Share of the engine's time that graphs get while there are requests.
    share: float
    retry_seconds: float

    @classmethod
    def of(cls, config: GenerationServiceConfig, context: int, retry_seconds: float) -> GraphLimits:
        """Return the limits for a model with sequences of at most `context` tokens. No stage is longer."""
        lengths = sorted({min(length, context) for length in config.graph_lengths})
        return cls(
            stages=tuple(
                GraphStage(batch, length) for batch in sorted(set(config.graph_batches)) for length in lengths
            ),
            max_call_bytes=config.max_graph_call_bytes,
            max_streams=config.max_graph_streams,
            max_tensors=config.max_graph_tensors,
            max_tensor_bytes=config.max_graph_tensor_bytes,
            max_leases=config.max_graph_leases,
            lease_seconds=config.graph_lease_seconds,
            share=config.graph_share,
            retry_seconds=retry_seconds,
        )
