"""Captured graphs of a GPU: torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.devices.graph_capture import CapturedGraph, GraphCapture, warm_up


class CUDAGraphs(GraphCapture):
    """CUDA graphs of the current GPU, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @override
    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        warm_up(torch.cuda, call)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = call()
        return CapturedGraph(lambda _: graph.replay(), outputs)
