"""`/v1/responses`: OpenAI's newer form of a conversation, which may build on a response that the gateway keeps.

The form is that of https://platform.openai.com/docs/api-reference/responses, as in openai-python 3.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from penstock_client import AsyncStream, Delta, Usage

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from penstock.common.logging import get_logger
from penstock.gateway.answers import chat_logprobs, dumps, extras, merged, named_event, usage_of
from penstock.gateway.custom_tools import ToolNames, allowed_of, as_function, check_forced, is_elsewhere, joined, only
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.http_errors import HttpError
from penstock.gateway.json_output import read_form
from penstock.gateway.request_fields import Fields, checked, checked_call, options_of, typed
from penstock.gateway.response_items import Event, OutputItems, conversation_of, new_id, read_items
from penstock.gateway.response_store import ResponseStore, StoredResponse, StoreFailed

# Fields without effect here.
_IDLE = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "stream_options"),
)
_LOGPROBS = "message.output_text.logprobs"
_LIMIT = re.compile("[0-9]{1,3}")
_INCOMPLETE = {"LENGTH", "MAX_TIME", "ABORTED"}
_log = get_logger("penstock.gateway")


@dataclass(slots=True)
class _ResponsePlan:
    """A parsed request."""

    response_id: str
    # Fields of the answer that repeat the request.
    echo: dict[str, Any]
    input: list[dict[str, Any]]
    previous: str | None
    is_stored: bool
    open: Callable[[], AsyncStream]
    # Render the prompt: its text and ids.
    render: Callable[[], Awaitable[tuple[str, list[int]]]]
    tool_names: ToolNames


async def responses(call: HttpCall) -> Answer:
    """Answer items with items. Raises PenstockError."""
    fields = Fields(call)
    is_stream = fields.get("stream", bool, False)
    plan = await _read(fields, call)
    if is_stream:
        return _events(plan, call)
    items = OutputItems(plan.tool_names)
    async with plan.open() as stream:
        async for delta in stream:
            _take(items, delta)
        response = _ended(plan, stream, items, int(time.time()))[0]
        call.request_id = stream.state.started.request_id  # type: ignore[union-attr] # it has
    return dumps(await _keep(plan, call, response))


async def count_input_tokens(call: HttpCall) -> Answer:
    """Answer with the number of tokens of the prompt that a request would make. Raises PenstockError."""
    fields = Fields(call)
    fields.raw("stream")
    plan = await _read(fields, call)
    _, ids = await checked_call(plan.render(), schema="parameters")
    return dumps({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_response(call: HttpCall) -> Answer:
    """Answer with a kept response. Raises NotFound."""
    return dumps((await _stored(call)).response)


async def list_input_items(call: HttpCall) -> Answer:
    """Answer with the items of a response's request, the last first. Raises NotFound, InvalidArgument."""
    stored = await _stored(call)
    asked = {name: values[-1] for name, values in parse_qs(call.query).items()}
    order, limit = asked.get("order", "desc"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidArgument("order", "must be asc or desc")
    if _LIMIT.fullmatch(limit) is None or not 1 <= int(limit) <= 100:
        raise InvalidArgument("limit", "must be from 1 to 100")
    items = stored.input if order == "asc" else stored.input[::-1]
    if (after := asked.get("after")) is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidArgument("after", "must be the id of one of the items")
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return dumps({"object": "list", "data": shown, **ends, "has_more": len(shown) < len(items)})


async def delete_response(call: HttpCall) -> Answer:
    """Delete a kept response. Raises NotFound."""
    with _asking_store():
        was_there = await _store(call).delete(call.owner, call.tail)
    if not was_there:
        raise _unknown(call.tail)
    return dumps({"id": call.tail, "object": "response", "deleted": True})


def _store(call: HttpCall) -> ResponseStore:
    if call.responses is None:
        raise FailedPrecondition("this gateway keeps no responses (--response-store)", reason="RESPONSE_STORE_OFF")
    return call.responses


@contextmanager
def _asking_store() -> Iterator[None]:
    """Turn a store's failure into the caller's error."""
    try:
        yield
    except StoreFailed as error:
        _log.error("the store of responses failed", error=str(error))
        raise Unavailable(
            "the store of responses does not answer: try again, or send all items", reason="RESPONSE_STORE_DOWN"
        ) from error


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"no response {response_id[:64]!r} of this caller: never kept, deleted, or too old", reason="RESPONSE_NOT_FOUND"
    )


async def _stored(call: HttpCall) -> StoredResponse:
    with _asking_store():
        found = await _store(call).get(call.owner, call.tail)
    if found is None:
        raise _unknown(call.tail)
    return found


