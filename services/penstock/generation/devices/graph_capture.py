"""Captured graphs: the work that a call queues on a device, kept there and replayed as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work of one call. `replay` queues all of it; it reads the tensors that the call read, where they are, and leaves
    its results in `outputs`. It takes the number of keys of every row where GraphCapture.needs_lengths, else None."""

    replay: Callable[[list[int] | None], object]
    outputs: tuple[Tensor, ...]


class GraphCapture(ABC):
    """A device's way to capture graphs. They share the memory of intermediate results: one runs at a time."""

    # True: attention takes the lengths of contexts from the host, the only numbers there that may change.
    needs_lengths = False
    # True: no two rows of a call may write to one slot of the pool.
    needs_slots = False

    @abstractmethod
    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        """Run the call a few times and keep the work of one.

        It must not depend on changing numbers of the host (see `needs_lengths`), wait for the device, or copy from the
        host. The tensors that it reads must stay in place as long as the graph is used.
        """


def warm_up(runtime: Any, call: Callable[[], object]) -> None:
    """Run a call on a stream of its own, as captures are: libraries choose kernels and take memory in the first runs.

    `runtime`: torch.cuda, or torch.npu, which has the same functions.
    """
    stream = runtime.Stream()
    stream.wait_stream(runtime.current_stream())
    with runtime.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    runtime.current_stream().wait_stream(stream)
