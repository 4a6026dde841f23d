"""Python client of Penstock's TextService: synchronous and asynchronous, streaming, typed errors, no torch.

>>> from penstock_client import Client
>>> with Client("localhost:50050") as client:
...     for delta in client.stream([{"role": "user", "content": "Hello!"}], max_new_tokens=64):
...         print(delta.text, end="", flush=True)
...     print(client.generate("The capital of France is", max_new_tokens=8).text)
"""

from importlib import import_module
from typing import Any
from warnings import warn

from penstock_client._async import AsyncClient, AsyncStream
from penstock_client._async_jobs import AsyncJobsClient
from penstock_client._batches import BatchAnswer
from penstock_client._exceptions import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from penstock_client._load_model import LoadProgress, UnloadedModel
from penstock_client._options import GenerationOptions, PromptOptions, check_options
from penstock_client._sync import Client, Stream
from penstock_client._sync_jobs import JobsClient
from penstock_client._tensors import StepTensors, Tensor
from penstock_client._types import (
    Choice,
    Completion,
    Delta,
    Embeddings,
    LogprobEntry,
    Score,
    Scores,
    Timings,
    ToolCall,
    Usage,
    WatermarkEvidence,
)
from penstock_client.config import ClientConfig, KeepAliveConfig, RetryConfig, TimeoutConfig, TLSConfig

__all__ = [
    "Aborted",
    "AsyncClient",
    "AsyncJobsClient",
    "AsyncStream",
    "BatchAnswer",
    "Cancelled",
    "Choice",
    "Client",
    "ClientConfig",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "Embeddings",
    "FailedPrecondition",
    "GenerationOptions",
    "Internal",
    "InvalidArgument",
    "JobsClient",
    "KeepAliveConfig",
    "LoadProgress",
    "LogprobEntry",
    "NotFound",
    "PenstockError",
    "PermissionDenied",
    "PromptOptions",
    "ResourceExhausted",
    "RetryConfig",
    "Score",
    "Scores",
    "StepTensors",
    "Stream",
    "TLSConfig",
    "Tensor",
    "TimeoutConfig",
    "Timings",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UnloadedModel",
    "Usage",
    "WatermarkEvidence",
    "check_options",
]

_MOVED = ("BmrtFlag", "Dtype", "EngineLLM", "ServerTensor")


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        # No error can tell the place: hasattr() lets an ImportError through, and `from penstock_client import ...`
        # loses the words of an AttributeError.
        warn(f"{name} is in penstock_client.compat.sail", DeprecationWarning, stacklevel=2)
        return getattr(import_module("penstock_client.compat.sail"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
