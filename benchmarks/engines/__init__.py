"""Engines under one interface, each in a process of its own. Adapters import their engine only when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSpec:
    """Place of an engine's adapter, and needs of its process."""

    # Module and class, such as engines.penstock:Penstock.
    adapter: str
    # Folder below the cache whose bin/python runs it; empty: this interpreter.
    venv: str = ""
    # Its waiting OpenMP threads sleep, as Penstock's service has it; else as the engine and its OpenMP choose.
    passive: bool = False
    # A library below the venv that is loaded first, where it is there.
    preload: str = ""
    # Workloads that it does not take unless they are asked of it: a static batch cannot stand for them.
    skips: frozenset[str] = frozenset()


# Folders of the other engines' environments below the cache.
PEERS, VLLM = "peers-venv", "vllm-venv"
ENGINES = {
    "penstock": EngineSpec("benchmarks.engines.penstock:PenstockEngine", passive=True),
    "penstock-grpc": EngineSpec("benchmarks.engines.penstock_grpc:PenstockStack", passive=True),
    "transformers": EngineSpec("benchmarks.engines.transformers:Generate", skips=frozenset({"W5", "W6"})),
    "openvino": EngineSpec("benchmarks.engines.openvino:OpenVino", venv=PEERS),
    "llamacpp": EngineSpec("benchmarks.engines.llamacpp:LlamaCpp", venv=PEERS),
    "vllm": EngineSpec("benchmarks.engines.vllm:Vllm", venv=VLLM, preload="lib/libiomp5.so"),
}


def engine_of(label: str) -> str:
    """Return the engine of ENGINE or ENGINE:FORMAT."""
    return label.partition(":")[0]


def dtype_of(label: str, default: str) -> str:
    """Return the number format of ENGINE:FORMAT, or the default."""
    return label.partition(":")[2] or default
