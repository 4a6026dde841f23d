"""Scoring and embedding: one sequence, computed once and dropped. No token is drawn or emitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.request import Emission
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy

if TYPE_CHECKING:
    from penstock.generation.core.request import FinishReason, Request
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.stopping import StopCriteria


class SinglePass(DecodingStrategy):
    """Strategy that ends when its sequence is computed."""

    def __init__(self, sequence: Sequence) -> None:
        self._live = [sequence]

    @property
    def width(self) -> int:
        return len(self._live)

    def start(self) -> tuple[list[Sequence], list[Emission]]:
        return list(self._live), []

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        """Drop the sequence: every token is computed."""
        dropped, self._live = self._live, []
        return Decision(dropped=dropped, embedding=sampled[dropped[0]].embedding)

    def end(self, reason: FinishReason) -> list[Emission]:
        return []


class Scoring(SinglePass):
    """Log-probabilities of a given continuation.

    The request's report collects them and sends them with Started, as prompt logprobs. The last token is only looked
    up in the row before it, and never computed.
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        *token_ids, last = request.prompt_token_ids
        super().__init__(
            Sequence(
                seq_id=next_seq_id(),
                index=0,
                params=request.params,
                seed=0,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                draw=DrawSpec(DrawKind.NOTHING),
                next_token_id=last,
            )
        )


class Embedding(SinglePass):
    """Mean of the final hidden states.

    The runner sums the rows as they are computed, so no row may come from the prefix cache
    (Request.first_needed_row = 0).
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        super().__init__(
            Sequence(
                seq_id=next_seq_id(),
                index=0,
                params=request.params,
                seed=0,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                draw=DrawSpec(DrawKind.EMBEDDING),
            )
        )
