"""`/v1/messages`: a conversation in Anthropic's form, its answer complete or as events, and the count of its tokens.

The form is the API's version 2023-06-01 (https://docs.anthropic.com/en/api/messages).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from penstock_client import AsyncStream, Choice, Completion, Delta, Usage

from penstock.common.errors import InvalidArgument
from penstock.gateway.answers import dumps, extras, merged, named_event
from penstock.gateway.custom_tools import ToolNames, check_forced, is_elsewhere
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.history import read_block, read_content
from penstock.gateway.request_fields import Fields, checked, checked_call, options_of, typed

_STOPS = {"LENGTH": "max_tokens", "MAX_TIME": "max_tokens", "ABORTED": "max_tokens", "TOOL_CALLS": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that have no effect here.
_IDLE = ("service_tier", "inference_geo", "cache_control", "speed", "diagnostics", "user_profile_id", "workspace_id")


async def messages(call: HttpCall) -> Answer:
    """Answer a conversation. Raises PenstockError."""
    fields = Fields(call)
    is_stream = fields.get("stream", bool, False)
    options = _options(fields, call)
    stream = _open(fields, call, options)
    if is_stream:
        return _events(stream, call)
    async with stream:
        completion = await stream.result()
    call.request_id = completion.started.request_id
    call.tokens.add([completion.usage])
    return dumps(_whole(completion))


async def count_tokens(call: HttpCall) -> Answer:
    """Answer with the number of tokens of a conversation's prompt. Raises PenstockError."""
    fields = Fields(call)
    conversation = _conversation(fields, call)
    tools, _, _ = _tools(fields, call)
    variables = _variables(fields, {}, call)
    options: dict[str, Any] = {"model": fields.get("model", str, ""), **_ending(conversation)}
    fields.done()
    work = checked(
        options,
        lambda: call.client.render_chat(
            conversation,
            tools=tools,
            chat_template_kwargs=variables or None,
            timeout=call.config.answer_seconds,
            **options,
        ),
    )
    _, ids = await checked_call(work, schema="input_schema")
    return dumps({"input_tokens": len(ids)})


def _options(fields: Fields, call: HttpCall) -> dict[str, Any]:
    """Take the options of generate(). Raises InvalidArgument naming a field."""
    if fields.maybe("max_tokens", int) is None and "max_new_tokens" not in fields:
        raise InvalidArgument("max_tokens", "must be given")
    options = options_of(fields, call)
    sequences = fields.maybe("stop_sequences", list)
    if sequences is not None:
        options["stop_strings"], call.names["stop_strings"] = sequences, "stop_sequences"
    for name in ("output_config", "output_format"):
        form = fields.maybe(name, dict)
        if form is not None and name == "output_config":
            form = typed(form.get("format") or {}, dict, "output_config.format")
        if not form:
            continue
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict | bool):
            raise InvalidArgument(name, "must have the type json_schema and a schema")
        options["json_schema"], call.names["json_schema"] = form["schema"], name
    if (options.get("num_return_sequences") or 1) != 1:
        raise InvalidArgument(call.names["num_return_sequences"], "must be 1: an answer is one message")
    return options


def _open(fields: Fields, call: HttpCall, options: dict[str, Any]) -> AsyncStream:
    """Take the remaining fields, report the ignored ones, and send the request."""
    conversation = _conversation(fields, call)
    tools, choice, parallel = _tools(fields, call)
    variables = _variables(fields, options, call)
    # A caller's explicit setting takes precedence.
    options = {**_ending(conversation), **options, "model": fields.get("model", str, "")}
    for name in _IDLE:
        fields.raw(name)
    if fields.raw("mcp_servers"):
        raise InvalidArgument("mcp_servers", "is not supported: this server calls no tools itself")
    fields.done()
    return checked(
        options,
        lambda: call.client.stream(
            conversation,
            tools=tools,
            chat_template_kwargs=variables or None,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            timeout=call.config.answer_seconds,
            **options,
        ),
        schema="input_schema",
    )


