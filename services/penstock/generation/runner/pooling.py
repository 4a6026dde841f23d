"""Mean pooling: sums of final hidden states, gathered over the chunks in which an input is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from penstock.generation.core.step import ScheduledSequence


class MeanPooling:
    """An fp64 sum per input that is being computed. A preempted input is released and begins again from row 0."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, entry: ScheduledSequence, hidden_PI: torch.Tensor) -> bytes | None:
        """Add the entry's rows (P, hidden), final hidden states.

        Return the mean once the input is complete, as (hidden) fp32, little-endian; None before.
        """
        sequence, end = entry.sequence, entry.start + entry.num_tokens
        sum_I = hidden_PI.sum(0, dtype=torch.float64)
        earlier_I = self._sums.pop(sequence.seq_id, None)
        if earlier_I is not None:
            sum_I += earlier_I
        if end < sequence.num_tokens:
            self._sums[sequence.seq_id] = sum_I
            return None
        return (sum_I / end).cpu().numpy().astype(np.dtype("<f4")).tobytes()

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget inputs; ids that were never pooled are fine."""
        if self._sums:
            for seq_id in seq_ids:
                self._sums.pop(seq_id, None)
