"""Upload of the host's numbers to the device of a step's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def uploaded(values: npt.NDArray[np.generic[Any]], device: torch.device) -> Tensor:
    """Return the numbers on `device`: on the CPU in the same memory, elsewhere a copy that waits for no queued work.

    Such a copy needs pinned memory, which torch keeps until the copy is done: from other memory it first waits for all
    work of its stream.
    """
    found = torch.from_numpy(values)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
