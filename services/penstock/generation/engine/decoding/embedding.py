"""Embedding: what comes back is the mean of the final hidden states of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.single_pass import SinglePass

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.engine.stopping import StopCriteria


class Embedding(SinglePass):
    """The runner sums the rows as they are computed, so none may come from the prefix cache
    (Request.first_needed_row = 0)."""

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
