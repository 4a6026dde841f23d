"""Extras of penstock that bring a module that is not there, for the error about it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from penstock.common.errors import StartupError

# Modules by the extra that brings them.
MODULES = {
    "generation": ("torch", "numpy", "safetensors", "huggingface_hub", "llguidance"),
    "tokenizer": ("transformers", "tokenizers", "jinja2"),
    "gateway": ("starlette", "uvicorn", "httptools"),
    "service": ("grpc_reflection", "prometheus_client", "aiohappyeyeballs"),
    "tracing": ("opentelemetry",),
    "plot": ("matplotlib",),
    "redis": ("redis",),
}
_EXTRAS = {module: extra for extra, modules in MODULES.items() for module in modules}
# Extras that bring all that a command imports, whichever module it misses first.
COMMANDS = {
    "serve": "all",
    "demo": "all",
    "infer": "all",
    "inspect": "all",
    "pack": "generation",
    "quantize": "fallback",
    "doctor": "generation",
    "build-kernels": "generation",
}
# Of the whole stack: without them a process of it would end at its start.
_STACK = ("prometheus_client", "grpc_reflection", "torch", "tokenizers", "transformers")
_ROLES = ("tokenizer", "generation", "router", "gateway")


def missing_package(error: ModuleNotFoundError, words: Sequence[str]) -> StartupError | None:
    """Return the error for the user of the command line `words`; None if the module is penstock's own."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "penstock", "penstock_client"):
        return None
    command = next((word for word in words if not word.startswith("-")), "")
    extra = _EXTRAS.get(module) and COMMANDS.get(command, _EXTRAS[module])
    role = words[1] if command == "serve" and len(words) > 1 else ""
    if extra and role in _ROLES:
        extra = role
    how = f"pip install 'penstock[{extra}]'" if extra else "it is not installed"
    return StartupError(f"penstock {command} needs the package {module}: {how}".replace("  ", " "), flag=None)


def require_stack() -> None:
    """Check that the packages of the whole stack are installed, without importing them. Raises StartupError."""
    missing = next((module for module in _STACK if find_spec(module) is None), None)
    if missing is not None:
        raise StartupError(f"the package {missing} is not installed: pip install 'penstock[{COMMANDS['serve']}]'")
