"""`/v1/responses`: OpenAI's newer form of a conversation, which may build on a response that the gateway keeps.

The form is that of https://platform.openai.com/docs/api-reference/responses, as in openai-python 3.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

from penstock_client import AsyncStream

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.gateway.answers import dumps, merged
from penstock.gateway.background import is_under_way
from penstock.gateway.background_responses import (
    background_of,
    begin_background,
    cancel_background,
    show_response,
)
from penstock.gateway.caller_metadata import read_metadata
from penstock.gateway.conversation_turn import conversation_id_of, items_before
from penstock.gateway.custom_tools import ToolNames, allowed_of, as_function, check_forced, is_elsewhere, joined, only
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.http_errors import HttpError
from penstock.gateway.json_output import read_form
from penstock.gateway.request_fields import Fields, checked, checked_call, options_of, typed
from penstock.gateway.response_items import conversation_of, new_id, read_items
from penstock.gateway.response_progress import ResponsePlan, ResponseProgress, keep
from penstock.gateway.response_store import StoredResponse
from penstock.gateway.store_access import asking_store, items_page, kept_of

# Fields without effect here.
_IDLE = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "stream_options"),
)
_LOGPROBS = "message.output_text.logprobs"


async def responses(call: HttpCall) -> Answer:
    """Answer items with items. Raises PenstockError."""
    fields = Fields(call)
    is_stream = fields.get("stream", bool, False)
    plan = await _read(fields, call)
    if plan.is_background:
        return await begin_background(plan, call, is_stream=is_stream)
    if is_stream:
        return _events(plan, call)
    progress = ResponseProgress(plan)
    async with plan.open() as stream:
        async for delta in stream:
            progress.take((delta,))
        response = progress.end(stream)[0]
        call.request_id = stream.state.started.request_id  # type: ignore[union-attr] # it has
    return dumps(await keep(plan, call, response))


async def count_input_tokens(call: HttpCall) -> Answer:
    """Answer with the number of tokens of the prompt that a request would make. Raises PenstockError."""
    fields = Fields(call)
    fields.raw("stream")
    plan = await _read(fields, call)
    _, ids = await checked_call(plan.render(), schema="parameters")
    return dumps({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_response(call: HttpCall) -> Answer:
    """Answer with a kept response, or with its events. Raises NotFound, InvalidArgument, FailedPrecondition."""
    return await show_response(call, await _stored(call))


async def cancel_response(call: HttpCall) -> Answer:
    """End a response that is made in the background. Raises NotFound, FailedPrecondition."""
    return await cancel_background(call, await _stored(call))


async def compact_response(call: HttpCall) -> Answer:
    """Refuse to compact a conversation."""
    raise FailedPrecondition(
        "compaction is not supported: send fewer items, or a summary that a response made",
        reason="COMPACTION_NOT_SUPPORTED",
    )


async def list_input_items(call: HttpCall) -> Answer:
    """Answer with the items of a response's request, the last first. Raises NotFound, InvalidArgument."""
    return items_page((await _stored(call)).input, call)


async def delete_response(call: HttpCall) -> Answer:
    """Delete a kept response; one that is being made ends. Raises NotFound."""
    with asking_store():
        was_there = await kept_of(call).responses.delete(call.owner, call.tail)
        if was_there and call.background is not None:
            await call.background.forget(call.owner, call.tail)
    if not was_there:
        raise _unknown(call.tail)
    return dumps({"id": call.tail, "object": "response", "deleted": True})


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"no response {response_id[:64]!r} of this caller: never kept, deleted, or too old", reason="RESPONSE_NOT_FOUND"
    )


async def _stored(call: HttpCall) -> StoredResponse:
    with asking_store():
        found = await kept_of(call).responses.get(call.owner, call.tail)
    if found is None:
        raise _unknown(call.tail)
    return found


