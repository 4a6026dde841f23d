"""Rules about drafts that strategies, engine and draft models share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.common.errors import PenstockError

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.step import DraftRequest

# Verifications in a row without an accepted draft after which drafting pauses, and tokens of the first and of the
# longest pause.
_PATIENCE, _FIRST_PAUSE, _LONGEST_PAUSE = 4, 8, 128


class DraftThrottle:
    """Throttle of the drafts of one kind for one sequence: it pauses while none is accepted, each time for longer."""

    __slots__ = ("_fruitless", "_num_left", "_pause")

    def __init__(self) -> None:
        self._fruitless = self._pause = self._num_left = 0

    def allows(self) -> bool:
        """True when drafts may be made now. Call it once per opportunity."""
        if not self._num_left:
            return True
        self._num_left -= 1
        return False

    def note(self, accepted: int) -> None:
        """Take the number of accepted drafts of one verification."""
        if accepted:
            self._fruitless = self._pause = 0
            return
        self._fruitless += 1
        if self._fruitless == _PATIENCE:
            self._fruitless = 0
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) or _FIRST_PAUSE
            self._num_left = self._pause


def until_end(drafts: list[int], end_token_ids: Collection[int]) -> list[int]:
    """Return the drafts before the first id that would end the sequence: the row before draws that id anyway."""
    for position, token_id in enumerate(drafts):
        if token_id in end_token_ids:
            return drafts[:position]
    return drafts


def share_room(requests: Sequence[DraftRequest], room: int) -> list[DraftRequest]:
    """Cut requests to at most `room` tokens together. Requests without a share are left out."""
    shared: list[DraftRequest] = []
    for position, request in enumerate(requests):
        tokens = min(request.num_tokens, max(room, 0) // (len(requests) - position))
        if tokens:
            shared.append(replace(request, num_tokens=tokens))
            room -= tokens
    return shared


def goes_on(state: GrammarState, token_id: int) -> bool:
    """Advance a state that tries drafts. False: the grammar refuses the token or is complete with it.

    An error of the state itself reaches the request only when it really takes the token.
    """
    try:
        return state.advance(token_id) and not state.is_done
    except PenstockError:
        return False
