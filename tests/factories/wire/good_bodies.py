"""Good requests of the gateway's routes, drawn at random: where a fuzzer that changes them begins."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from factories.wire.random_messages import CANARY
from penstock.gateway.text_routes import OPTIONS_JSON

Draw = Callable[[random.Random], Any]
_TEXTS = ("Hello", "What is Penstock?", "one two three", f"Keep this: {CANARY}")


@dataclass(frozen=True)
class Route:
    """A path that takes bodies: the fields without which it refuses all, and others that it knows."""

    path: str
    required: tuple[str, ...]
    fields: Mapping[str, Draw] = field(repr=False)


def _one_of(*values: Any) -> Draw:
    return lambda draw: draw.choice(values)


def _text(draw: random.Random) -> str:
    return draw.choice(_TEXTS)


def _ids(draw: random.Random) -> list[int]:
    return [draw.randrange(300, 1000) for _ in range(draw.choice((1, 2, 5)))]


def _message(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(6):
        case 0:
            return {"role": "system", "content": _text(draw)}
        case 1:
            return {"role": "user", "content": [{"type": "text", "text": _text(draw)}]}
        case 2:
            call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case 3:
            return {"role": "tool", "tool_call_id": "call_1", "content": _text(draw)}
        case _:
            return {"role": "user", "content": _text(draw)}


def _messages(draw: random.Random) -> list[Any]:
    return [_message(draw) for _ in range(draw.choice((0, 0, 1, 3)))] + [{"role": "user", "content": _text(draw)}]


def _schema(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(("string", "integer", "number", "boolean", "null"))
    return {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]}


def _tools(draw: random.Random) -> list[Any]:
    function = {"name": "look", "description": _text(draw), "parameters": _schema(draw)}
    return [{"type": "function", "function": function} for _ in range(draw.choice((1, 1, 2)))]


def _format(draw: random.Random) -> dict[str, Any]:
    return draw.choice(
        (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": _schema(draw), "strict": True}},
        )
    )


def _items(draw: random.Random) -> list[Any]:
    return draw.choice(
        (
            [{"role": "user", "content": _text(draw)}],
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": _text(draw)}]}],
            [{"type": "function_call_output", "call_id": "call_1", "output": _text(draw)}],
            [
                {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "1"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": _text(draw)}]},
            ],
        )
    )


def _blocks(draw: random.Random) -> list[Any]:
    return draw.choice(
        (
            [{"type": "text", "text": _text(draw), "cache_control": {"type": "ephemeral"}}],
            [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "1"}]}],
            [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a"}}],
        )
    )


def _anthropic_messages(draw: random.Random) -> list[Any]:
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 1}}
    turns = [{"role": "user", "content": _text(draw)}, {"role": "assistant", "content": [use]}]
    return [*draw.choice(([], turns)), {"role": "user", "content": draw.choice((_text(draw), _blocks(draw)))}]


def _of_kind(row: Mapping[str, Any]) -> Draw:
    """Draw a value of an option by its row of /options; mostly one that is taken."""
    if row["choices"]:
        return _one_of(*row["choices"])
    low = 0 if row["minimum"] is None else row["minimum"]
    compound: dict[str, Draw] = {
        "int": lambda draw: int(low) + draw.choice((0, 0, 1, 2, 5)),
        "float": lambda draw: low + draw.choice((0.0, 0.1, 0.5, 1.0)),
        "bool": _one_of(True, False),
        "str": _text,
        "ids": _ids,
        "prompt": _one_of("Hello", [300, 301]),
        "sequences": lambda draw: [_ids(draw)],
        "words": lambda draw: draw.choice(([_ids(draw)], [[_ids(draw), _ids(draw)]])),
        "constraints": lambda draw: [{"type": "phrasal", "token_ids": _ids(draw)}],
        "decay": _one_of([1, 1.5]),
        "sequence_bias": lambda draw: [[_ids(draw), 1.5]],
        "logit_bias": lambda draw: {str(token): 1.0 for token in _ids(draw)},
        "strings": lambda draw: [_text(draw)],
        "stop_sequences": _ids,
        "numbers": _one_of([0, 1]),
        "layers": _one_of("low", "high", [1]),
        "watermark": _one_of({"greenlist_ratio": 0.25, "bias": 2.0}),
        "plugins": _one_of([{"name": "none"}]),
        "trie": lambda draw: [_ids(draw)],
    }
    return compound.get(row["kind"], _text)


_OPTIONS: dict[str, Draw] = {row["name"]: _of_kind(row) for row in json.loads(OPTIONS_JSON)["data"]}
_COMMON: dict[str, Draw] = {
    **_OPTIONS,
    "model": _one_of("penstock-demo", "", "no-such-model"),
    "stream": _one_of(True, False),
    "stream_options": _one_of({"include_usage": True}),
    "n": _one_of(1, 2),
    "stop": _one_of("a", ["a", "b"]),
    "max_tokens": _one_of(1, 8),
    "logprobs": _one_of(True, 1),
    "user": _text,
    "metadata": _one_of({"a": "b"}),
    "priority": _one_of(0, 1, -1),
    "cache_salt": _text,
    "min_tokens": _one_of(0, 1),
    "use_beam_search": _one_of(True, False),
    "structured_outputs": lambda draw: draw.choice(({"json": _schema(draw)}, {"regex": "a+"}, {"choice": ["a", "b"]})),
    "guided_json": _schema,
    "guided_regex": _one_of("a+b"),
    "guided_choice": _one_of(["a", "b"]),
    "guided_grammar": _one_of('root ::= "a"'),
}
_TOOLS: dict[str, Draw] = {
    "tools": _tools,
    "tool_choice": _one_of("auto", "none", "required", {"type": "function", "function": {"name": "look"}}),
    "parallel_tool_calls": _one_of(True, False),
}
_CHAT: dict[str, Draw] = {
    **_COMMON,
    **_TOOLS,
    "messages": _messages,
    "max_completion_tokens": _one_of(1, 8),
    "response_format": _format,
    "documents": _one_of([{"title": "a", "text": "b"}]),
    "chat_template_kwargs": _one_of({"enable_thinking": True}, {"a": [1, {"b": None}]}),
    "add_generation_prompt": _one_of(True, False),
    "continue_final_message": _one_of(True, False),
    "reasoning_effort": _one_of("low", "high"),
}
_ANTHROPIC: dict[str, Draw] = {
    **_COMMON,
    "messages": _anthropic_messages,
    "system": lambda draw: draw.choice((_text(draw), _blocks(draw))),
    "stop_sequences": _one_of(["a"]),
    "thinking": _one_of({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}),
    "tools": lambda draw: [{"name": "look", "description": "a", "input_schema": _schema(draw)}],
    "tool_choice": _one_of({"type": "any"}, {"type": "tool", "name": "look"}, {"type": "auto"}),
    "output_config": lambda draw: {"format": {"type": "json_schema", "schema": _schema(draw)}},
}
_RESPONSES: dict[str, Draw] = {
    **_COMMON,
    "input": lambda draw: draw.choice((_text(draw), _items(draw))),
    "instructions": _text,
    "max_output_tokens": _one_of(1, 8),
    "previous_response_id": _one_of("resp_0123456789abcdef0123456789abcdef", "a"),
    "store": _one_of(True, False),
    "text": lambda draw: {"format": {"type": "json_schema", "name": "a", "schema": _schema(draw)}},
    "include": _one_of(["message.output_text.logprobs"]),
    "top_logprobs": _one_of(0, 2),
    "reasoning": _one_of({"effort": "low"}),
    "tools": lambda draw: [{"type": "function", "name": "look", "parameters": _schema(draw)}],
    "tool_choice": _one_of("auto", "required", {"type": "function", "name": "look"}),
    "truncation": _one_of("disabled", "auto"),
    "conversation": _one_of("conv_0", {"id": "a"}),
    "background": _one_of(False),
}


def _metadata(draw: random.Random) -> dict[str, str]:
    return {"note": _text(draw)}


_TEMPLATE: dict[str, Draw] = {
    name: _CHAT[name]
    for name in ("messages", "tools", "documents", "chat_template_kwargs", "add_generation_prompt", "model")
}
ROUTES = (
    Route("/v1/chat/completions", ("messages", "max_tokens"), _CHAT),
    Route(
        "/v1/completions",
        ("prompt", "max_tokens"),
        {
            **_COMMON,
            "prompt": lambda draw: draw.choice((_text(draw), _ids(draw), [_text(draw)] * 3, [_ids(draw)])),
            "echo": _one_of(True, False),
            "suffix": _text,
            "best_of": _one_of(1, 2),
        },
    ),
    Route("/v1/messages", ("messages", "max_tokens"), _ANTHROPIC),
    Route("/v1/messages/count_tokens", ("messages",), _ANTHROPIC),
    Route("/v1/responses", ("input", "max_output_tokens"), _RESPONSES),
    Route("/v1/responses/input_tokens", ("input",), _RESPONSES),
    Route("/v1/responses/compact", ("input",), {"input": _text, "model": _COMMON["model"]}),
    Route("/v1/responses/{name}/cancel", (), {}),
    Route("/v1/conversations", (), {"items": _items, "metadata": _metadata}),
    Route("/v1/conversations/{name}", ("metadata",), {"metadata": _metadata}),
    Route("/v1/conversations/{name}/items", ("items",), {"items": _items}),
    Route(
        "/v1/embeddings",
        ("input",),
        {
            "input": lambda draw: draw.choice((_text(draw), [_text(draw)] * 3)),
            "encoding_format": _one_of("float", "base64"),
            "normalize": _one_of(True, False),
            "dimensions": _one_of(8),
            "model": _COMMON["model"],
        },
    ),
    Route(
        "/v1/score",
        ("items",),
        {
            "items": lambda draw: [{"prompt": _text(draw), "continuation": _text(draw)}] * draw.choice((1, 3)),
            "prompt": _text,
            "continuation": lambda draw: draw.choice((_text(draw), [_text(draw)] * 2)),
            "top_logprobs": _one_of(0, 1, 5),
            "model": _COMMON["model"],
        },
    ),
    Route("/tokenize", ("prompt",), {**_TEMPLATE, "prompt": _text, "add_special_tokens": _one_of(True, False)}),
    Route("/detokenize", ("tokens",), {"tokens": _ids, "skip_special_tokens": _one_of(True, False)}),
    Route("/apply-template", ("messages",), _TEMPLATE),
    # Another kind of body, which is refused.
    Route("/v1/files", (), {"purpose": _one_of("batch"), "file": _text}),
    Route(
        "/v1/batches",
        ("input_file_id", "endpoint"),
        {
            "input_file_id": _one_of("file-0", "file-1"),
            "endpoint": _one_of("/v1/completions", "/v1/embeddings", "/v1/score"),
            "completion_window": _one_of("24h", "1s", "7d"),
            "metadata": _metadata,
        },
    ),
    Route("/v1/batches/{name}/cancel", (), {}),
)
