"""Ids of rows as the embedding, and a table of tokens' vectors, are asked for them: those of images and sounds are read
as another id (transformers 5.24, `Gemma4Model.forward`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.core.media_ids import MediaIds


class MediaRows:
    """Look-up of what is read for each id of a vocabulary. It is a part of a model, and the same for every step."""

    def __init__(self, media_ids: MediaIds, vocab_size: int, device: torch.device) -> None:
        self._ids, self._read_as = frozenset(media_ids.ids), media_ids.read_as
        # By each id what is read: a look-up costs less than comparisons, and a recorded pass may hold it.
        self._read_V = torch.arange(vocab_size, device=device)
        self._read_V[list(media_ids.ids)] = media_ids.read_as

    def __call__(self, input_ids_T: Tensor) -> Tensor:
        """Return the ids (T) to read, int64."""
        return self._read_V[input_ids_T]

    def listed(self, ids: list[int]) -> list[int]:
        """Return the ids to read, of ids on the host."""
        if self._ids.isdisjoint(ids):
            return ids
        return [self._read_as if one in self._ids else one for one in ids]
