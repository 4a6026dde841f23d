"""Tensors of output positions: scores, logits, hidden states and attentions of the rows that tokens come from."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

from penstock.common.dtypes import dtype_name
from penstock.generation.attention.attention_keeper import AttentionKeeper, KeptRow
from penstock.generation.core.decoding_mode import TensorOutputs
from penstock.generation.core.tensors import StepTensors, TensorData
from penstock.generation.models.hidden_keeper import HiddenKeeper

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.attention.base import Attention
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.runner.draw_rows import DrawRows
    from penstock.generation.sampling.sampler import Sampler
    from penstock.generation.sampling.token_masks import TokenMasks

_NOTHING = TensorOutputs()


class StepTensorTaker:
    """Keeper of one step's tensors, from before the forward pass to the draw."""

    def __init__(self, draws: DrawRows, row_starts: Seq[int], attention: Attention, device: torch.device) -> None:
        """`draws.tensors` is not empty; `row_starts` as in ModelInputs; `attention` is the model's own."""
        self._device = device
        # Places among the drawers.
        self._places = draws.tensors
        self._drawers = [draws.sequences[place] for place in self._places]
        self._asked = [drawer.params.tensors or _NOTHING for drawer in self._drawers]
        row_of_drawer = draws.row_of_drawer
        rows = [row_of_drawer[place] for place in self._places]
        self._logit_rows = [draws.rows.index(row) for row in rows]
        self.keeper = self._hidden_keeper(rows)
        self.attention = self._attention_keeper(rows, row_starts, attention)
        self._logits: dict[int, torch.Tensor] = {}
        self._scores: dict[int, torch.Tensor] = {}

    def take_logits(self, logits_RV: torch.Tensor) -> None:
        """Copy the wanted logits of the distinct rows, before any change to them."""
        for item, asked in enumerate(self._asked):
            if asked.logits:
                self._logits[item] = logits_RV[self._logit_rows[item]].clone()

    def take_scores(self, logits_NV: torch.Tensor, sampler: Sampler, masks: TokenMasks | None) -> None:
        """Take the scores that the drawers draw from. `logits_NV` are the sampler's inputs, and stay as they are.

        A row that holds a NaN is left out: its sequence fails.
        """
        items = [item for item, asked in enumerate(self._asked) if asked.scores]
        if not items:
            return
        rows_MV = logits_NV[self._index([self._places[item] for item in items])]
        good = [place for place, bad in enumerate(rows_MV.isnan().any(-1).tolist()) if not bad]
        if not good:
            return
        drawers = [self._drawers[items[place]] for place in good]
        scores_MV = sampler.processed_scores(rows_MV[self._index(good)], drawers, masks)
        self._scores = {items[place]: scores_V for place, scores_V in zip(good, scores_MV, strict=True)}

    def tensors(self) -> list[tuple[Sequence, StepTensors]]:
        """Return the tensors of every sequence that wants them. Call it after the draw."""
        return [(drawer, self._of(item)) for item, drawer in enumerate(self._drawers)]

    def _of(self, item: int) -> StepTensors:
        asked = self._asked[item]
        scores, score_ids = _highest(self._scores.get(item), asked.top_k)
        logits, logit_ids = _highest(self._logits.get(item), asked.top_k)
        hidden = attentions = None
        if asked.hidden_states and self.keeper is not None:
            place = self._hidden_places[item]
            states = self.keeper.states
            hidden = _data(torch.stack([states[layer][place] for layer in sorted(states)]).float())
        if asked.attentions and self.attention is not None:
            attentions = _data(self.attention.weights(self._attention_places[item]))
        return StepTensors(scores, score_ids, logits, logit_ids, hidden, attentions)

    def _hidden_keeper(self, rows: list[int]) -> HiddenKeeper | None:
        items = [item for item, asked in enumerate(self._asked) if asked.hidden_states]
        self._hidden_places = {item: place for place, item in enumerate(items)}
        return HiddenKeeper(self._index([rows[item] for item in items])) if items else None

    def _attention_keeper(self, rows: list[int], row_starts: Seq[int], attention: Attention) -> AttentionKeeper | None:
        items = [item for item, asked in enumerate(self._asked) if asked.attentions]
        self._attention_places = {item: place for place, item in enumerate(items)}
        # A drawer's tokens end with the token of its row.
        wanted = [
            KeptRow(rows[item], bisect_right(row_starts, rows[item]) - 1, self._drawers[item].num_tokens)
            for item in items
        ]
        return AttentionKeeper(attention, wanted) if items else None

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _highest(values_V: torch.Tensor | None, top_k: int) -> tuple[TensorData | None, TensorData | None]:
    """Return all values, or the `top_k` highest with their ids."""
    if values_V is None:
        return None, None
    if not top_k:
        return _data(values_V), None
    top = values_V.topk(min(top_k, len(values_V)))
    return _data(top.values), _data(top.indices)


def _data(values: torch.Tensor) -> TensorData:
    """Convert a tensor of fp32 or int64."""
    dtype = dtype_name(values.dtype)
    return TensorData(dtype, tuple(values.shape), values.cpu().contiguous().numpy().tobytes())
