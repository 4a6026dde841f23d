"""Items of /v1/responses: messages, calls, their outputs and reasoning, turned into a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.gateway.custom_tools import ToolNames, arguments_for, input_of, joined
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.history import arguments_of, read_content
from penstock.gateway.request_fields import typed

# Name of an event, and its fields.
Event = tuple[str, dict[str, Any]]
# Types of items -> prefixes of their ids.
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
# Calls that clients ran without a function -> the field with the called action.
_ACTIONS = {
    "local_shell_call": "action",
    "shell_call": "action",
    "computer_call": "action",
    "apply_patch_call": "operation",
}
# Items of other servers, kept for them: records of their work, or encrypted.
_KEPT = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
    *("mcp_call", "mcp_approval_request", "mcp_approval_response", "compaction", "compaction_summary"),
    *("context_compaction", "tool_search_call", "tool_search_output", "ghost_snapshot", "additional_tools"),
)
_ROLES = ("user", "assistant", "system", "developer")


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(16)}"


def read_items(given: Any, field: str = "input") -> list[dict[str, Any]]:
    """Return the value of a field as items with types and ids. Raises InvalidArgument naming an item."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list) or not given:
        raise InvalidArgument(field, "must be a text or a list with at least one item")
    found = []
    for number, item in enumerate(given):
        typed(item, dict, f"{field}[{number}]")
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str) or not (kind in _PREFIXES or kind in _KEPT or _action_of(kind)):
            raise InvalidArgument(
                f"{field}[{number}].type",
                "must be message, reasoning, a call or its output, or an item of another server's tool",
            )
        found.append({"id": new_id(_PREFIXES.get(kind, "item")), **item, "type": kind})
    return found


def _action_of(kind: str) -> str | None:
    """Return the field with the called action, for a call or for an output's call."""
    return _ACTIONS.get(kind.removesuffix("_output"))


def conversation_of(
    items: Sequence[dict[str, Any]], first: int, call: HttpCall, field: str = "input"
) -> list[dict[str, Any]]:
    """Turn items into messages in the client's form.

    `first` is the place of the first item of `field`: those before it come from earlier responses. Raises
    InvalidArgument naming item and field.
    """
    found: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for number, item in enumerate(items):
        where = f"{field}[{number - first}]"
        kind = item["type"]
        if kind == "reasoning":
            said = read_content(item.get("content") or item.get("summary"), f"{where}.content", "assistant", call)
            reasoning.append(said.reasoning or said.text)
        elif kind in _KEPT:
            call.ignore(f"{field}[].{kind}")
        elif kind.endswith("_output"):
            found.append(
                {
                    "role": "tool",
                    # The id of a local shell's output is the call's.
                    "tool_call_id": typed(
                        item["id"] if kind == "local_shell_call_output" else item.get("call_id"),
                        str,
                        f"{where}.call_id",
                    ),
                    "content": read_content(item.get("output"), f"{where}.output", "tool", call).text,
                }
            )
        elif kind != "message":
            _own(found, reasoning).setdefault("tool_calls", []).append(_call_of(item, kind, where))
        else:
            role = item.get("role")
            if role not in _ROLES:
                raise InvalidArgument(f"{where}.role", "must be user, assistant, system or developer")
            said = read_content(item.get("content"), f"{where}.content", role, call)
            if role == "assistant":
                reasoning.append(said.reasoning)
                found.append({"role": role, "content": said.text, **_taken(reasoning)})
            else:
                # OpenAI's newer name; templates know the older one.
                found.append({"role": "system" if role == "developer" else role, "content": said.text})
    return found


def _call_of(item: dict[str, Any], kind: str, where: str) -> dict[str, str]:
    """Return a call in the client's form. Raises InvalidArgument naming a field of the item."""
    number = typed(item.get("call_id"), str, f"{where}.call_id")
    if (action := _action_of(kind)) is not None:
        name = kind.removesuffix("_call")
        return {"id": number, "name": name, "arguments": arguments_of(item.get(action))}
    name, space = typed(item.get("name"), str, f"{where}.name"), item.get("namespace")
    if isinstance(space, str) and space:
        name = joined(space, name)
    if kind == "custom_tool_call":
        return {"id": number, "name": name, "arguments": arguments_for(item.get("input") or "")}
    return {"id": number, "name": name, "arguments": arguments_of(item.get("arguments"))}


