"""A LoRA adapter as requests and the scheduler know it. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One reading of an adapter's files. Immutable: a reload makes another one, which shares no cached block."""

    name: str
    path: Path
    # Unique, also among processes: part of the hash of every block that it computes.
    generation: str
    # Largest rank of a module.
    rank: int
    # Modules that it changes, by their names in adapter_config.json, such as q_proj: sorted.
    targets: tuple[str, ...]
    num_bytes: int
    # Its matrices as the model takes them (layers.lora.AdapterWeights).
    weights: object = field(repr=False)
    # SHA-256 of its files: equal in two processes iff the name stands for the same there.
    digest: str = ""
    # Version of the model's weights that its matrices fit: a model with other weights reads its files again.
    depends_on_weights: bool = False
