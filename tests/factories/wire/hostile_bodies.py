"""Bodies for every route of the gateway, and each of them with one value replaced by one that no client should send."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from factories.wire.made_things import MadeThings, target_of
from penstock.compat.option_names import ALIASES
from penstock.generation.options.table import SECTIONS

_HOLE = "\x00hole"
_TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_FUNCTION = {"name": "f", "description": "does", "parameters": _SCHEMA}
_MESSAGES: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "n"},
    {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL], "reasoning_content": "so"},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
_KWARGS = {"a": [1, {"b": None}]}
# Options that are read as fields of their own on every route that generates; one token is enough.
_GENERATION: dict[str, Any] = {"temperature": 0, "model": ""}
_OTHER_NAMES = (
    *(alias for aliases in ALIASES.values() for alias in aliases),
    *("best_of", "use_beam_search", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_json_object", "json_schema", "json_object", "regex", "grammar", "choice", "config", "adapter"),
    *("cache_salt", "add_special_tokens", "inputs_embeds", "inputs_embeds_before_ids", "add_generation_prompt"),
    *(
        "request_id",
        "session_id",
        "priority",
        "continue_final_message",
        "stream",
        "structured_outputs",
        "negative_prompt",
    ),
)
OPTIONS = tuple(
    sorted({*_OTHER_NAMES, *(name for rows in SECTIONS.values() for name in rows)} - {"negative_prompt_text"})
)
# In a body, the id of a file that is there.
_FILE = "{file}"
_ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "so"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
]
_METADATA = {"a": "b"}
# What a prompt of /v1/responses is made of.
_PROMPT_OF_RESPONSE: dict[str, Any] = {
    "input": _ITEMS,
    "instructions": "Be brief",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
    "reasoning": {"effort": "low"},
    "tools": [{"type": "function", **_FUNCTION}],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "truncation": "disabled",
    "chat_template_kwargs": _KWARGS,
}
# Path -> a body that the route takes, with every field that it reads by itself. A path with a name is that of
# something that is there.
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "max_tokens": 1,
        "messages": _MESSAGES,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True,
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": _KWARGS,
        "reasoning_effort": "low",
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
        **_GENERATION,
    },
    "/v1/completions": {
        "max_tokens": 1,
        "prompt": ["Hello", [1, 2]],
        "echo": False,
        "logprobs": 1,
        "suffix": "",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        **_GENERATION,
    },
    "/v1/messages": {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "Be brief"}],
        "messages": [
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": ""},
                    {"type": "text", "text": "Yes"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1]}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}]},
        ],
        "stop_sequences": ["a"],
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        "tools": [{"name": "f", "description": "does", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "none", "disable_parallel_tool_use": False},
        "thinking": {"type": "disabled"},
        "chat_template_kwargs": _KWARGS,
        "metadata": {"user_id": "u"},
        **_GENERATION,
    },
    "/v1/messages/count_tokens": {
        "system": "Be brief",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled"},
        "chat_template_kwargs": _KWARGS,
        "model": "",
    },
    "/v1/responses": {
        **_PROMPT_OF_RESPONSE,
        "max_output_tokens": 1,
        "include": ["message.output_text.logprobs"],
        "metadata": _METADATA,
        "store": True,
        "background": False,
        **_GENERATION,
    },
    "/v1/responses/input_tokens": {**_PROMPT_OF_RESPONSE, "stream": False, "model": ""},
    # Nothing of these two is read.
    "/v1/responses/compact": {"input": _ITEMS, "model": ""},
    "/v1/responses/{name}/cancel": {"a": [1]},
    "/v1/conversations": {"items": _ITEMS, "metadata": _METADATA},
    "/v1/conversations/{name}": {"metadata": _METADATA},
    "/v1/conversations/{name}/items": {"items": _ITEMS},
    "/v1/batches": {
        "input_file_id": _FILE,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": _METADATA,
    },
    "/v1/batches/{name}/cancel": {"a": [1]},
    "/v1/embeddings": {
        "input": ["Hello"],
        "encoding_format": "base64",
        "normalize": True,
        "model": "",
        "adapter": "",
    },
    "/v1/score": {
        "items": [{"prompt": "Hello", "continuation": " you"}],
        "prompt": "Hello",
        "continuation": [" there"],
        "top_logprobs": 1,
        "model": "",
        "adapter": "",
    },
    "/tokenize": {"prompt": "Hello", "add_special_tokens": True, "model": ""},
    "/detokenize": {"tokens": [1, 2], "skip_special_tokens": True, "model": ""},
    "/apply-template": {
        "messages": _MESSAGES,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": _KWARGS,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "model": "",
    },
}
# Routes that read the options of generate().
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


_CONSTRAINED = ("tool_choice", "response_format", "output_config", "text")


def _nested(depth: int, opened: str, closed: str) -> str:
    return opened * depth + "1" + closed * depth


# JSON texts. A name, since many are long.
VALUES: Mapping[str, str] = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "half": "0.5",
    "int32": str(1 << 31),
    "uint32": str(1 << 32),
    "int64": str(1 << 63),
    "uint64": str(1 << 64),
    "below int64": str(-(1 << 63) - 1),
    "64 digits": "9" * 64,
    "400 digits": "9" * 400,
    "5000 digits": "-" + "9" * 5000,
    "float32": "1e300",
    "minus float32": "-1e39",
    "infinite": "1e400",
    "empty text": '""',
    "text": '"x"',
    "nul": '"\\u0000"',
    "half a pair": '"a\\ud800"',
    "digits": '"' + "9" * 5000 + '"',
    "JSON in text": json.dumps(_nested(600, "[", "]")),
    "object in text": json.dumps(_nested(600, '{"a":', "}")),
    "no list": "[]",
    "lists": "[[]]",
    "list of null": "[null]",
    "list of numbers": "[1e300, 0.5, -1]",
    "list of large": f"[{1 << 64}, {'9' * 64}]",
    "list of texts": '["x", "\\u0000"]',
    "list of halves": '["\\udfff"]',
    "list of objects": "[{}]",
    "lists of lists": "[[[1]]]",
    "object": "{}",
    "empty name": '{"": {}}',
    "digits as a name": '{"' + "9" * 5000 + '": 1}',
    "half a name": '{"\\ud800": 1}',
    "types": '{"type": [], "function": {}, "name": {}, "text": [], "format": [], "token_ids": "x"}',
    "object of large": f'{{"type": {1 << 64}, "name": {"9" * 64}, "a": 1e300}}',
    "30 lists": _nested(30, "[", "]"),
    "45 lists": _nested(45, "[", "]"),
    "55 lists": _nested(55, "[", "]"),
    "20 objects": _nested(20, '{"a":', "}"),
    "34 objects": _nested(34, '{"a":', "}"),
    "50 objects": _nested(50, '{"a":', "}"),
    "60 objects": _nested(60, '{"properties":', "}"),
    "600 lists": _nested(600, "[", "]"),
    "600 objects": _nested(600, '{"a":', "}"),
}


@dataclass(frozen=True)
class Case:
    """A request with one hostile value."""

    path: str
    # Place of the value: names and numbers; none for the whole body.
    place: tuple[str | int, ...]
    value: str
    # The answer is asked for as a stream.
    is_stream: bool = False

    @property
    def field(self) -> str:
        """Name of the field of the body that the value is in."""
        return str(self.place[0]) if self.place else "body"

    def sent(self, made: MadeThings) -> tuple[bytes, bytes]:
        """Return the target and the body."""
        return target_of(self.path, made), self._body().replace(_FILE, made.ids["files"]).encode()

    def _body(self) -> str:
        if not self.place:
            return VALUES[self.value]
        # No copy.deepcopy: parts that are the same object would stay so.
        body = json.loads(json.dumps(BODIES[self.path]))
        if self.place[0] not in body:
            # An option: without what it does not go together with.
            for name in _CONSTRAINED:
                body.pop(name, None)
        at: Any = body
        for step in self.place[:-1]:
            at = at[step]
        if self.is_stream:
            body["stream"] = True
        at[self.place[-1]] = _HOLE
        return json.dumps(body).replace(json.dumps(_HOLE), VALUES[self.value])

    def __str__(self) -> str:
        return f"{self.path}{' stream' * self.is_stream} {'.'.join(map(str, self.place))}: {self.value}"


def _places(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the way to every value within a value."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*way, step)
        yield from _places(inner, (*way, step))


def hostile_cases(path: str, *, is_stream: bool = False) -> list[Case]:
    """Return every case of a route: each value at each place of its body, and for each option."""
    places: list[tuple[str | int, ...]] = [(), *_places(BODIES[path])]
    if path in GENERATING:
        places += [(name,) for name in OPTIONS if name not in BODIES[path]]
    return [Case(path, place, value, is_stream) for place in places for value in VALUES]


def whole_case(path: str, made: MadeThings) -> tuple[bytes, bytes]:
    """Return the target and the body that the cases change."""
    return target_of(path, made), json.dumps(BODIES[path]).replace(_FILE, made.ids["files"]).encode()
