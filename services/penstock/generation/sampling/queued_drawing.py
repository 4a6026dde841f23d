"""The draws of one step on a device with queued work: all of them wait for the device once, at the end."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from penstock.generation.attention.to_device import uploaded
from penstock.generation.sampling.drawing import Drawing, not_numbers

if TYPE_CHECKING:
    from penstock.generation.core.step import SampledToken
    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.draw_context import DrawContext


class QueuedDrawing(Drawing):
    """A Drawing that reads ids and checks back together, along with any requested log-probabilities.

    Only then does it see the rows with insufficient candidates; they cost a second read.
    """

    # 256 MiB of fp32: few calls matter more than a cache.
    scores_at_a_time = 1 << 26

    def __init__(self, batch: SamplingBatch, scores_NV: torch.Tensor, context: DrawContext) -> None:
        super().__init__(batch, scores_NV, context)
        # Bools on the device: all must be True.
        self._checks: list[torch.Tensor] = []
        # Sampled rows, and for each True if its candidates are sufficient.
        self._unsure: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._uniforms_M: torch.Tensor | None = None

    @override
    def greedy(self) -> None:
        """A NaN is found by `tokens`."""
        self.token_ids_N = self._scores_NV.argmax(-1)
        rows_R = self._batch.greedy_index_R
        highest_R1 = self._scores_NV[rows_R].gather(1, self.token_ids_N[rows_R][:, None])
        self._checks.append(highest_R1.isfinite())
        self._greedy_logprobs()

    @override
    def sampled(self, uniforms_M: torch.Tensor) -> None:
        """A NaN is found by `tokens`."""
        self._uniforms_M = uniforms_M
        super().sampled(uniforms_M)

    @override
    def tokens(self) -> list[SampledToken]:
        """Raises FloatingPointError as `greedy` and `sampled` of Drawing do."""
        token_ids, rest = self._read()
        if rest:
            assert self._uniforms_M is not None
            for picked_R in rest:
                for few_R in self._few(picked_R):
                    self._through_vocabulary(few_R, self._uniforms_M, is_warped=False)
            token_ids, _ = self._read()
        return self._tokens(token_ids)

    def _read(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return the ids, and the sampled rows to draw from the whole vocabulary."""
        flags = [check.flatten() for check in chain(self._checks, (is_exact_R for _, is_exact_R in self._unsure))]
        numbers = torch.cat([self.token_ids_N, *(flag.to(torch.int64) for flag in flags)]).tolist()
        count = len(self.token_ids_N)
        num_checks = sum(check.numel() for check in self._checks)
        if not all(numbers[count : count + num_checks]):
            raise not_numbers()
        rest, first = [], count + num_checks
        for picked_R, is_exact_R in self._unsure:
            found = numbers[first : first + len(is_exact_R)]
            first += len(is_exact_R)
            if not all(found):
                places = [place for place, is_exact in enumerate(found) if not is_exact]
                rest.append(picked_R[uploaded(np.array(places, dtype=np.int64), picked_R.device)])
        self._checks, self._unsure = [], []
        return numbers[:count], rest

    def _inexact(self, picked_R: torch.Tensor, is_exact_R: torch.Tensor) -> torch.Tensor:
        self._unsure.append((picked_R, is_exact_R))
        return picked_R[:0]

    def _check(self, is_number_R1: torch.Tensor) -> None:
        self._checks.append(is_number_R1)
