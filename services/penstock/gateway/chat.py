"""`/v1/chat/completions`: a conversation in, an answer out, complete or as events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock_client import AsyncStream, Choice, Completion, Delta, Usage

from penstock.common.errors import InvalidArgument
from penstock.gateway.answers import (
    DONE,
    AnswerHead,
    chat_logprobs,
    dumps,
    event,
    extras,
    finish_reason,
    quoted,
    stop_reason,
    tool_call_pieces,
    usage_of,
)
from penstock.gateway.chat_history import messages_of
from penstock.gateway.chat_tools import CustomPieces, call_shown, take_tools
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.followed import Followed
from penstock.gateway.older_functions import ENDED_BY_CALL, function_call, function_call_delta
from penstock.gateway.request_fields import Fields, checked, options_of, typed


async def chat_completions(call: HttpCall) -> Answer:
    """Answer a conversation. Raises PenstockError."""
    fields = Fields(call)
    is_stream = fields.get("stream", bool, False)
    wants_usage = include_usage(fields)
    _check_modalities(fields)
    options = options_of(fields, call)
    wants_logprobs = _take_logprobs(fields, options, call)
    stream = open_chat(fields, call, options)
    if is_stream:
        return _ChatChunks(stream, call, wants_logprobs=wants_logprobs, wants_usage=wants_usage)
    async with stream:
        completion = await stream.result()
    call.request_id = completion.started.request_id
    usages = [completion.usage]
    call.tokens.add(usages)
    return dumps(_whole(completion, usages, call, wants_logprobs=wants_logprobs))


def open_chat(fields: Fields, call: HttpCall, options: dict[str, Any]) -> AsyncStream:
    """Take the remaining fields of a chat, report the ignored ones, and send the request."""
    messages = messages_of(fields.raw("messages"), call)
    tools, choice, call.custom_tools = take_tools(fields, call)
    parallel = False if call.has_functions else fields.maybe("parallel_tool_calls", bool)
    documents = fields.get("documents", list, [])
    variables = dict(fields.get("chat_template_kwargs", dict, {}))
    if (effort := fields.maybe("reasoning_effort", str)) is not None:
        variables.setdefault("reasoning_effort", effort)
    options["model"] = fields.get("model", str, "")
    fields.done()
    return checked(
        options,
        lambda: call.client.stream(
            messages,
            tools=tools,
            documents=documents,
            chat_template_kwargs=variables or None,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            timeout=call.config.answer_seconds,
            **options,
        ),
    )


def include_usage(fields: Fields) -> bool:
    """Take stream_options. Raises InvalidArgument."""
    asked = (fields.maybe("stream_options", dict) or {}).get("include_usage")
    return False if asked is None else typed(asked, bool, "stream_options.include_usage")


def _check_modalities(fields: Fields) -> None:
    """Take modalities. Raises InvalidArgument for an answer that is not text alone."""
    if (kinds := fields.maybe("modalities", list)) and any(kind != "text" for kind in kinds):
        raise InvalidArgument("modalities", 'must be ["text"]: Penstock\'s models write text')


def _take_logprobs(fields: Fields, options: dict[str, Any], call: HttpCall) -> bool:
    """Take logprobs and top_logprobs; the second needs the first. Raises InvalidArgument."""
    wants, top = fields.get("logprobs", bool, False), fields.maybe("top_logprobs", int)
    if top is not None and not wants:
        raise InvalidArgument("top_logprobs", "needs logprobs: true")
    if wants:
        options["top_logprobs"] = top or 0
    call.names["top_logprobs"] = "top_logprobs"
    return wants


def _whole(completion: Completion, usages: list[Usage], call: HttpCall, *, wants_logprobs: bool) -> dict[str, Any]:
    started = completion.started
    head = AnswerHead("chatcmpl", "chat.completion", started.request_id, started.model)
    return head.with_(
        choices=[_choice(choice, call, wants_logprobs=wants_logprobs) for choice in completion.choices],
        usage=usage_of(usages),
        system_fingerprint=None,
        penstock=extras(started, completion.finished),
    )


def _choice(choice: Choice, call: HttpCall, *, wants_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        if call.has_functions:
            message["function_call"] = function_call(choice.tool_calls[0])
        else:
            message["tool_calls"] = [call_shown(one, call.custom_tools) for one in choice.tool_calls]
    made = {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs) if wants_logprobs else None,
        "finish_reason": _ended(choice, call),
        "stop_reason": stop_reason(choice),
    }
    if choice.token_ids:
        made["token_ids"] = choice.token_ids
    return made


def _ended(choice: Choice, call: HttpCall) -> str:
    reason = finish_reason(choice)
    return ENDED_BY_CALL if call.has_functions and reason == "tool_calls" else reason


class _ChatChunks(Followed):
    """Chunks of a streamed answer, in OpenAI's order: role, deltas, reasons, usage, [DONE]."""

    def __init__(self, stream: AsyncStream, call: HttpCall, *, wants_logprobs: bool, wants_usage: bool) -> None:
        super().__init__(stream)
        self._call = call
        self._wants_logprobs, self._wants_usage = wants_logprobs, wants_usage
        # Bytes of a chunk before its choices, and after them. With include_usage every chunk but the last has a usage
        # of null.
        self._opened, self._tail = b"", b',"usage":null}\n\n' if wants_usage else b"}\n\n"
        self._begun: set[int] = set()
        self._custom = CustomPieces(call.custom_tools) if call.custom_tools else None
        # Bytes around the text of a plain chunk, by index: only the text is new for each token.
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def begin(self) -> None:
        started: Any = self.stream.state.started
        self._call.request_id = started.request_id
        self._head = AnswerHead("chatcmpl", "chat.completion.chunk", started.request_id, started.model)
        self._opened = b"data: " + dumps(self._head.fields)[:-1] + b',"choices":'

    def of(self, deltas: Iterable[Delta]) -> bytes:
        out = []
        for delta in deltas:
            index, text = delta.index, delta.text
            if index not in self._begun:
                out.append(self._role(index))
            if text and not (delta.reasoning or delta.tool_calls or self._wants_logprobs or delta.token_ids):
                around = self._around.get(index) or self._make_around(index)
                out += (around[0], quoted(text), around[1])
            else:
                out.append(self._rich(delta))
        return b"".join(out)

    async def end(self) -> bytes:
        state, last = self.stream.state, b""
        for index in sorted(state.choices):
            choice = state.choices[index]
            if index not in self._begun:
                last += self._role(index)
            if self._custom is not None and (calls := self._custom.end(index)):
                last += self._chunk(index, {"tool_calls": calls})
            last += self._chunk(index, {}, finish_reason=_ended(choice, self._call), stop_reason=stop_reason(choice))
        usages = [Usage.of(state.finished.usage)] if state.finished is not None else []
        self._call.tokens.add(usages)
        if self._wants_usage and usages:
            own, usage = extras(state.started, state.finished), usage_of(usages)
            last += event(self._head.with_(choices=[], usage=usage, penstock=own))
        return last + DONE

    def _role(self, index: int) -> bytes:
        self._begun.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _make_around(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = self._chunk(index, {"content": "\0"}).partition(b'"\\u0000"')
        self._around[index] = before, after
        return before, after

    def _rich(self, delta: Delta) -> bytes:
        """Chunk of a delta with more than text; empty if there is nothing to send."""
        content: dict[str, Any] = {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.text:
            content["content"] = delta.text
        if delta.tool_calls:
            pieces = tool_call_pieces(delta)
            if self._call.has_functions:
                content["function_call"] = function_call_delta(pieces)
            elif shown := pieces if self._custom is None else self._custom.held(delta.index, pieces):
                content["tool_calls"] = shown
        more: dict[str, Any] = {}
        if self._wants_logprobs and delta.logprobs:
            more["logprobs"] = chat_logprobs(delta.logprobs)
        if delta.token_ids:
            more["token_ids"] = delta.token_ids
        return self._chunk(delta.index, content, **more) if content or more else b""

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return self._opened + dumps([choice]) + self._tail
