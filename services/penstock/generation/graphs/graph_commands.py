"""Calls of the model's graphs as plain data from a caller, unchecked. No torch, no proto."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.generation.core.tensors import TensorData
from penstock.generation.options.table import RequestOptions, StopOptions


@dataclass(slots=True)
class InputTensor:
    """An input: data in the model's own format, or a tensor at the server."""

    index: int
    # Empty and none with a handle: the tensor's own.
    dtype: str
    shape: tuple[int, ...]
    data: bytearray
    handle: int = 0


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """A wanted output: written into a tensor, kept as a new one, or returned."""

    index: int
    handle: int = 0
    keep: bool = False


@dataclass(slots=True)
class ForwardCommand:
    """One call of a graph, whole."""

    call_id: int
    graph: str
    model: str = ""
    stage: int | None = None
    lease_id: str = ""
    inputs: list[InputTensor] = field(default_factory=list)
    outputs: list[OutputTarget] = field(default_factory=list)
    sequence: str = ""
    start: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """One output: its bytes, or the handle of the tensor that keeps it."""

    index: int
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    handle: int = 0


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor to make."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements [offset, offset + count) of a tensor; count None: all from `offset` on."""

    handle: int
    offset: int
    count: int | None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: ids before it, and its seed."""

    prompt: list[int]
    output: list[int]
    seed: int | None


@dataclass(frozen=True, slots=True)
class SampleCommand:
    """A Sample: logits in the message, or in a tensor at the server."""

    rows: list[SampleRow]
    options: RequestOptions
    stop: StopOptions
    model: str = ""
    logits: TensorData | None = None
    lease_id: str = ""
    handle: int = 0
    top_logprobs: int | None = None
