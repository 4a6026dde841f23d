"""Items of a conversation as it keeps and shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from penstock.gateway.response_items import new_id

# Its id is that of its call.
_OWN_ID = "local_shell_call_output"


def kept_items(items: Iterable[dict[str, Any]], taken: Collection[str]) -> list[dict[str, Any]]:
    """Return items with parts as content, a status, and ids that none of `taken` is."""
    ids, found = set(taken), []
    for item in items:
        made = {**item, "status": item.get("status") or "completed"}
        if made["type"] == "message":
            made["content"] = _parts(item.get("content"), item.get("role"))
        if not isinstance(made["id"], str) or (made["id"] in ids and made["type"] != _OWN_ID):
            # A client sends back what it was given: an item of an earlier turn, with its id.
            made["id"] = new_id(_prefix(made["id"]))
        ids.add(made["id"])
        found.append(made)
    return found


def _parts(content: Any, role: Any) -> Any:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]


def _prefix(item_id: Any) -> str:
    known = item_id.partition("_")[0] if isinstance(item_id, str) else ""
    return known if known.isalpha() and len(known) <= 8 else "item"
