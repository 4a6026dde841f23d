"""Outputs of rows other than drawn tokens: mean pooling of an input, log-probabilities of a prompt, guided logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence
    from penstock.generation.layers.lora import AdapterBatch
    from penstock.generation.models.language_model import LanguageModel
    from penstock.generation.sampling.sampling_kernels import SamplingKernels


class MeanPooling:
    """An fp64 sum per input in progress. A preempted input is released and begins again from row 0."""

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


class PromptScorer:
    """Scorer of prompt rows. It computes logits only for the needed rows, a bounded number of them at a time."""

    def __init__(self, model: LanguageModel, max_rows: int, kernels: SamplingKernels) -> None:
        """`max_rows`: most rows of logits at once; each takes vocabulary x 4 bytes, thrice."""
        self._model = model
        self._max_rows = max_rows
        self._kernels = kernels

    def score(
        self, entry: ScheduledSequence, hidden_PI: torch.Tensor, head: AdapterBatch | None = None
    ) -> tuple[PositionLogprobs, ...]:
        """Return logprobs of the tokens that the entry's rows predict, from Sequence.first_logprob_row on; maybe none.

        `hidden_PI` are the entry's rows, `head` their adapters where these change the head. Row i predicts token i + 1,
        of the prompt only.
        """
        sequence = entry.sequence
        first, end = max(entry.start, sequence.first_logprob_row or 0), entry.start + entry.num_tokens
        targets = sequence.token_ids[first + 1 : min(end + 1, sequence.num_prompt_tokens)]
        if sequence.next_token_id is not None and end == sequence.num_prompt_tokens:
            targets.append(sequence.next_token_id)
        num_top = sequence.params.prompt_logprobs or 0
        rows_PI = hidden_PI[first - entry.start :]
        entries: list[PositionLogprobs] = []
        for begin in range(0, len(targets), self._max_rows):
            some = targets[begin : begin + self._max_rows]
            chosen = torch.tensor(some, dtype=torch.int64, device=self._model.device)
            place = first - entry.start + begin
            adapters = None if head is None else head.select(range(place, place + len(some)))
            logits = self._model.compute_logits(rows_PI[begin : begin + len(some)], adapters)
            entries += self._kernels.position_logprobs(logits, chosen, [num_top] * len(some))
        return tuple(entries)


def apply_guidance(logits_NV: torch.Tensor, sequences: Seq[Sequence], guided: list[int]) -> None:
    """Replace the logits of the `guided` rows in place. Rows of the unconditional branches stay as they are.

    The result is scale * (log p - log p_unconditional) + log p_unconditional, as transformers'
    UnbatchedClassifierFreeGuidanceLogitsProcessor. Every branch must be among `sequences`, with a row of its own.
    """
    row_of = {sequence.seq_id: row for row, sequence in enumerate(sequences)}
    branch_rows, scales = [], []
    for row in guided:
        branch, options = sequences[row].unconditional, sequences[row].params.guidance
        assert branch is not None, "a guided row has an unconditional branch"
        branch_rows.append(row_of[branch.seq_id])
        scales.append(options.scale)
    scale_R1 = torch.tensor(scales, dtype=torch.float32, device=logits_NV.device)[:, None]
    guided_RV = logits_NV[guided].log_softmax(-1)
    free_RV = logits_NV[branch_rows].log_softmax(-1)
    # Tokens that DoLa excluded stay excluded for any scale.
    is_out_RV = guided_RV == -torch.inf
    logits_NV[guided] = guided_RV.sub_(free_RV).mul_(scale_R1).add_(free_RV).masked_fill_(is_out_RV, -torch.inf)
