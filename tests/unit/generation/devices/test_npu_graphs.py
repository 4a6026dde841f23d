"""Graphs of an NPU, over a pretended torch.npu: warm runs, the capture, and lengths that come before each replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from penstock.generation.devices.npu_graphs import NPUGraphs


class _Stream:
    def wait_stream(self, _other: Any) -> None:
        """Wait."""


class _Runtime:
    """Part of torch.npu that NPUGraphs uses, as torch-npu 2.13 has it; `said` is what happened."""

    Stream = _Stream

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.is_captured = False

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self) -> _Stream:
        return _Stream()

    @contextmanager
    def stream(self, _stream: _Stream) -> Iterator[None]:
        yield

    def NPUGraph(self) -> Any:
        runtime = self

        class Graph:
            def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
                runtime.said.append(cpu_update_input)

            def replay(self) -> None:
                runtime.said.append("replay")

        return Graph()

    def Event(self) -> Any:
        runtime = self

        class Event:
            def synchronize(self) -> None:
                runtime.said.append("waited")

            def record(self) -> None:
                runtime.said.append("recorded")

        return Event()

    @contextmanager
    def graph(self, npu_graph: Any, pool: Any, auto_dispatch_capture: bool, capture_error_mode: str) -> Iterator[None]:
        assert (pool, auto_dispatch_capture, capture_error_mode) == ("pool", True, "thread_local")
        self.is_captured = True
        yield
        self.is_captured = False


def test_a_replay_is_given_its_lengths_first(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch, "npu", runtime, raising=False)
    runs: list[bool] = []

    def call() -> tuple[torch.Tensor, ...]:
        runs.append(runtime.is_captured)
        return (torch.full((1,), len(runs)),)

    graph = NPUGraphs().capture(call)
    # The operators are known before the one that is kept.
    assert runs == [False, False, True]
    assert graph.outputs[0] == 3
    graph.replay([5, 1])
    graph.replay([6, 9])
    steps = [
        # The tasks of a replay that still runs must not be changed.
        ["waited", [{"actual_seq_lengths_kv": lengths}], "replay", "recorded"]
        for lengths in ([5, 1], [6, 9])
    ]
    assert runtime.said == [*steps[0], *steps[1]]
