"""Captured graphs: the work that a call queues on a device, kept there and started again as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work of one call. `replay` queues all of it; it reads the tensors that the call read, where they are, and leaves
    its results in `outputs`."""

    replay: Callable[[], object]
    outputs: tuple[Tensor, ...]


class GraphCapture(ABC):
    """A device's way to capture graphs. They share the memory of what a call computes on its way: one runs at a
    time."""

    @abstractmethod
    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        """Run the call a few times and keep the work of one.

        It must not depend on numbers of the host that change, wait for the device, or copy from the host. What it reads
        must stay where it is for as long as the graph is used.
        """
