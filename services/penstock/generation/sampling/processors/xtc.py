"""XTC: exclude top choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.ops.counted_draws import Stream
from penstock.generation.sampling.processors.base import Processor, Stage, min_tokens_to_keep, params_by_row

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class XTC(Processor):
    """Exclude top choices (p-e-w, text-generation-webui's pull request 6335; llama.cpp's `llama_sampler_xtc`).

    With the chance `xtc_probability`, drawn once for each token, it drops every token of at least `xtc_threshold`
    except the least likely of them; of equals the lowest id stays. Probabilities are those after the other warpers.
    """

    stage = Stage.WARP

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = params_by_row(rows, states)

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        # Two tokens cannot both be more likely than a half.
        return params.xtc_probability > 0.0 and params.xtc_threshold <= 0.5

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        chances = context.uniforms(Stream.XTC, [row for row, _ in self._rows]).tolist()
        drawn = [
            (row, params)
            for (row, params), chance in zip(self._rows, chances, strict=True)
            if chance < params.xtc_probability
        ]
        for place, params in context.picked(drawn):
            _drop_top_choices(scores_RV[place], params)


def _drop_top_choices(scores_V: torch.Tensor, params: SamplingParams) -> None:
    is_left_V = scores_V > -torch.inf
    is_choice_V = is_left_V & (scores_V.softmax(-1) >= params.xtc_threshold)
    choices_C = is_choice_V.nonzero()[:, 0]
    # A NaN is none: the draw finds it.
    if len(choices_C) < 2 or int(is_left_V.sum()) - len(choices_C) + 1 < min_tokens_to_keep(params):
        return
    # argmin takes any of equals.
    chosen_C = scores_V[choices_C]
    kept = choices_C[(chosen_C == chosen_C.amin()).nonzero()[0, 0]]
    score = scores_V[kept].clone()
    scores_V[choices_C] = -torch.inf
    scores_V[kept] = score
