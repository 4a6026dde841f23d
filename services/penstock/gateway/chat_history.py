"""Messages of a chat from clients of OpenAI and other servers, older forms included."""

from __future__ import annotations

from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.gateway.custom_tools import arguments_for
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.history import HISTORY, Said, call_of, read_content
from penstock.gateway.request_fields import typed

# Names of a message's reasoning in servers and clients. The first that is set counts.
_REASONING = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
# All other fields that are read.
_TAKEN = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "function_call"})


def messages_of(value: Any, call: HttpCall) -> list[dict[str, Any]]:
    """Return a conversation in the client's form. Raises InvalidArgument naming message and field."""
    if isinstance(value, str) and value:
        # As Chinese-LLaMA-Alpaca-3's server takes it: what a user says.
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidArgument("messages", "must be a list with at least one message, or a text")
    return [_message(message, f"messages[{number}]", call) for number, message in enumerate(value)]


def _message(message: Any, where: str, call: HttpCall) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgument(f"{where}.role", "must be a text such as user")
    # OpenAI's newest name, and its oldest; templates know those in between.
    role = {"developer": "system", "function": "tool"}.get(role, role)
    content = message.get("content")
    # A turn of history may be a call alone; what a caller says itself is never nothing.
    is_given = content is not None or role not in HISTORY
    said = read_content(content, f"{where}.content", role, call) if is_given else Said()
    if isinstance(refusal := message.get("refusal"), str):
        said.texts.append(refusal)
    made: dict[str, Any] = {"role": role}
    if (text := said.text) or content is not None:
        made["content"] = text
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            made[name] = typed(message[name], str, f"{where}.{name}")
    if reasoning := _reasoning(message, where, call) or said.reasoning:
        made["reasoning_content"] = reasoning
    if calls := _calls(message, where) or said.calls:
        made["tool_calls"] = calls
    left = (key for key, value in message.items() if value is not None and not _is_taken(key, value))
    call.ignore(*(f"messages[].{key}" for key in left))
    return made


def _is_taken(key: str, value: Any) -> bool:
    """True for a field of a message that was read, or asks for nothing: other servers send false or {} there."""
    if key == "refusal" or key in _REASONING:
        return not value or isinstance(value, str if key == "refusal" else str | list)
    return key in _TAKEN


def _reasoning(message: dict[str, Any], where: str, call: HttpCall) -> str:
    for name in _REASONING:
        given = message.get(name)
        if given and isinstance(given, str | list):
            said: Said = read_content(given, f"{where}.{name}", "assistant", call)
            if text := said.reasoning or said.text:
                return text
    return ""


def _calls(message: dict[str, Any], where: str) -> list[dict[str, str]]:
    made = []
    for number, each in enumerate(typed(message.get("tool_calls") or [], list, f"{where}.tool_calls")):
        at = f"{where}.tool_calls[{number}]"
        within = typed(each, dict, at)
        if within.get("type") == "custom":
            custom = typed(within.get("custom"), dict, f"{at}.custom")
            made.append({**call_of(custom, f"{at}.custom"), "arguments": arguments_for(custom.get("input") or "")})
            made[-1]["id"] = typed(within.get("id") or "", str, f"{at}.id")
            continue
        function = typed(within.get("function"), dict, f"{at}.function")
        made.append({**call_of(function, f"{at}.function"), "id": typed(within.get("id") or "", str, f"{at}.id")})
    if not made and (old := message.get("function_call")):
        made.append(call_of(typed(old, dict, f"{where}.function_call"), f"{where}.function_call"))
    return made
