"""Limits on the cost of a constraint. Imports nothing: the configuration names these defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JsonBounds:
    """Bounds where a schema has none; 0: no bound. A schema's own keyword wins."""

    # Digits of an integer, of 64 bits. Numbers that may have a point: at most 15 before it, and nine after it.
    digits: int = 19
    # Keys of an object besides those that its schema names.
    keys: int = 64
    # Nesting of values where anything is allowed, and of a definition within itself, or of definitions that refer to
    # each other.
    depth: int = 8
    # Items of an array, and characters of a text.
    items: int = 0
    characters: int = 0


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on constraints, from the service's configuration."""

    # UTF-8 bytes of a constraint's source.
    max_bytes: int = 256 << 10
    max_choices: int = 4096
    # Most time of one compilation, the first masks included.
    compile_seconds: float = 5.0
    # Most address space that one compilation may add to its process.
    compile_memory_bytes: int = 1 << 30
    # Most compilations at a time.
    compile_processes: int = 2
    # Most constraints that wait for a process; more are refused.
    max_queued: int = 64
    # Most compiled grammars to keep.
    cache_entries: int = 128
    # Threads that compute masks beside the forward pass.
    mask_threads: int = 2
    # Most time that a process takes to start: it reads the tokenizer and imports a few libraries.
    start_seconds: float = 60.0
    # Most time of one mask: a slower one would delay the step of all requests.
    mask_seconds: float = 0.25
    # Bounds where JSON schemas have none.
    json: JsonBounds = JsonBounds()
