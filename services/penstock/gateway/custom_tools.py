"""Tools beyond plain functions: `custom` tools with a text as input, namespaces, and tools that other servers run.

For the model, a custom tool is a function with one text, and a tool of a namespace is a function with both in its name.
Calls get the form of their tool again. Tools that this server does not run are left out and listed as ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from penstock.common.errors import InvalidArgument
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.request_fields import typed

# Prefixes of the types of tools that OpenAI's and Anthropic's servers run, or clients of models trained for them.
_ELSEWHERE = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "computer"),
    *("mcp", "local_shell", "shell", "apply_patch", "tool_search", "bash_", "text_editor_", "memory_", "advisor"),
)
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_JOINT = "__"


@dataclass(slots=True)
class ToolNames:
    """Forms of a request's tools, by their names for the model."""

    custom: set[str] = field(default_factory=set)
    # Name -> namespace and name in it.
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    # All names, and the places of the tools in the request: left out tools shift the numbers.
    taken: set[str] = field(default_factory=set)
    places: list[str] = field(default_factory=list)

    def add(self, name: str, at: str, namespace: str = "", own: str = "") -> None:
        """Add a tool's name. Raises InvalidArgument if a namespace makes two names equal: calls could not be told
        apart."""
        if name in self.taken and (namespace or name in self.spaces):
            raise InvalidArgument(f"{at}.name", "is taken: another tool has it, with or without a namespace")
        if namespace:
            self.spaces[name] = namespace, own
        self.taken.add(name)
        self.places.append(at)

    def renamed(self) -> dict[str, str]:
        """Return the places of tools in later errors -> those in the request."""
        made = {f"tools[{number}]": at for number, at in enumerate(self.places)}
        return {place: at for place, at in made.items() if place != at}

    def fields_of(self, name: str) -> dict[str, str]:
        """Fields of a call with its tool's name."""
        if (found := self.spaces.get(name)) is not None:
            return {"name": found[1], "namespace": found[0]}
        return {"name": name}


def is_elsewhere(kind: Any) -> TypeGuard[str]:
    """True for the type of a tool that this server does not run, and may leave out."""
    return isinstance(kind, str) and kind.startswith(_ELSEWHERE)


def as_function(tool: Mapping[str, Any], at: str, call: HttpCall) -> dict[str, Any]:
    """Return a custom tool as a function of one text. Raises InvalidArgument.

    The model is told a grammar of its input, but nothing enforces it.
    """
    name = typed(tool.get("name"), str, f"{at}.name")
    words = [typed(tool.get("description") or "", str, f"{at}.description")]
    form = typed(tool.get("format") or {}, dict, f"{at}.format")
    # Chat completions have the grammar in its own object.
    within = form.get("grammar")
    grammar: dict[str, Any] = within if isinstance(within, dict) else form
    definition = grammar.get("definition")
    if form.get("type") == "grammar" and isinstance(definition, str):
        words.append(f"The input is a text of this grammar ({grammar.get('syntax')}):\n{definition}")
        call.ignore("tools[].format")
    return {"name": name, "description": "\n\n".join(filter(None, words)), "parameters": _INPUT}


def arguments_for(given: Any) -> str:
    """Arguments of the function that stands for a custom tool, from a call's input."""
    return json.dumps({"input": given if isinstance(given, str) else json.dumps(given)}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Input of a custom tool's call: the one text of its arguments, even if they were cut."""
    for end in ("", '"}', '\\"}'):
        try:
            found = json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("input"), str):
            return str(found["input"])
        break
    return arguments


def joined(namespace: str, name: str) -> str:
    """The model's name for a tool of a namespace."""
    return name if name.startswith(namespace + _JOINT) else f"{namespace}{_JOINT}{name}"


def allowed_of(given: Mapping[str, Any], names: ToolNames, where: str) -> tuple[set[str], str]:
    """Return the names of `allowed_tools` and its mode. Raises InvalidArgument.

    Responses have both in the object itself, chat completions in a separate object.
    """
    within = given.get("allowed_tools")
    held = typed(within, dict, f"{where}.allowed_tools") if within is not None else given
    mode = held.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidArgument(f"{where}.mode", "must be auto or required")
    found = set()
    for number, tool in enumerate(typed(held.get("tools"), list, f"{where}.tools")):
        at = f"{where}.tools[{number}]"
        shown = typed(tool, dict, at)
        kind = typed(shown.get("type") or "function", str, f"{at}.type")
        if is_elsewhere(kind):
            continue
        inner = shown.get(kind) if isinstance(shown.get(kind), dict) else shown
        name = typed(inner.get("name"), str, f"{at}.name") if isinstance(inner, dict) else ""
        space = shown.get("namespace")
        # A namespace's name alone allows all its tools.
        members = {one for one, (place, _) in names.spaces.items() if place == name} if kind == "namespace" else set()
        found |= members or {joined(space, name) if isinstance(space, str) else name}
    return found, mode


def only(tools: list[Any], names: ToolNames, allowed: set[str], where: str) -> list[Any]:
    """Return the allowed tools. Raises InvalidArgument for an unknown name."""
    if unknown := allowed - {tool["name"] for tool in tools}:
        raise InvalidArgument(f"{where}.tools", f"{len(unknown)} of them are not among the request's tools")
    kept = [(tool, at) for tool, at in zip(tools, names.places, strict=True) if tool["name"] in allowed]
    names.places = [at for _, at in kept]
    return [tool for tool, _ in kept]


def check_forced(tools: list[Any], choice: Any, given: list[Any], where: str) -> None:
    """Raise InvalidArgument for a forced call of a tool that does not exist or was left out: none would come.

    `where`: field of the choice with a tool's name.
    """
    if not given or choice in (None, "auto", "none"):
        return
    if isinstance(choice, dict) and all(tool["name"] != choice["name"] for tool in tools):
        left = [tool.get("name") for tool in given if isinstance(tool, dict) and is_elsewhere(tool.get("type"))]
        words = (
            "is a tool that this server does not run"
            if choice["name"] in left
            else "must be the name of one of the tools"
        )
        raise InvalidArgument(where, words)
    if not tools:
        raise InvalidArgument("tool_choice", "forces a call, but this server runs none of the request's tools")
