"""Interface of the stores of conversations: items that responses are added to. Two stores have it: for one gateway
(sqlite_conversations.py) and for several (redis_conversations.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.common.errors import ResourceExhausted
from penstock.gateway.http_errors import HttpError


@dataclass(slots=True)
class KeptConversation:
    """A conversation and its items, the oldest first."""

    conversation_id: str
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)

    def encoded(self) -> bytes:
        """Return its JSON; a lone surrogate becomes a question mark."""
        told = [self.conversation_id, self.created_at, self.metadata, self.items]
        return json.dumps(told, ensure_ascii=False).encode("utf-8", "replace")

    @staticmethod
    def decoded(data: bytes | str) -> KeptConversation:
        """Return the conversation that `encoded` wrote."""
        return KeptConversation(*json.loads(data))


# Changes a conversation in place; it may be called again with a later state of it. What it raises ends the change.
Change: TypeAlias = "Callable[[KeptConversation], None]"


@dataclass(frozen=True, slots=True)
class ConversationBounds:
    """Bounds of a store: of all conversations, of one, of one caller's; `seconds` is a life after the last change."""

    max_conversations: int
    max_bytes: int
    max_bytes_of_one: int
    caller_share: float
    seconds: float

    @property
    def most_of_caller(self) -> tuple[int, int]:
        """Most conversations, and most bytes, of one caller who shows a token."""
        return (
            max(1, int(self.caller_share * self.max_conversations)),
            max(1, int(self.caller_share * self.max_bytes)),
        )

    def check(self, data: bytes) -> None:
        """Raise HttpError 413 for a conversation that is too large."""
        most = min(self.max_bytes_of_one, self.max_bytes)
        if len(data) > most:
            raise HttpError(
                413,
                f"the conversation has more than {most} bytes (--max-body-bytes, --max-conversation-bytes)",
                reason="BODY_TOO_LARGE",
            )


def too_many_conversations() -> ResourceExhausted:
    """Return the error of a caller who has the most conversations, or the most bytes of them."""
    return ResourceExhausted(
        "the conversations of this caller have their share of --max-conversations or of --max-conversation-bytes "
        "(--conversations-share): delete some",
        reason="CONVERSATIONS_FULL",
    )


class ConversationStore(Protocol):
    """Store of conversations, limited in number, bytes and time. A caller sees only its own.

    All raise StoreFailed, and those that write HttpError for a conversation that is too large and ResourceExhausted
    for a caller with too many.
    """

    @property
    def num_conversations(self) -> int:
        """Number of conversations at the last write."""

    @property
    def num_bytes(self) -> int:
        """Bytes of conversations at the last write."""

    async def open(self) -> None:
        """Read the counts, where the store is there."""

    async def add(self, caller: str, conversation: KeptConversation) -> None:
        """Keep a new conversation; those that nobody changed for the longest time go when there are too many."""

    async def get(self, caller: str, conversation_id: str) -> KeptConversation | None:
        """Return a conversation; None if the caller has none with this id."""

    async def change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        """Change a conversation as if nobody else did meanwhile; return it, None if the caller has none."""

    async def delete(self, caller: str, conversation_id: str) -> bool:
        """Delete a conversation of the caller's; False if there is none."""
