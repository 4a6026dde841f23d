"""One turn of a kept conversation: the items before it, and what it adds."""

from __future__ import annotations

from typing import Any

from penstock.common.errors import InvalidArgument, NotFound, PenstockError
from penstock.common.logging import get_logger
from penstock.gateway.conversation_items import kept_items
from penstock.gateway.conversation_store import KeptConversation
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.request_fields import Fields, typed
from penstock.gateway.response_store import StoreFailed
from penstock.gateway.store_access import asking_store, kept_of

_log = get_logger("penstock.gateway")


def unknown_conversation(conversation_id: str) -> NotFound:
    """Return the error of a conversation that the caller does not have."""
    return NotFound(
        f"no conversation {conversation_id[:64]!r} of this caller: never made, deleted, or too old",
        reason="CONVERSATION_NOT_FOUND",
    )


def conversation_id_of(fields: Fields) -> str | None:
    """Take the field `conversation`: an id, or an object with it. Raises InvalidArgument."""
    given = fields.raw("conversation")
    if given is None or isinstance(given, str):
        return given
    return typed(typed(given, dict, "conversation").get("id"), str, "conversation.id")


async def items_before(call: HttpCall, conversation_id: str) -> list[dict[str, Any]]:
    """Return the items of a conversation. Raises NotFound, InvalidArgument."""
    if call.kept is None:
        raise InvalidArgument("conversation", "this gateway keeps no conversations (--response-store)")
    with asking_store():
        found = await call.kept.conversations.get(call.owner, conversation_id)
    if found is None:
        raise unknown_conversation(conversation_id)
    return found.items


async def add_turn(call: HttpCall, conversation_id: str, items: list[dict[str, Any]]) -> str:
    """Add a turn's items; the answer is made, so a fault is returned as a warning."""

    def add(found: KeptConversation) -> None:
        found.items += kept_items(items, [item["id"] for item in found.items])

    try:
        if await kept_of(call).conversations.change(call.owner, conversation_id, add) is not None:
            return ""
        why = "it was deleted meanwhile"
    except StoreFailed as error:
        _log.error("a turn was not added to its conversation", error=str(error))
        why = "the store does not answer"
    except PenstockError as error:
        why = error.message
    return f"the conversation does not have this turn: {why}"
