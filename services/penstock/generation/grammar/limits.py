"""What a constraint may cost. Imports nothing: the configuration names these defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds on constraints, from the service's configuration."""

    # UTF-8 bytes of a constraint's source.
    max_bytes: int = 256 << 10
    max_choices: int = 4096
    # Of one compilation, the first masks included.
    compile_seconds: float = 5.0
    # Address space that one compilation may add to its process.
    compile_memory_bytes: int = 1 << 30
    # Compilations at a time.
    compile_processes: int = 2
    # Constraints waiting for a process; more are refused.
    max_queued: int = 64
    # Compiled grammars that are kept.
    cache_entries: int = 128
    # Threads that compute masks beside the forward pass.
    mask_threads: int = 2
    # A first process reads the tokenizer and imports a few libraries.
    start_seconds: float = 60.0
    # A mask that takes longer would hold up everybody's step.
    mask_seconds: float = 0.25
