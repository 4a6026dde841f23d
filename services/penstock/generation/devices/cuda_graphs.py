"""Captured graphs of a GPU: torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.generation.devices.graph_capture import CapturedGraph, GraphCapture

# Runs before a capture: libraries choose kernels and take memory in the first ones.
_WARM_UPS = 2


class CUDAGraphs(GraphCapture):
    """CUDA graphs of the current GPU, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        """See GraphCapture."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = call()
        return CapturedGraph(lambda _: graph.replay(), outputs)