async def _read(fields: Fields, call: HttpCall) -> _ResponsePlan:
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
    metadata = fields.get("metadata", dict, {})
    _refuse_others(fields)
    previous = fields.maybe("previous_response_id", str)
    store = fields.maybe("store", bool)
    given = read_items(fields.raw("input"))
    for name in _IDLE:
        fields.raw(name)
    fields.done()
    earlier = await _earlier(call, previous) if previous is not None else []
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

    is_stored = store is not False and call.responses is not None
    echo = {
        "instructions": instructions,
        "max_output_tokens": options.get("max_new_tokens"),
        "parallel_tool_calls": parallel is not False,
        "previous_response_id": previous,
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
    return _ResponsePlan(new_id("resp"), echo, given, previous, is_stored, send, render, names)


async def _earlier(call: HttpCall, previous: str) -> list[dict[str, Any]]:
    """Return the items of a response and of all those before it. Raises InvalidArgument."""
    try:
        with _asking_store():
            chain = await _store(call).chain(call.owner, previous, call.config.max_body_bytes)
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
    return [item for stored in chain for item in (*stored.input, *stored.response["output"])]


def _refuse_others(fields: Fields) -> None:
    """Raise InvalidArgument for a field that would change the answer and is not supported."""
    if fields.raw("background"):
        raise InvalidArgument("background", "is not supported: stream, or wait for the answer")
    if fields.raw("truncation") not in (None, "disabled"):
        raise InvalidArgument("truncation", "must be disabled: too long a prompt is refused")
    for name in ("conversation", "prompt"):
        if fields.raw(name):
            raise InvalidArgument(name, "is not supported: use previous_response_id, or send the items")


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


def _take(items: OutputItems, delta: Delta) -> list[Event]:
    """Add a delta to the items; return the events for it."""
    found = items.reason(delta.reasoning) if delta.reasoning else []
    if delta.text or (delta.logprobs and not (delta.reasoning or delta.tool_calls)):
        found += items.write(delta.text, chat_logprobs(delta.logprobs)["content"] if delta.logprobs else [])
    for piece in delta.tool_calls:
        found += items.call(piece.index, piece.id, piece.name, piece.arguments)
    return found


def _response(plan: _ResponsePlan, started: Any, status: str, **more: Any) -> dict[str, Any]:
    return {
        "id": plan.response_id,
        "object": "response",
        "created_at": more.pop("created_at"),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": started.model,
        "output": [],
        **plan.echo,
        "usage": None,
        **more,
    }


def _ended(
    plan: _ResponsePlan, stream: AsyncStream, items: OutputItems, created_at: int
) -> tuple[dict[str, Any], list[Event]]:
    """Return the response, and the events of its last item."""
    state = stream.state
    started, finished = state.started, state.finished
    is_cut = (state.choices[0].finish_reason or "") in _INCOMPLETE
    status = "incomplete" if is_cut else "completed"
    last = items.end(status)
    usage = usage_of([Usage.of(finished.usage)])  # type: ignore[union-attr] # the stream has ended
    return (
        _response(
            plan,
            started,
            status,
            created_at=created_at,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=items.items,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
            penstock=extras(started, finished),
        ),
        last,
    )


async def _keep(plan: _ResponsePlan, call: HttpCall, response: dict[str, Any]) -> dict[str, Any]:
    """Keep a response if it is to be kept; return it. If that fails, the response says so."""
    call.tokens.prompt += response["usage"]["input_tokens"]
    call.tokens.output += response["usage"]["output_tokens"]
    if not plan.is_stored or call.responses is None:
        return response
    try:
        await call.responses.put(call.owner, StoredResponse(response, plan.input), plan.previous)
    except StoreFailed as error:
        _log.error("a response was not kept", error=str(error))
        return {**response, "store": False}
    return response


async def _events(plan: _ResponsePlan, call: HttpCall) -> AsyncIterator[bytes]:
    """Events of a streamed answer: the response's start, its items in order, its end."""
    items = OutputItems(plan.tool_names)
    number = 0
    created_at = 0

    def made(events: list[Event]) -> bytes:
        nonlocal number
        found = []
        for name, value in events:
            found.append(named_event(name, {"sequence_number": number, **value}))
            number += 1
        return b"".join(found)

    def begin(started: Any) -> bytes:
        nonlocal created_at
        created_at, call.request_id = int(time.time()), started.request_id
        response = _response(plan, started, "in_progress", created_at=created_at)
        return made([("response.created", {"response": response}), ("response.in_progress", {"response": response})])

    async with plan.open() as stream:
        while deltas := merged(await stream.read()):
            first = b"" if created_at else begin(stream.state.started)
            if piece := first + b"".join([made(_take(items, delta)) for delta in deltas]):
                yield piece
        first = b"" if created_at else begin(stream.state.started)
        response, last = _ended(plan, stream, items, created_at)
    response = await _keep(plan, call, response)
    yield first + made([*last, (f"response.{response['status']}", {"response": response})])
