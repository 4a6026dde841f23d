"""Tools of a chat: functions and custom tools, the choice between them, and calls in the form of their tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock_client import ToolCall

from penstock.common.errors import InvalidArgument
from penstock.gateway.custom_tools import ToolNames, allowed_of, as_function, check_forced, input_of, is_elsewhere, only
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.older_functions import take_functions
from penstock.gateway.request_fields import Fields, function_of, typed

_FIELDS = frozenset(("functions", "function_call", "tools", "tool_choice"))
_NO_NAMES: frozenset[str] = frozenset()


def take_tools(
    fields: Fields, call: HttpCall
) -> tuple[Sequence[Mapping[str, Any]], str | dict[str, str] | None, frozenset[str]]:
    """Take tools and tool_choice in the client's form, and the names of custom tools. Raises InvalidArgument."""
    if not fields.take_any(_FIELDS):
        return (), None, _NO_NAMES
    if (older := take_functions(fields)) is not None:
        call.has_functions = True
        call.names |= {"tools": "functions", "tool_choice": "function_call"}
        return *older, frozenset()
    given = fields.raw("tools")
    made: Mapping[str, Any]
    tools, names = list[Any](), ToolNames()
    for number, tool in enumerate(typed(given, list, "tools") if given is not None else []):
        at = f"tools[{number}]"
        kind = typed(tool, dict, at).get("type", "function")
        if kind == "custom":
            made = as_function(typed(tool.get("custom"), dict, f"{at}.custom"), f"{at}.custom", call)
            names.custom.add(made["name"])
        elif is_elsewhere(kind):
            call.ignore(f"tools[].{kind[:64]}")
            continue
        else:
            made = function_of(tool, at)
        names.add(made["name"], at)
        tools.append(made)
    choice = fields.raw("tool_choice")
    made_choice: str | dict[str, str] | None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, made_choice = allowed_of(choice, names, "tool_choice")
        tools = only(tools, names, allowed, "tool_choice")
    else:
        made_choice = _choice(choice)
        kind = choice.get("type", "function") if isinstance(choice, dict) else ""
        check_forced(tools, made_choice, given or [], f"tool_choice.{kind}")
    call.names |= names.renamed()
    return tools, made_choice, frozenset(names.custom)


def _choice(choice: Any) -> str | dict[str, str] | None:
    """Return the choice in the client's form. Raises InvalidArgument."""
    if choice in (None, "auto", "none", "required"):
        return cast("str | None", choice)
    kind = choice.get("type", "function") if isinstance(choice, dict) else None
    named = choice.get(kind) if kind in ("function", "custom") else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument("tool_choice", 'must be auto, none, required, or {"function": {"name": …}}')
    return {"name": name}


def call_shown(one: ToolCall, custom: frozenset[str]) -> dict[str, Any]:
    """Return a complete call in the form of its tool."""
    if one.name in custom:
        return {"id": one.id, "type": "custom", "custom": {"name": one.name, "input": input_of(one.arguments)}}
    return {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}


@dataclass(slots=True)
class CustomPieces:
    """Calls of custom tools in a stream: their input is sent once it is complete."""

    custom: frozenset[str]
    # Call being written, by its choice and number.
    _open: dict[tuple[int, int], ToolCall] = field(default_factory=dict)

    def held(self, choice: int, pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the pieces of a choice's calls; those of custom tools are kept instead."""
        left = []
        for piece in pieces:
            key, function = (choice, piece["index"]), piece["function"]
            if (name := function.get("name", "")) in self.custom:
                self._open[key] = ToolCall(piece["index"], piece["id"], name, "")
            if (known := self._open.get(key)) is None:
                left.append(piece)
                continue
            more = function.get("arguments", "")
            self._open[key] = ToolCall(known.index, known.id, known.name, known.arguments + more)
        return left

    def end(self, choice: int) -> list[dict[str, Any]]:
        """Return the kept calls of a choice."""
        keys = sorted(key for key in self._open if key[0] == choice)
        calls = [self._open.pop(key) for key in keys]
        return [{"index": one.index, **call_shown(one, self.custom)} for one in calls]
