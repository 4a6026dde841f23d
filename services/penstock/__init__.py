"""Penstock: Hugging Face's generate(), continuously batched over one paged KV pool, behind gRPC services.

`penstock.Generator` is the engine in the caller's own process, without a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from penstock.generator.generator import Generator
    from penstock.generator.ordered_batch import BatchFailed

__version__ = "0.1.0"
__all__ = ["BatchFailed", "Generator", "__version__"]

# Imported when they are asked for: every process imports this package, and most need none of them.
_HOMES = {"BatchFailed": "ordered_batch", "Generator": "generator"}
_MOVED = ("LoraStatus", "ModelInput", "SamplingMetadata")


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        # No error can tell the place: hasattr() lets an ImportError through, and `from penstock import ...` loses the
        # words of an AttributeError.
        warn(f"{name} is in penstock.compat.mindie", DeprecationWarning, stacklevel=2)
        return getattr(import_module("penstock.compat.mindie"), name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"penstock.generator.{_HOMES[name]}"), name)
