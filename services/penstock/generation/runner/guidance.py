"""Classifier-free guidance: the logits of guided rows, moved away from their unconditional branches'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence


def guide_rows(logits_NV: torch.Tensor, sequences: Seq[Sequence], guided: list[int]) -> None:
    """Replace the logits of the `guided` rows, whose sequences have guides, in place; the guides' own stay as they are.

    scale * (log p - log p_unconditional) + log p_unconditional, as transformers'
    UnbatchedClassifierFreeGuidanceLogitsProcessor. Every guide must be among `sequences`, with a row of its own.
    """
    row_of = {sequence.seq_id: row for row, sequence in enumerate(sequences)}
    guides, scales = [], []
    for row in guided:
        guide, options = sequences[row].guide, sequences[row].params.guidance
        assert guide is not None, "a guided row has a guide"
        guides.append(row_of[guide.seq_id])
        scales.append(options.scale)
    scale_R1 = torch.tensor(scales, dtype=torch.float32, device=logits_NV.device)[:, None]
    guided_RV = logits_NV[guided].log_softmax(-1)
    free_RV = logits_NV[guides].log_softmax(-1)
    # What DoLa has taken away stays away, whatever the scale.
    is_out_RV = guided_RV == -torch.inf
    logits_NV[guided] = guided_RV.sub_(free_RV).mul_(scale_R1).add_(free_RV).masked_fill_(is_out_RV, -torch.inf)
