"""Rows of prompts that came as embeddings, put in the place of those that the model looks up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.step import ScheduledSequence
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.runner.input_batch import ModelInputs


def embed_step(model: CausalLM, scheduled: Seq[ScheduledSequence], inputs: ModelInputs) -> torch.Tensor:
    """Return the residual stream before the first layer (T, hidden) of a step of these entries.

    Ids in `inputs` that embeddings replace become 0: placeholders are outside every vocabulary.
    """
    hidden = model.config.hidden_size
    spans: list[tuple[slice, torch.Tensor]] = []
    for entry, first in zip(scheduled, inputs.row_starts, strict=False):
        embeds = entry.sequence.embeds
        if embeds is None or entry.start >= embeds.num_tokens:
            continue
        count = min(entry.start + entry.num_tokens, embeds.num_tokens) - entry.start
        offset = entry.start * hidden * model.dtype.itemsize
        rows = torch.frombuffer(embeds.data, dtype=model.dtype, count=count * hidden, offset=offset)
        spans.append((slice(first, first + count), rows.view(count, hidden)))
    for rows_of_entry, _ in spans:
        inputs.input_ids_T[rows_of_entry] = 0
    hidden_TI = model.embed(inputs.input_ids_T)
    for rows_of_entry, rows_PI in spans:
        hidden_TI[rows_of_entry] = rows_PI
    return hidden_TI