def _variables(fields: Fields, options: dict[str, Any], call: HttpCall) -> dict[str, Any]:
    """Take chat_template_kwargs and thinking; its budget becomes one of the `options`. Raises InvalidArgument."""
    variables = dict(fields.get("chat_template_kwargs", dict, {}))
    thinking = fields.maybe("thinking", dict)
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
            raise InvalidArgument("thinking.type", "must be enabled, adaptive, between_tools or disabled")
        # The variable of Qwen's, GLM's and others' templates; a template without it ignores it.
        variables.setdefault("enable_thinking", kind != "disabled")
        if kind == "enabled" and (tokens := thinking.get("budget_tokens")) is not None:
            options.setdefault("thinking_budget_tokens", typed(tokens, int, "thinking.budget_tokens"))
            call.names.setdefault("thinking_budget_tokens", "thinking.budget_tokens")
    return variables


def _tools(fields: Fields, call: HttpCall) -> tuple[list[dict[str, Any]], str | dict[str, str] | None, bool | None]:
    """Take tools and tool_choice: functions, choice and permission for several calls, in the client's form."""
    tools, names, given = list[dict[str, Any]](), ToolNames(), fields.get("tools", list, [])
    for number, tool in enumerate(given):
        at = f"tools[{number}]"
        kind = typed(tool, dict, at).get("type")
        if is_elsewhere(kind):
            call.ignore(f"tools[].{kind[:64]}")
            continue
        if kind not in (None, "custom"):
            raise InvalidArgument(f"{at}.type", f"must be custom: {str(kind)[:64]} is a tool of another server")
        made: dict[str, Any] = {"name": typed(tool.get("name"), str, f"{at}.name")}
        if tool.get("description") is not None:
            made["description"] = typed(tool["description"], str, f"{at}.description")
        names.add(made["name"], at)
        made["strict"] = typed(tool.get("strict") or False, bool, f"{at}.strict")
        tools.append({**made, "parameters": typed(tool.get("input_schema") or {}, dict, f"{at}.input_schema")})
    call.names |= names.renamed()
    choice = fields.maybe("tool_choice", dict)
    if choice is None:
        return tools, None, None
    one_only = typed(choice.get("disable_parallel_tool_use") or False, bool, "tool_choice.disable_parallel_tool_use")
    parallel = False if one_only else None
    kind = choice.get("type")
    made_choice: str | dict[str, str]
    if kind == "tool":
        made_choice = {"name": typed(choice.get("name"), str, "tool_choice.name")}
    elif isinstance(kind, str) and kind in _CHOICES:
        made_choice = _CHOICES[kind]
    else:
        raise InvalidArgument("tool_choice.type", "must be auto, any, tool or none")
    check_forced(tools, made_choice, given, "tool_choice.name")
    return tools, made_choice, parallel


def _ending(conversation: list[dict[str, Any]]) -> dict[str, Any]:
    """Options that let the model continue its own last message."""
    if conversation[-1]["role"] == "assistant" and "tool_calls" not in conversation[-1]:
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {}


def _conversation(fields: Fields, call: HttpCall) -> list[dict[str, Any]]:
    """Take system and messages. Raises InvalidArgument naming message and block."""
    found: list[dict[str, Any]] = []
    if (system := fields.raw("system")) is not None:
        found.append({"role": "system", "content": read_content(system, "system", "system", call, word="blocks").text})
    given = fields.raw("messages")
    if not isinstance(given, list) or not given:
        raise InvalidArgument("messages", "must be a list with at least one message")
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = typed(message, dict, where).get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidArgument(f"{where}.role", "must be user or assistant")
        call.ignore(*(f"messages[].{key}" for key in message if key not in ("role", "content")))
        content = message.get("content")
        if role == "assistant":
            found.append(_assistant(content, f"{where}.content", call))
        else:
            found += _user(role, content, f"{where}.content", call)
    return found


def _user(role: str, content: Any, where: str, call: HttpCall) -> list[dict[str, Any]]:
    """Return a user's message, and before it a tool's message for every result in it."""
    results: list[dict[str, Any]] = []
    if not isinstance(content, list):
        return [{"role": role, "content": read_content(content, where, role, call, word="blocks").text}]
    texts: list[str] = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(read_block(block, at, role, call, word="blocks").text)
            continue
        results.append(
            {
                "role": "tool",
                "tool_call_id": typed(block.get("tool_use_id"), str, f"{at}.tool_use_id"),
                "content": read_content(block.get("content"), f"{at}.content", "tool", call, word="blocks").text,
            }
        )
    return [*results, {"role": role, "content": "".join(texts)}] if texts or not results else results


