"""Temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.processors.base import Processor, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState

# Far below any useful temperature, and far enough from fp32's limits that no score overflows when divided by it.
_MINIMUM = 1e-30


class Temperature(Processor):
    """transformers' TemperatureLogitsWarper: scores divided by the temperature (0 is greedy and never gets here)."""

    stage = Stage.WARP
    is_in_draw = True

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        values = [max(p.temperature, _MINIMUM) for p in params]
        self.values_M1 = torch.tensor(values, dtype=torch.float32, device=device)[:, None]
        self.is_neutral = not any(map(self.wants, params))

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.temperature != 1.0

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        if not self.is_neutral:
            scores_RV.div_(self.values_M1[context.picked_R])