async def _read(fields: Fields, call: HttpCall) -> ResponsePlan:
    """Parse the request. Raises PenstockError naming a field."""
    options = options_of(fields, call)
    if (most := fields.maybe("max_output_tokens", int)) is not None:
        options["max_new_tokens"], call.names["max_new_tokens"] = most, "max_output_tokens"
    if (options.get("num_return_sequences") or 1) != 1:
        raise InvalidArgument(call.names["num_return_sequences"], "must be 1: an answer is one response")
    form = _take_text(fields, options, call)
    _take_include(fields, options, call)
    variables = dict(fields.get("chat_template_kwargs", dict, {}))
    reasoning = fields.maybe("reasoning", dict) or {}
    if (effort := reasoning.get("effort")) is not None:
        variables.setdefault("reasoning_effort", typed(effort, str, "reasoning.effort"))
    tools, given_tools, names = _tools(fields, call)
    tools, choice, given_choice = _tool_choice(fields, tools, names)
    check_forced(tools, choice, given_tools, "tool_choice.name")
    call.names |= names.renamed()
    parallel = fields.maybe("parallel_tool_calls", bool)
    instructions = fields.maybe("instructions", str)
    options["model"] = fields.get("model", str, "")
    metadata = read_metadata(fields.get("metadata", dict, {}))
    _refuse_others(fields)
    previous, conversation = fields.maybe("previous_response_id", str), conversation_id_of(fields)
    if previous is not None and conversation is not None:
        raise InvalidArgument("conversation", "does not go together with previous_response_id")
    store, is_background = fields.maybe("store", bool), fields.get("background", bool, False)
    if is_background:
        background_of(call)
        if store is False:
            raise InvalidArgument("store", "must not be false with background: the response is read from the store")
    given = read_items(fields.raw("input"))
    for name in _IDLE:
        fields.raw(name)
    fields.done()
    earlier = await _earlier(call, previous) if previous is not None else []
    if conversation is not None:
        earlier = await items_before(call, conversation)
    messages = conversation_of([*earlier, *given], len(earlier), call)
    call.names["messages"] = "input"
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise InvalidArgument("input", "must have a message")

    def send() -> AsyncStream:
        return checked(
            options,
            lambda: call.client.stream(
                messages,
                tools=tools,
                chat_template_kwargs=variables or None,
                tool_choice=choice,
                parallel_tool_calls=parallel,
                timeout=call.config.answer_seconds,
                **options,
            ),
            schema="parameters",
        )

    def render() -> Awaitable[tuple[str, list[int]]]:
        return checked(
            {},
            lambda: call.client.render_chat(
                messages,
                tools=tools,
                chat_template_kwargs=variables or None,
                model=options["model"],
                timeout=call.config.answer_seconds,
            ),
            schema="parameters",
        )

    is_stored = store is not False and call.kept is not None
    echo = {
        "instructions": instructions,
        "max_output_tokens": options.get("max_new_tokens"),
        "parallel_tool_calls": parallel is not False,
        "previous_response_id": previous,
        "conversation": None if conversation is None else {"id": conversation},
        "background": is_background,
        "reasoning": {"effort": effort, "summary": None},
        "store": is_stored,
        "temperature": options.get("temperature"),
        "text": {"format": form},
        "tool_choice": given_choice,
        "tools": given_tools,
        "top_p": options.get("top_p"),
        "truncation": "disabled",
        "metadata": metadata,
    }
    return ResponsePlan(
        response_id=new_id("resp"),
        model=options["model"],
        echo=echo,
        input=given,
        previous=previous,
        conversation=conversation,
        is_stored=is_stored,
        is_background=is_background,
        open=send,
        render=render,
        tool_names=names,
    )


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


async def _events(plan: ResponsePlan, call: HttpCall) -> AsyncIterator[bytes]:
    """Events of a streamed answer: the response's start, its items in order, its end."""
    progress = ResponseProgress(plan)

    def begin(started: Any) -> bytes:
        call.request_id = started.request_id
        begun = progress.begin(started)
        return b"".join(progress.numbered([("response.created", begun[0][1]), *begun]))

    async with plan.open() as stream:
        while deltas := merged(await stream.read()):
            first = b"" if progress.has_begun else begin(stream.state.started)
            if piece := first + b"".join(progress.numbered(progress.take(deltas))):
                yield piece
        first = b"" if progress.has_begun else begin(stream.state.started)
        response, last = progress.end(stream)
    response = await keep(plan, call, response)
    yield first + b"".join(progress.numbered([*last, (f"response.{response['status']}", {"response": response})]))