def _assistant(content: Any, where: str, call: HttpCall) -> dict[str, Any]:
    said = read_content(content, where, "assistant", call, word="blocks")
    made: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        made["reasoning_content"] = said.reasoning
    if said.calls:
        made["tool_calls"] = said.calls
    return made


def _head(started: Any) -> dict[str, Any]:
    return {"id": f"msg_{started.request_id}", "type": "message", "role": "assistant", "model": started.model}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Anthropic's usage: its input tokens do not include those read from the cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def _stop(choice: Choice, *, has_calls: bool) -> dict[str, str | None]:
    reason = _STOPS.get(choice.finish_reason or "", "end_turn")
    if reason == "end_turn" and choice.stop_string is not None:
        # It also cuts a call, which is not to be run.
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    if reason == "end_turn" and has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": None}


def _whole(completion: Completion) -> dict[str, Any]:
    choice, usage = completion.choices[0], completion.usage
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    content += [
        {"type": "tool_use", "id": one.id, "name": one.name, "input": _input(one.arguments)}
        for one in choice.tool_calls
    ]
    return {
        **_head(completion.started),
        "content": content,
        **_stop(choice, has_calls=bool(choice.tool_calls)),
        "usage": _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        "penstock": extras(completion.started, completion.finished),
    }


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; any other value becomes its `arguments`."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


class _Blocks:
    """Blocks of a streamed answer; one is open at a time."""

    def __init__(self) -> None:
        self.has_calls = False
        self._index = -1
        # Kind of the open block, or the number of its call.
        self._open: str | int | None = None

    def pieces(self, delta: Delta) -> bytes:
        """Events of new output."""
        found = []
        if delta.reasoning:
            thinking = {"type": "thinking", "thinking": "", "signature": ""}
            found += [self._begin("thinking", thinking), self._more("thinking_delta", "thinking", delta.reasoning)]
        if delta.text:
            found += [self._begin("text", {"type": "text", "text": ""}), self._more("text_delta", "text", delta.text)]
        for piece in delta.tool_calls:
            self.has_calls = True
            start: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            found.append(self._begin(piece.index, start))
            if piece.arguments:
                found.append(self._more("input_json_delta", "partial_json", piece.arguments))
        return b"".join(found)

    def end(self) -> bytes:
        """Event that ends the open block."""
        if self._open is None:
            return b""
        self._open = None
        return named_event("content_block_stop", {"index": self._index})

    def _begin(self, kind: str | int, start: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        before = self.end()
        self._open, self._index = kind, self._index + 1
        return before + named_event("content_block_start", {"index": self._index, "content_block": start})

    def _more(self, kind: str, name: str, text: str) -> bytes:
        return named_event("content_block_delta", {"index": self._index, "delta": {"type": kind, name: text}})


async def _events(stream: AsyncStream, call: HttpCall) -> AsyncIterator[bytes]:
    """Events of a streamed answer: the message's start, its blocks in order, reason and usage, its end."""
    blocks = _Blocks()
    begun = False
    async with stream:
        state = stream.state
        while deltas := merged(await stream.read()):
            first = b""
            if not begun:
                begun, first = True, _begin(state.started, call)
            if piece := first + b"".join(map(blocks.pieces, deltas)):
                yield piece
        last = b"" if begun else _begin(state.started, call)
        finished = state.finished
        usage = Usage.of(finished.usage)  # type: ignore[union-attr] # the stream has ended
        call.tokens.add([usage])
        ended = {
            "delta": _stop(state.choices[0], has_calls=blocks.has_calls),
            "usage": _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            "penstock": extras(state.started, finished),
        }
        yield last + blocks.end() + named_event("message_delta", ended) + named_event("message_stop", {})


def _begin(started: Any, call: HttpCall) -> bytes:
    call.request_id = started.request_id
    message = {
        **_head(started),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(started.prompt_tokens, started.cached_tokens, 0),
    }
    return named_event("message_start", {"message": message})
