"""The green-list watermark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.candidates import top_candidates
from penstock.generation.sampling.green_lists import SELF_HASH, green_bits, is_green
from penstock.generation.sampling.processors.base import LARGEST_SCORE, LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.sampling.modes import WatermarkOptions
    from penstock.generation.sampling.params import SamplingParams
    from penstock.generation.sampling.state import SamplingState

# Of transformers: selfhash only asks for the most likely tokens whether they are green.
_SELF_HASHED = 40


class Watermark(LogitsProcessor):
    """transformers' WatermarkLogitsProcessor: green tokens gain a bias. Runs after the warpers, as in 5.x."""

    def __init__(self, rows: Seq[int], states: Seq[SamplingState], device: torch.device) -> None:
        self._rows = [(row, state.sequence) for row, state in zip(rows, states, strict=True)]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.watermark is not None

    def apply(self, scores_NV: torch.Tensor, positions_N: npt.NDArray[np.uint64]) -> None:
        for row, sequence in self._rows:
            options = sequence.params.watermark
            if options is None or len(sequence.token_ids) < options.context_width:
                continue
            bias = min(max(options.bias, -LARGEST_SCORE), LARGEST_SCORE)
            if options.seeding_scheme == SELF_HASH:
                _favour_self_hashed(scores_NV[row], options, sequence.token_ids, bias)
            else:
                bits = green_bits(scores_NV.shape[1], options, sequence.token_ids[-1:])
                is_green_V = torch.from_numpy(np.unpackbits(bits, count=scores_NV.shape[1])).to(scores_NV.device)
                scores_NV[row].add_(is_green_V, alpha=bias)


def _favour_self_hashed(scores_V: torch.Tensor, options: WatermarkOptions, token_ids: list[int], bias: float) -> None:
    only_row = torch.zeros(1, dtype=torch.int64, device=scores_V.device)
    likely = top_candidates(scores_V[None], only_row, min(_SELF_HASHED, len(scores_V))).ids_RC[0].tolist()
    context = token_ids[len(token_ids) - options.context_width + 1 :] if options.context_width > 1 else []
    green = [token_id for token_id in likely if is_green(len(scores_V), options, [*context, token_id], token_id)]
    if green:
        scores_V[green] += bias
