"""Limits on the cost of a constraint, and the service's options for them. Light: the configuration imports this."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option

CONSTRAINTS = "Structured output"


@dataclass(frozen=True, kw_only=True)
class JsonBounds:
    """Bounds where a schema has none; 0: no bound. A schema's own keyword wins. Each is declared here alone."""

    max_json_digits: int = option(
        19,
        "Most digits of an integer, unless its JSON schema has a bound; 0: no bound. Numbers with a decimal point have "
        "at most 15 digits, and 9 after the point.",
        group=CONSTRAINTS,
        minimum=0,
        maximum=19,
    )
    max_json_keys: int = option(
        64,
        "Most keys of an object besides those in its JSON schema; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
    )
    max_json_key_characters: int = option(
        128,
        "Characters of a key that its JSON schema does not name, after which it ends; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
    )
    max_json_depth: int = option(
        8,
        "Deepest nesting where a JSON schema allows any value, and of a definition within itself; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
        maximum=32,
    )
    max_json_items: int = option(
        0,
        "Most items of an array without maxItems in its JSON schema; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
    )
    max_json_characters: int = option(
        0,
        "Most characters of a string without maxLength in its JSON schema; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """Limits that a server's owner may change. Each is declared here alone, as `EngineOptions`."""

    max_constraint_bytes: int = option(256 << 10, "Longest source of a constraint.", group=CONSTRAINTS, minimum=1)
    max_constraint_choices: int = option(4096, "Most values of a choice.", group=CONSTRAINTS, minimum=1)
    constraint_compile_seconds: float = option(
        5.0, "Most time of a core that compiling a constraint may take.", group=CONSTRAINTS, minimum=0.01
    )
    constraint_compile_memory_bytes: int = option(
        1 << 30,
        "Memory that one compilation may take.",
        group=CONSTRAINTS,
        minimum=1 << 20,
    )
    constraint_processes: int = option(
        2,
        "Processes that try constraints; the first starts with the first constraint.",
        group=CONSTRAINTS,
        minimum=1,
    )
    max_queued_constraints: int = option(
        64, "Constraints waiting for a process; more are refused.", group=CONSTRAINTS, minimum=1
    )
    constraint_cache: int = option(128, "Compiled constraints to keep.", group=CONSTRAINTS, minimum=1)
    close_constraints: bool = option(
        True,
        "End a constrained output, or a tool call, in time before its limit of tokens, with finish reason LENGTH, so "
        "that it is whole; otherwise the limit cuts it in its middle.",
        group=CONSTRAINTS,
    )
    mask_threads: int = option(2, "Threads that compute token masks beside the model.", group=CONSTRAINTS, minimum=1)


@dataclass(frozen=True, kw_only=True)
class GrammarLimits(GrammarOptions):
    """All limits on constraints."""

    # Most time that a process takes to start: it reads the tokenizer and imports a few libraries.
    start_seconds: float = 60.0
    # Most time of one mask: a slower one would delay the step of all requests.
    mask_seconds: float = 0.25
    # Bounds where JSON schemas have none.
    json: JsonBounds = JsonBounds()
