"""Classifier-free guidance: logits of guided rows, moved away from those of their unconditional branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence


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
    # Tokens that DoLa excluded stay excluded, whatever the scale.
    is_out_RV = guided_RV == -torch.inf
    logits_NV[guided] = guided_RV.sub_(free_RV).mul_(scale_R1).add_(free_RV).masked_fill_(is_out_RV, -torch.inf)
