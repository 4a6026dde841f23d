"""Captured graphs of an Ascend NPU: torch-npu's NPUGraph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.devices.graph_capture import CapturedGraph, GraphCapture, warm_up


class NPUGraphs(GraphCapture):
    """Graphs of the current NPU, which share one pool of memory.

    Attention takes the lengths of contexts from the host, and a graph would keep those of its capture. With
    `auto_dispatch_capture`, torch-npu notes the attention of each layer, and `update` gives all of them new lengths
    (npu/graphs.py of torch-npu 2.13). It calls each operator on the host again, before the device has any work. The
    operator's tasks and events belong to the graph, so the last replay must be over.
    """

    needs_lengths = True
    needs_slots = True

    def __init__(self) -> None:
        self._npu: Any = torch.npu  # type: ignore[attr-defined]
        self._pool = self._npu.graph_pool_handle()

    @override
    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        npu = self._npu
        warm_up(npu, call)
        graph = npu.NPUGraph()
        # Other threads of the process may use the device meanwhile.
        with npu.graph(graph, pool=self._pool, auto_dispatch_capture=True, capture_error_mode="thread_local"):
            outputs = call()
        done = npu.Event()

        def replay(lengths: list[int] | None) -> None:
            # Nothing is waited for where the ids of the last step were read.
            done.synchronize()
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
            graph.replay()
            done.record()

        return CapturedGraph(replay, outputs)