def _own(found: list[dict[str, Any]], reasoning: list[str]) -> dict[str, Any]:
    """Return the model's message for a call: the last one, or a new one."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": "", **_taken(reasoning)})
    return found[-1]


def _taken(reasoning: list[str]) -> dict[str, str]:
    """Take the reasoning before a message of the model."""
    text = "".join(reasoning)
    reasoning.clear()
    return {"reasoning_content": text} if text else {}


class OutputItems:
    """Items of an answer in progress, and the events for them."""

    def __init__(self, tools: ToolNames | None = None) -> None:
        """Make it; `tools` are those of the request."""
        self._tools = tools or ToolNames()
        # Arguments of the open call of a custom tool; its input is inside them.
        self._arguments = ""
        self.items: list[dict[str, Any]] = []
        # Number of the open item's call.
        self._call = -1
        self._is_open = False
        # Log-probabilities of tokens with incomplete text, such as the first part of a character.
        self._early: list[dict[str, Any]] = []

    def reason(self, text: str) -> list[Event]:
        """Add reasoning."""
        found = self._begin("reasoning")
        self.items[-1]["content"][0]["text"] += text
        return [*found, ("response.reasoning_text.delta", {**self._place(), "content_index": 0, "delta": text})]

    def write(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add text of the answer, and the log-probabilities of its tokens; without text they wait for the next text."""
        if not text:
            self._early += logprobs
            return []
        logprobs, self._early = [*self._early, *logprobs], []
        found = self._begin("message")
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        more = {**self._place(), "content_index": 0, "delta": text, "logprobs": logprobs}
        return [*found, ("response.output_text.delta", more)]

    def call(self, number: int, call_id: str, name: str, arguments: str) -> list[Event]:
        """Add a piece of a call; the first has id and name."""
        found: list[Event] = []
        if not (self._is_open and self._call == number):
            found = self.end()
            is_custom = name in self._tools.custom
            kind, text = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
            item = {
                "type": kind,
                "id": new_id(_PREFIXES[kind]),
                "call_id": call_id,
                **self._tools.fields_of(name),
                text: "",
                "status": "in_progress",
            }
            found += self._add(item)
            self._call, self._arguments = number, ""
        if self.items[-1]["type"] == "custom_tool_call":
            self._arguments += arguments
            return found
        self.items[-1]["arguments"] += arguments
        if arguments:
            found.append(("response.function_call_arguments.delta", {**self._place(), "delta": arguments}))
        return found

    def end(self, status: str = "completed", *, is_whole: bool = True) -> list[Event]:
        """End the open item; its status becomes `status`. `is_whole` false: a call broke off."""
        if not self._is_open:
            return []
        self._is_open, self._call = False, -1
        item, place = self.items[-1], self._place()
        is_call = item["type"] in ("function_call", "custom_tool_call")
        item["status"] = "incomplete" if is_call and not is_whole else status
        found: list[Event] = []
        if item["type"] == "function_call":
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            found.append(("response.function_call_arguments.done", done))
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(self._arguments)
            found += [
                ("response.custom_tool_call_input.delta", {**place, "delta": item["input"]}),
                ("response.custom_tool_call_input.done", {**place, "input": item["input"]}),
            ]
        else:
            part = item["content"][0]
            within = {**place, "content_index": 0}
            if item["type"] == "message":
                part["logprobs"] += self._early
                self._early = []
                done = {**within, "text": part["text"], "logprobs": part["logprobs"]}
                found.append(("response.output_text.done", done))
            else:
                found.append(("response.reasoning_text.done", {**within, "text": part["text"]}))
            found.append(("response.content_part.done", {**within, "part": part}))
        return [*found, ("response.output_item.done", {"output_index": place["output_index"], "item": item})]

    def _begin(self, kind: str) -> list[Event]:
        """Open an item of a kind, unless one is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        found = self.end()
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": new_id("msg"), "role": "assistant", "status": "in_progress", "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "id": new_id("rs"), "summary": [], "status": "in_progress", "content": []}
        found += self._add(item)
        # Not the same list as the event's.
        self.items[-1] = {**item, "content": [part]}
        return [*found, ("response.content_part.added", {**self._place(), "content_index": 0, "part": deepcopy(part)})]

    def _add(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(item)
        self._is_open = True
        return [("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
