"""`/v1/conversations`: items that the gateway keeps, and that responses are added to.

The form is that of https://platform.openai.com/docs/api-reference/conversations, as in openai-python 3.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.common.errors import InvalidArgument, NotFound
from penstock.gateway.answers import dumps
from penstock.gateway.caller_metadata import read_metadata
from penstock.gateway.conversation_items import kept_items
from penstock.gateway.conversation_store import Change, KeptConversation
from penstock.gateway.conversation_turn import unknown_conversation
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.request_fields import Fields
from penstock.gateway.response_items import conversation_of, new_id, read_items
from penstock.gateway.store_access import asking_store, items_page, kept_of

# OpenAI's bound on the items of one request.
_MOST_ITEMS = 20


async def create_conversation(call: HttpCall) -> Answer:
    """Make a conversation. Raises InvalidArgument, HttpError 413, ResourceExhausted."""
    kept, fields = kept_of(call), Fields(call)
    metadata = read_metadata(fields.get("metadata", dict, {}))
    given = fields.maybe("items", list)
    items = _items(given, call) if given else []
    fields.done()
    made = KeptConversation(new_id("conv"), int(time.time()), metadata, kept_items(items, ()))
    with asking_store():
        await kept.conversations.add(call.owner, made)
    return dumps(_shown(made))


async def get_conversation(call: HttpCall) -> Answer:
    """Answer with a conversation, without its items. Raises NotFound."""
    return dumps(_shown(await _found(call)))


async def update_conversation(call: HttpCall) -> Answer:
    """Replace the metadata of a conversation. Raises NotFound, InvalidArgument."""
    fields = Fields(call)
    metadata = read_metadata(fields.get("metadata", dict, {}))
    fields.done()

    def change(found: KeptConversation) -> None:
        found.metadata = metadata

    return dumps(_shown(await _changed(call, change)))


async def delete_conversation(call: HttpCall) -> Answer:
    """Delete a conversation and its items; responses stay. Raises NotFound."""
    with asking_store():
        was_there = await kept_of(call).conversations.delete(call.owner, call.tail)
    if not was_there:
        raise unknown_conversation(call.tail)
    return dumps({"id": call.tail, "object": "conversation.deleted", "deleted": True})


async def create_items(call: HttpCall) -> Answer:
    """Add items to a conversation. Raises NotFound, InvalidArgument, HttpError 413, ResourceExhausted."""
    fields = Fields(call)
    items = _items(fields.raw("items"), call)
    fields.done()
    added: list[dict[str, Any]] = []

    def change(found: KeptConversation) -> None:
        added[:] = kept_items(items, [item["id"] for item in found.items])
        found.items += added

    await _changed(call, change)
    ends = {"first_id": added[0]["id"], "last_id": added[-1]["id"]}
    return dumps({"object": "list", "data": added, **ends, "has_more": False})


async def list_items(call: HttpCall) -> Answer:
    """Answer with the items of a conversation, the last first. Raises NotFound, InvalidArgument."""
    return items_page((await _found(call)).items, call)


async def get_item(call: HttpCall) -> Answer:
    """Answer with one item. Raises NotFound."""
    for item in (await _found(call)).items:
        if item["id"] == call.item:
            return dumps(item)
    raise _unknown_item(call.item)


async def delete_item(call: HttpCall) -> Answer:
    """Delete one item; the answer is its conversation. Raises NotFound."""

    def change(found: KeptConversation) -> None:
        left = [item for item in found.items if item["id"] != call.item]
        if len(left) == len(found.items):
            raise _unknown_item(call.item)
        found.items = left

    return dumps(_shown(await _changed(call, change)))


async def _found(call: HttpCall) -> KeptConversation:
    with asking_store():
        found = await kept_of(call).conversations.get(call.owner, call.tail)
    if found is None:
        raise unknown_conversation(call.tail)
    return found


async def _changed(call: HttpCall, change: Change) -> KeptConversation:
    with asking_store():
        found = await kept_of(call).conversations.change(call.owner, call.tail, change)
    if found is None:
        raise unknown_conversation(call.tail)
    return found


def _items(given: Any, call: HttpCall) -> list[dict[str, Any]]:
    """Parse the field `items`, and try whether a prompt can hold them. Raises InvalidArgument naming an item."""
    if not isinstance(given, list):
        raise InvalidArgument("items", "must be a list of items")
    if len(given) > _MOST_ITEMS:
        raise InvalidArgument("items", f"must have at most {_MOST_ITEMS} items", reason="TOO_MANY")
    items = read_items(given, "items")
    conversation_of(items, 0, call, "items")
    return items


def _shown(found: KeptConversation) -> dict[str, Any]:
    return {
        "id": found.conversation_id,
        "object": "conversation",
        "created_at": found.created_at,
        "metadata": found.metadata,
    }


def _unknown_item(item_id: str) -> NotFound:
    return NotFound(f"no item {item_id[:64]!r} in this conversation", reason="CONVERSATION_ITEM_NOT_FOUND")
