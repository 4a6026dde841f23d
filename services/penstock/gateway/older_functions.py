"""`functions` and `function_call` of a chat, OpenAI's form before `tools`: one call at most, in a field of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock_client import ToolCall

from penstock.common.errors import InvalidArgument
from penstock.gateway.custom_tools import check_forced
from penstock.gateway.request_fields import Fields, function_at

# Word for the end of an answer that is a call.
ENDED_BY_CALL = "function_call"


def take_functions(fields: Fields) -> tuple[Sequence[Mapping[str, Any]], str | dict[str, str] | None] | None:
    """Take both fields: tools and their choice in the client's form; None without functions.

    Raises InvalidArgument naming a field.
    """
    given, choice = fields.maybe("functions", list), fields.raw("function_call")
    if not given:
        if choice not in (None, "auto", "none"):
            raise InvalidArgument("function_call", "needs functions")
        return None
    if fields.raw("tools"):
        raise InvalidArgument("functions", "must not be given with tools")
    tools = [function_at(function, f"functions[{number}]") for number, function in enumerate(given)]
    if choice in (None, "auto", "none"):
        return tools, cast("str | None", choice)
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument("function_call", 'must be auto, none, or {"name": …}')
    check_forced(tools, {"name": name}, given, "function_call.name")
    return tools, {"name": name}


def function_call(one: ToolCall) -> dict[str, str]:
    """Return a complete call in this form."""
    return {"name": one.name, "arguments": one.arguments}


def function_call_delta(pieces: list[dict[str, Any]]) -> dict[str, str]:
    """Return the streamed pieces of the one call in this form."""
    return dict(pieces[0]["function"])
