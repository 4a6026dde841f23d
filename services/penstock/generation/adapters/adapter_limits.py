"""Bounds on adapters."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option
from penstock.generation.adapters.adapter_files import MOST_CONFIG_BYTES

ADAPTERS = "Adapters"


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Bounds that a server's owner may change. Each is declared here alone, as `EngineOptions`."""

    max_adapters: int = option(
        8,
        "LoRA adapters in memory at once; the least recently used one that no request uses makes room for another. 0: "
        "none may be loaded.",
        group=ADAPTERS,
        minimum=0,
    )
    max_known_adapters: int = option(256, "Names of LoRA adapters, in memory or not.", group=ADAPTERS, minimum=0)
    max_adapter_rank: int = option(64, "Largest rank of a LoRA adapter.", group=ADAPTERS, minimum=1)
    max_adapter_patterns: int = option(
        4096, "Entries of an adapter's rank_pattern, and of its alpha_pattern.", group=ADAPTERS, minimum=1
    )
    adapter_pattern_seconds: float = option(
        2.0,
        "Processor time to match those of an adapter's patterns that are not module names; a process of its own "
        "matches them and is ended after this.",
        group=ADAPTERS,
        minimum=0.1,
    )
    max_adapter_checks: int = option(
        4,
        "Folders of LoadAdapter that are checked at the same time; they are then read one after the other.",
        group=ADAPTERS,
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class AdapterLimits(AdapterOptions):
    """All bounds on adapters."""

    # Bytes of all adapters in memory together.
    max_bytes: int = 1 << 30
    # Bytes of adapter_config.json, and characters of a name.
    max_config_bytes: int = MOST_CONFIG_BYTES
    max_name_chars: int = 256
    # Characters of an entry of rank_pattern or alpha_pattern.
    max_pattern_chars: int = 256
