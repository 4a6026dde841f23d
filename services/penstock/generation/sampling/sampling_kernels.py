"""A seam for work on whole rows of scores: torch's operators, or native ones where these save enough of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from penstock.generation.sampling.drawing import Drawing
from penstock.generation.sampling.native_drawing import Kept, NativeDrawing, native_logprobs
from penstock.generation.sampling.ops.green_lists import in_head
from penstock.generation.sampling.ops.gumbel import Ranked, top_noisy
from penstock.generation.sampling.ops.logprobs import position_logprobs
from penstock.generation.sampling.queued_drawing import QueuedDrawing

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.draw_context import DrawContext


class SamplingKernels:
    """The reference, in torch's operators, on any device. Stateless."""

    name = "torch"

    def drawing(self, batch: SamplingBatch, scores_NV: torch.Tensor, context: DrawContext) -> Drawing:
        """Return the object that makes the draws of one step from its scores."""
        return Drawing(batch, scores_NV, context)

    def log_totals(self, scores_NV: torch.Tensor, rows: list[int]) -> list[float]:
        """Return log(sum(exp(scores))) of rows that have a finite score.

        It comes from log_softmax, since a plain sum over one row is split by the number of threads.
        """
        return [float(scores_NV[row].amax() - scores_NV[row].log_softmax(-1).amax()) for row in rows]

    def position_logprobs(
        self, scores_RV: torch.Tensor, chosen_R: torch.Tensor, num_top: Seq[int]
    ) -> list[PositionLogprobs]:
        return position_logprobs(scores_RV, chosen_R, num_top)

    def in_head(self, vocab_size: int, count: int, seeds: Seq[int], ids: Seq[int]) -> list[bool]:
        return in_head(vocab_size, count, seeds, ids)

    def top_noisy(
        self, scores_NV: torch.Tensor, rows: list[int], streams: list[int], counts: list[int]
    ) -> list[Ranked]:
        """Return gumbel.top_noisy of every row in `rows`."""
        return [top_noisy(scores_NV[row], *rest) for row, *rest in zip(rows, streams, counts, strict=True)]


class QueuedSampling(SamplingKernels):
    """The reference for a device with queued work: a step's draws wait for the device once."""

    name = "queued"

    @override
    def drawing(self, batch: SamplingBatch, scores_NV: torch.Tensor, context: DrawContext) -> Drawing:
        return QueuedDrawing(batch, scores_NV, context)


class NativeSampling(SamplingKernels):
    """The C++ kernels, which read a row from memory once, each row on one thread. CPU only; the library must be
    loaded."""

    name = "native"

    @override
    def drawing(self, batch: SamplingBatch, scores_NV: torch.Tensor, context: DrawContext) -> Drawing:
        return NativeDrawing(batch, scores_NV, context)

    @override
    def log_totals(self, scores_NV: torch.Tensor, rows: list[int]) -> list[float]:
        if not rows:
            return []
        found: list[float] = torch.ops.penstock.log_totals(scores_NV, torch.tensor(rows)).tolist()
        return found

    @override
    def position_logprobs(
        self, scores_RV: torch.Tensor, chosen_R: torch.Tensor, num_top: Seq[int]
    ) -> list[PositionLogprobs]:
        rows_R = torch.arange(len(scores_RV))
        return native_logprobs(scores_RV, rows_R, chosen_R, num_top, Kept.all(scores_RV, rows_R))

    @override
    def in_head(self, vocab_size: int, count: int, seeds: Seq[int], ids: Seq[int]) -> list[bool]:
        low_bits = torch.tensor([seed & 0xFFFFFFFF for seed in seeds], dtype=torch.int64)
        answers: list[bool] = torch.ops.penstock.in_permutation_head(
            vocab_size, count, low_bits, torch.tensor(ids, dtype=torch.int64)
        ).tolist()
        return answers

    @override
    def top_noisy(
        self, scores_NV: torch.Tensor, rows: list[int], streams: list[int], counts: list[int]
    ) -> list[Ranked]:
        signed = torch.from_numpy(np.array(streams, dtype=np.uint64).view(np.int64))
        keys_RC, ids_RC = torch.ops.penstock.top_noisy_scores(scores_NV, torch.tensor(rows), signed, max(1, *counts))
        lengths = torch.minimum((ids_RC >= 0).sum(-1), torch.tensor(counts)).tolist()
        return [
            (ids_C[:length], keys_C[:length])
            for ids_C, keys_C, length in zip(ids_RC.numpy(), keys_RC.numpy(), lengths, strict=True)
        ]
