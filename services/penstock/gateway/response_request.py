"""A request to `/v1/responses`: its fields, the turns that it builds on, and the plan of its answer."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from penstock_client import AsyncStream

from penstock.common.errors import InvalidArgument
from penstock.gateway.background import is_under_way
from penstock.gateway.background_responses import background_of
from penstock.gateway.caller_metadata import read_metadata
from penstock.gateway.conversation_turn import conversation_id_of, items_before
from penstock.gateway.custom_tools import ToolNames, allowed_of, as_function, check_forced, is_elsewhere, joined, only
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.http_errors import HttpError
from penstock.gateway.json_output import read_form
from penstock.gateway.request_fields import Fields, checked, options_of, typed
from penstock.gateway.response_items import conversation_of, new_id, read_items
from penstock.gateway.response_progress import ResponsePlan
from penstock.gateway.store_access import asking_store, kept_of

# Fields without effect here.
_IDLE = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "stream_options")
_LOGPROBS = "message.output_text.logprobs"


class ResponseRequest:
    """Fields of one request, read in groups. `plan` reads what it builds on, and makes what answers it."""

    def __init__(self, fields: Fields, call: HttpCall) -> None:
        """Read all fields. Raises InvalidArgument naming one."""
        self._call = call
        self._options = options_of(fields, call)
        self._read_form(fields)
        self._read_tools(fields)
        self._read_prompt(fields)
        self._metadata = read_metadata(fields.get("metadata", dict, {}))
        _refuse_others(fields)
        self._read_place(fields)
        self._given = read_items(fields.raw("input"))
        for name in _IDLE:
            fields.raw(name)
        fields.done()

    def _read_form(self, fields: Fields) -> None:
        """Take what shapes the answer: its length, text, log-probabilities, and thoughts."""
        call, options = self._call, self._options
        if (most := fields.maybe("max_output_tokens", int)) is not None:
            options["max_new_tokens"], call.names["max_new_tokens"] = most, "max_output_tokens"
        if (options.get("num_return_sequences") or 1) != 1:
            raise InvalidArgument(call.names["num_return_sequences"], "must be 1: an answer is one response")
        self._form = _take_text(fields, options, call)
        _take_include(fields, options, call)
        self._variables = dict(fields.get("chat_template_kwargs", dict, {}))
        self._effort = (fields.maybe("reasoning", dict) or {}).get("effort")
        if self._effort is not None:
            self._variables.setdefault("reasoning_effort", typed(self._effort, str, "reasoning.effort"))

    def _read_tools(self, fields: Fields) -> None:
        tools, self._given_tools, self._names = _tools(fields, self._call)
        self._tools, self._choice, self._given_choice = _tool_choice(fields, tools, self._names)
        check_forced(self._tools, self._choice, self._given_tools, "tool_choice.name")
        self._call.names |= self._names.renamed()
        self._parallel = fields.maybe("parallel_tool_calls", bool)

    def _read_prompt(self, fields: Fields) -> None:
        self._instructions = fields.maybe("instructions", str)
        self._options["model"] = fields.get("model", str, "")

    def _read_place(self, fields: Fields) -> None:
        """Take what the response builds on, and where it is kept."""
        self._previous, self._conversation = fields.maybe("previous_response_id", str), conversation_id_of(fields)
        if self._previous is not None and self._conversation is not None:
            raise InvalidArgument("conversation", "does not go together with previous_response_id")
        store, self._is_background = fields.maybe("store", bool), fields.get("background", bool, False)
        if self._is_background:
            background_of(self._call)
            if store is False:
                raise InvalidArgument("store", "must not be false with background: the response is read from the store")
        self._is_stored = store is not False and self._call.kept is not None

    async def plan(self) -> ResponsePlan:
        """Return the plan of the answer. Raises PenstockError naming a field."""
        self._messages = await self._read_messages()
        return ResponsePlan(
            response_id=new_id("resp"),
            model=self._options["model"],
            echo=self._echo(),
            input=self._given,
            previous=self._previous,
            conversation=self._conversation,
            is_stored=self._is_stored,
            is_background=self._is_background,
            open=self._open,
            render=self._render,
            tool_names=self._names,
        )

    async def _read_messages(self) -> list[dict[str, Any]]:
        """Return the whole chat: instructions, earlier turns, and the request's items."""
        call, earlier = self._call, list[dict[str, Any]]()
        if self._previous is not None:
            earlier = await _earlier(call, self._previous)
        if self._conversation is not None:
            earlier = await items_before(call, self._conversation)
        messages = conversation_of([*earlier, *self._given], len(earlier), call)
        call.names["messages"] = "input"
        if self._instructions is not None:
            messages.insert(0, {"role": "system", "content": self._instructions})
        if not messages:
            raise InvalidArgument("input", "must have a message")
        return messages

    def _open(self) -> AsyncStream:
        return checked(
            self._options,
            lambda: self._call.client.stream(
                self._messages,
                tools=self._tools,
                chat_template_kwargs=self._variables or None,
                tool_choice=self._choice,
                parallel_tool_calls=self._parallel,
                timeout=self._call.config.answer_seconds,
                **self._options,
            ),
            schema="parameters",
        )

    def _render(self) -> Awaitable[tuple[str, list[int]]]:
        return checked(
            {},
            lambda: self._call.client.render_chat(
                self._messages,
                tools=self._tools,
                chat_template_kwargs=self._variables or None,
                model=self._options["model"],
                timeout=self._call.config.answer_seconds,
            ),
            schema="parameters",
        )

    def _echo(self) -> dict[str, Any]:
        """Return the fields that a response repeats from its request."""
        options = self._options
        return {
            "instructions": self._instructions,
            "max_output_tokens": options.get("max_new_tokens"),
            "parallel_tool_calls": self._parallel is not False,
            "previous_response_id": self._previous,
            "conversation": None if self._conversation is None else {"id": self._conversation},
            "background": self._is_background,
            "reasoning": {"effort": self._effort, "summary": None},
            "store": self._is_stored,
            "temperature": options.get("temperature"),
            "text": {"format": self._form},
            "tool_choice": self._given_choice,
            "tools": self._given_tools,
            "top_p": options.get("top_p"),
            "truncation": "disabled",
            "metadata": self._metadata,
        }


