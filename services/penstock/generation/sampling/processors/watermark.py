"""The green-list watermark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.core.decoding_mode import WatermarkOptions
from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.green_lists import SELF_HASH, are_green, green_bits
from penstock.generation.sampling.processors.base import LARGEST_SCORE, Processor, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext, RowKernels
    from penstock.generation.sampling.processors.base import RowState

# As in transformers: under selfhash only the most likely tokens are tested for being green.
_SELF_HASHED = 40


class Watermark(Processor):
    """transformers' WatermarkLogitsProcessor: green tokens gain a bias. Runs after the warpers, as in 5.x."""

    stage = Stage.LATE

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        # Each with the length from which its last tokens are a whole context of ids.
        self._rows = [(row, state.sequence, _least(state.sequence)) for row, state in zip(rows, states, strict=True)]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return isinstance(params.watermark, WatermarkOptions)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        self_hashed = []
        for row, sequence, least in self._rows:
            options = sequence.params.watermark
            assert isinstance(options, WatermarkOptions), "the row wants it"
            if len(sequence.token_ids) < least:
                continue
            if options.seeding_scheme == SELF_HASH:
                self_hashed.append((row, options, sequence.token_ids))
            else:
                bits = green_bits(scores_NV.shape[1], options, sequence.token_ids[-1:])
                is_green_V = torch.from_numpy(np.unpackbits(bits, count=scores_NV.shape[1])).to(scores_NV.device)
                scores_NV[row].add_(is_green_V, alpha=_bias(options))
        if self_hashed:
            _favour_self_hashed(scores_NV, self_hashed, context.kernels)


def _favour_self_hashed(
    scores_NV: torch.Tensor, rows: list[tuple[int, WatermarkOptions, list[int]]], kernels: RowKernels
) -> None:
    rows_R = torch.tensor([row for row, _, _ in rows], device=scores_NV.device)
    count = min(_SELF_HASHED, scores_NV.shape[1])
    likely = top_candidates(scores_NV, rows_R, count).ids_RC.tolist()
    for (row, options, token_ids), ids in zip(rows, likely, strict=True):
        context = token_ids[len(token_ids) - options.context_width + 1 :] if options.context_width > 1 else []
        pairs = [([*context, token_id], token_id) for token_id in ids]
        are_green_C = are_green(scores_NV.shape[1], options, pairs, kernels.in_head)
        green = [token_id for token_id, is_one in zip(ids, are_green_C, strict=True) if is_one]
        if green:
            scores_NV[row, green] += _bias(options)


def _least(sequence: Sequence) -> int:
    options = sequence.params.watermark
    assert isinstance(options, WatermarkOptions), "the row wants it"
    return sequence.num_placeholders + options.context_width


def _bias(options: WatermarkOptions) -> float:
    return min(max(options.bias, -LARGEST_SCORE), LARGEST_SCORE)
