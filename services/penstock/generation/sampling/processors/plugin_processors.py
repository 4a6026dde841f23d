"""The server owner's own logits processors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.generation.core.plugins import plugin_failed
from penstock.generation.sampling.processors.base import LARGEST_SCORE, Processor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.plugins import Plugin, RequestPlugins
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState

_FIELD = "config.logits_processor"


class PluginProcessors(Processor):
    """`logits_processor`: transformers' argument of that name, row by row and in the same place.

    When a plugin raises, or returns anything but finite scores and -inf, its row stays unchanged and the request's
    error is set: the engine ends only that request.
    """

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [(row, state.sequence) for row, state in zip(rows, states, strict=True)]
        self._device = device

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.plugins is not None and bool(params.plugins.processors)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row, sequence in self._rows:
            plugins = sequence.params.plugins
            if plugins is not None and plugins.error is None:
                ids_1T = torch.tensor([sequence.known_token_ids], dtype=torch.int64, device=self._device)
                scores_NV[row] = self._processed(plugins, ids_1T, scores_NV[row : row + 1])[0]

    @classmethod
    def _processed(cls, plugins: RequestPlugins, ids_1T: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        return _processed(plugins, plugins.processors, _FIELD, ids_1T, scores_1V)


class AllowingPlugins(PluginProcessors):
    """`prefix_allowed_tokens_fn` of a caller in this process; it has another place than other processors."""

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.plugins is not None and bool(params.plugins.allowing)

    @classmethod
    def _processed(cls, plugins: RequestPlugins, ids_1T: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        return _processed(plugins, plugins.allowing, "prefix_allowed_tokens_fn", ids_1T, scores_1V)


def _processed(
    plugins: RequestPlugins, asked: tuple[Plugin, ...], field: str, ids_1T: torch.Tensor, scores_1V: torch.Tensor
) -> torch.Tensor:
    """Return the row after all processors; unchanged when one fails, and the failure is noted in `plugins`."""
    given_1V = scores_1V
    for name, call in asked:
        try:
            answer = call(ids_1T.clone(), given_1V.clone())
            wrong = _fault(answer, scores_1V)
        except (Exception, SystemExit) as error:
            plugins.error = plugin_failed(field, name, error)
            return scores_1V
        if wrong:
            plugins.error = plugin_failed(field, name, wrong)
            return scores_1V
        # Removed tokens stay -inf.
        given_1V = torch.where(answer == -torch.inf, answer, answer.clamp(-LARGEST_SCORE, LARGEST_SCORE))
    return given_1V


def _fault(answer: Any, scores_1V: torch.Tensor) -> str:
    if not isinstance(answer, torch.Tensor) or answer.shape != scores_1V.shape:
        return f"did not return scores of the shape (1, {scores_1V.shape[1]})"
    # False for a NaN, too.
    return "" if bool((answer < torch.inf).all()) else "returned scores that are NaN or infinite"