async def _earlier(call: HttpCall, previous: str) -> list[dict[str, Any]]:
    """Return the items of a response and of all those before it. Raises InvalidArgument."""
    try:
        with asking_store():
            chain = await kept_of(call).responses.chain(call.owner, previous, call.config.max_body_bytes)
    except OverflowError:
        raise HttpError(
            413,
            f"the conversation of previous_response_id has more than {call.config.max_body_bytes} bytes "
            "(--max-body-bytes)",
            reason="BODY_TOO_LARGE",
        ) from None
    if chain is None:
        raise InvalidArgument(
            "previous_response_id",
            "no such response of this caller: it, or one before it, was never kept, deleted, or is too old",
            reason="PREVIOUS_RESPONSE_NOT_FOUND",
        )
    if is_under_way(chain[-1].response):
        raise InvalidArgument(
            "previous_response_id", "is of a response that has not ended yet", reason="PREVIOUS_RESPONSE_NOT_READY"
        )
    return [item for stored in chain for item in (*stored.input, *stored.response["output"])]


def _refuse_others(fields: Fields) -> None:
    """Raise InvalidArgument for a field that would change the answer and is not supported."""
    if fields.raw("truncation") not in (None, "disabled"):
        raise InvalidArgument("truncation", "must be disabled: too long a prompt is refused")
    if fields.raw("prompt"):
        raise InvalidArgument("prompt", "is not supported: send the items")
    if fields.raw("context_management"):
        raise InvalidArgument("context_management", "is not supported: nothing is compacted, send fewer items")


