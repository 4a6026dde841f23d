"""Rules about drafts that strategies, engine and draft models share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.common.errors import PenstockError

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.step import DraftRequest


def until_end(drafts: list[int], end_token_ids: Collection[int]) -> list[int]:
    """Return the drafts before the first id that would end the sequence: the row before draws that id anyway."""
    for position, token_id in enumerate(drafts):
        if token_id in end_token_ids:
            return drafts[:position]
    return drafts


def share_room(requests: Sequence[DraftRequest], room: int) -> list[DraftRequest]:
    """Cut requests so that together they ask for at most `room` tokens. Requests with no share are left out."""
    shared: list[DraftRequest] = []
    for position, request in enumerate(requests):
        tokens = min(request.num_tokens, max(room, 0) // (len(requests) - position))
        if tokens:
            shared.append(replace(request, num_tokens=tokens))
            room -= tokens
    return shared


def goes_on(state: GrammarState, token_id: int) -> bool:
    """Advance a state on which drafts are tried. False: the grammar refuses the token or is complete with it.

    An error of the state itself is raised to the request only when it really takes the token.
    """
    try:
        return state.advance(token_id) and not state.is_done
    except PenstockError:
        return False
