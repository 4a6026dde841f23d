"""Budget of the thought before an answer, and the ids that close it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.text.thoughts import Thought
    from penstock.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class ThoughtEnd:
    """The end of a thought that takes all of its budget."""

    thought: Thought
    # Ids that close the thought.
    token_ids: tuple[int, ...]
    # Budget of a request that sets none; None: none. It is a wish.
    wished_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ThoughtBudget:
    """Budget of one request's thoughts; every returned sequence has all of it."""

    thought: Thought
    # Tokens of the thought after which `end_ids` follow.
    num_free: int
    end_ids: tuple[int, ...]
    table: TokenBytes

    @classmethod
    def of(cls, tokens: int, end: ThoughtEnd, table: TokenBytes) -> ThoughtBudget:
        """Return the budget of `tokens` tokens. White space before the marker that closes counts as part of the
        thought, and is left out where it finds no room."""
        blank = 0
        while blank < len(end.token_ids) and not table.bytes_of(end.token_ids[blank], skip_special=False).strip():
            blank += 1
        kept = min(blank, tokens)
        return cls(end.thought, tokens - kept, end.token_ids[blank - kept :], table)
