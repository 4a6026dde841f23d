"""Bounds on adapters. Imports nothing: the configuration names these defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterLimits:
    """Bounds on adapters, from the service's configuration."""

    # Adapters in memory at once; 0: none may be loaded.
    max_loaded: int = 8
    # Names that are known, in memory or not.
    max_known: int = 256
    max_rank: int = 64
    # Bytes of all adapters in memory together.
    max_bytes: int = 1 << 30
    # Bytes of adapter_config.json, and characters of a name.
    max_config_bytes: int = 1 << 20
    max_name_chars: int = 256
    # Entries of rank_pattern, and of alpha_pattern; characters of one.
    max_patterns: int = 4096
    max_pattern_chars: int = 256
    # Processor time that an adapter's regular expressions may take.
    pattern_seconds: float = 2.0
    # Loads that go on at the same time; the others wait for their turn.
    max_loads: int = 4
