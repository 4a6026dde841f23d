"""Facts and figures of the store of adapters. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Facts of one known adapter."""

    name: str
    path: Path
    # Largest rank of a module.
    rank: int
    targets: tuple[str, ...]
    # Bytes that it takes, or took, in memory.
    num_bytes: int
    # False: it was idle and was evicted for another; the next request with its name reads it again.
    is_loaded: bool
    # Accepted requests with it that have not ended.
    num_requests: int
    # Generation of its last reading.
    generation: str
    # Number that orders adapters by their last use.
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """Figures of the store for metrics."""

    known: int = 0
    loaded: int = 0
    # Bytes in memory, including unloaded adapters that live requests still use.
    num_bytes: int = 0
    loads: int = 0
    evictions: int = 0
