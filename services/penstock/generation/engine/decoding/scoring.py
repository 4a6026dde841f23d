"""Scoring: the log-probabilities of a given continuation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.single_pass import SinglePass

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.engine.stopping import StopCriteria


class Scoring(SinglePass):
    """The logprobs travel as prompt logprobs do: they are collected by the request's report and sent with Started.

    The last token is only looked up in the row before it, never computed.
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
