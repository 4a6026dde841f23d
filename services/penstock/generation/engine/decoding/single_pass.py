"""What scoring and embedding share: one sequence, computed once and dropped; no token is drawn or told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.generation.core.request import Emission
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy

if TYPE_CHECKING:
    from penstock.generation.core.request import FinishReason
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import SampledToken


class SinglePass(DecodingStrategy):
    """Ends when its sequence is computed."""

    def __init__(self, sequence: Sequence) -> None:
        self._live = [sequence]

    @property
    def width(self) -> int:
        return len(self._live)

    def start(self) -> tuple[list[Sequence], list[Emission]]:
        return list(self._live), []

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        """Every token is computed."""
        dropped, self._live = self._live, []
        return Decision(dropped=dropped, embedding=sampled[dropped[0]].embedding)

    def end(self, reason: FinishReason) -> list[Emission]:
        return []