def _take_text(fields: Fields, options: dict[str, Any], call: HttpCall) -> dict[str, Any]:
    """Take text.format; return it."""
    form = typed((fields.maybe("text", dict) or {}).get("format") or {"type": "text"}, dict, "text.format")
    found = read_form(form, "text.format", nested=False)
    if found is not None:
        option, name, value = found
        call.names[option], options[option] = name, value
    return form


def _take_include(fields: Fields, options: dict[str, Any], call: HttpCall) -> None:
    """Take include and top_logprobs; either asks for log-probabilities."""
    include, top = fields.get("include", list, []), fields.maybe("top_logprobs", int)
    call.ignore(*(f"include:{one}" for one in include if isinstance(one, str) and one != _LOGPROBS))
    if _LOGPROBS in include or top:
        options["top_logprobs"], call.names["top_logprobs"] = top or 0, "top_logprobs"


def _tools(fields: Fields, call: HttpCall) -> tuple[list[dict[str, Any]], list[dict[str, Any]], ToolNames]:
    """Take tools: in the client's form, as they were given, and their forms."""
    given, names = fields.get("tools", list, []), ToolNames()
    tools: list[dict[str, Any]] = []
    for number, tool in enumerate(given):
        _add_tool(tools, names, tool, f"tools[{number}]", call)
    return tools, [{"strict": None, "parameters": None, **tool} for tool in given], names


def _add_tool(
    tools: list[dict[str, Any]], names: ToolNames, tool: Any, at: str, call: HttpCall, namespace: str = ""
) -> None:
    kind = typed(tool, dict, at).get("type")
    if kind == "namespace" and not namespace:
        space = typed(tool.get("name"), str, f"{at}.name")
        for number, one in enumerate(typed(tool.get("tools"), list, f"{at}.tools")):
            _add_tool(tools, names, one, f"{at}.tools[{number}]", call, space)
        return
    if kind == "mcp":
        raise InvalidArgument(
            f"{at}.type", "must not be mcp: this server calls no tools itself; send the MCP server's tools as functions"
        )
    if is_elsewhere(kind):
        call.ignore(f"tools[].{kind[:64]}")
        return
    if kind == "custom":
        made = as_function(tool, at, call)
    elif kind == "function":
        made = {"name": typed(tool.get("name"), str, f"{at}.name")}
        if tool.get("description") is not None:
            made["description"] = typed(tool["description"], str, f"{at}.description")
        made["parameters"] = typed(tool.get("parameters") or {}, dict, f"{at}.parameters")
        made["strict"] = typed(tool.get("strict") or False, bool, f"{at}.strict")
    else:
        raise InvalidArgument(f"{at}.type", f"must be function, custom or namespace: {str(kind)[:64]} is unknown")
    own = made["name"]
    if namespace:
        made["name"] = joined(namespace, own)
    names.add(made["name"], at, namespace, own)
    if kind == "custom":
        names.custom.add(made["name"])
    tools.append(made)


def _tool_choice(
    fields: Fields, tools: list[dict[str, Any]], names: ToolNames
) -> tuple[list[dict[str, Any]], str | dict[str, str] | None, Any]:
    """Take tool_choice: the tools that it leaves, the choice in the client's form, and as it was given."""
    choice = fields.raw("tool_choice")
    if choice in (None, "auto", "none", "required"):
        return tools, choice, choice or "auto"
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed, mode = allowed_of(choice, names, "tool_choice")
        return only(tools, names, allowed, "tool_choice"), mode, choice
    name = choice.get("name") if kind in ("function", "custom") else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument(
            "tool_choice", 'must be auto, none, required, allowed_tools, or {"type": "function", "name": …}'
        )
    space = choice.get("namespace")
    return tools, {"name": joined(space, name) if isinstance(space, str) else name}, choice
