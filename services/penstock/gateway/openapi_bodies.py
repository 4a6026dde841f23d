"""Bodies of the gateway's requests for its OpenAPI document: fields by route, beside the options of generate().

tests/unit/gateway/test_openapi.py holds these tables to what the handlers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any]"


def _kind(kind: str, description: str = "", **more: Any) -> Schema:
    return {"type": kind, **({"description": description} if description else {}), **more}


def _list(items: Schema | None = None, description: str = "") -> Schema:
    return _kind("array", description, items=items or {})


TEXT, NUMBER, FLAG, OBJECT = _kind("string"), _kind("integer"), _kind("boolean"), _kind("object")
_IDS = _list(NUMBER)
_MODEL = _kind("string", "Model or adapter; empty: the only one.")
_ADAPTER = _kind("string", "LoRA adapter of the model.")
_METADATA = _kind("object", "At most 16 pairs of texts.", additionalProperties=TEXT)
_MESSAGE = _kind(
    "object",
    "A turn: role, content (a text or parts), tool_calls, tool_call_id, reasoning_content.",
    required=["role"],
    properties={"role": TEXT, "content": {}},
)
_ITEM = _kind("object", "A message, a call, its output or reasoning, as OpenAI's.", properties={"type": TEXT})
_FUNCTION = _kind(
    "object",
    required=["name"],
    properties={"name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG},
)
_TOOL = _kind("object", properties={"type": TEXT, "function": _FUNCTION})
_TEMPLATE: Mapping[str, Schema] = {
    "messages": {"anyOf": [_list(_MESSAGE), TEXT], "description": "Turns; a text is one of a user."},
    "tools": _list(_TOOL),
    "documents": _list(OBJECT, "Texts with titles, for templates that take them."),
    "chat_template_kwargs": _kind("object", "Variables of the chat template."),
    "model": _MODEL,
}
_TURN: Mapping[str, Schema] = {
    "add_generation_prompt": _kind("boolean", "Whether the prompt ends with the start of an answer."),
    "continue_final_message": _kind("boolean", "The answer continues the last message."),
}
_STREAM: Mapping[str, Schema] = {
    "stream": _kind("boolean", "Answer with server-sent events."),
    "stream_options": _kind("object", properties={"include_usage": FLAG}),
}
_CHAT: Mapping[str, Schema] = {
    **_TEMPLATE,
    **_STREAM,
    "tool_choice": {"description": "auto, none, required, or a function by name."},
    "parallel_tool_calls": _kind("boolean", "false: at most one call."),
    "modalities": _kind("array", "text alone.", items=TEXT),
    "functions": _kind("array", "OpenAI's form of tools before `tools`: one call at most.", items=OBJECT),
    "function_call": {"description": "auto, none, or a function of `functions` by name."},
    "reasoning_effort": TEXT,
    "logprobs": FLAG,
    "top_logprobs": NUMBER,
}
_SCORE_ITEM = _kind("object", required=["prompt", "continuation"], properties={"prompt": TEXT, "continuation": TEXT})
_RESPONSE: Mapping[str, Schema] = {
    **_STREAM,
    "model": _MODEL,
    "input": {"oneOf": [TEXT, _list(_ITEM)]},
    "instructions": _kind("string", "System message before all items."),
    "max_output_tokens": NUMBER,
    "previous_response_id": _kind("string", "Response to build on."),
    "conversation": {"oneOf": [TEXT, _kind("object", required=["id"], properties={"id": TEXT})]},
    "background": _kind("boolean", "Answer at once; the response is polled."),
    "store": _kind("boolean", "Keep the response; true by default."),
    "metadata": _METADATA,
    "text": _kind("object", properties={"format": OBJECT}),
    "reasoning": _kind("object", properties={"effort": TEXT}),
    "tools": _list(OBJECT),
    "tool_choice": {},
    "parallel_tool_calls": FLAG,
    "include": _list(TEXT),
    "top_logprobs": NUMBER,
    "truncation": _kind("string", "disabled: too long a prompt is refused."),
    "chat_template_kwargs": OBJECT,
}
_ANTHROPIC: Mapping[str, Schema] = {
    "model": _MODEL,
    "messages": _list(_MESSAGE),
    "system": {"oneOf": [TEXT, _list(OBJECT)]},
    "tools": _list(OBJECT),
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "output_format": OBJECT,
    "chat_template_kwargs": OBJECT,
}


@dataclass(frozen=True)
class RequestBody:
    """Fields of one route's body."""

    fields: Mapping[str, Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    # The options of generate() are fields, too.
    has_options: bool = False

    @property
    def is_streamed(self) -> bool:
        """True where the caller may ask for events."""
        return "stream" in self.fields


BODIES: Mapping[str, RequestBody] = {
    "/v1/chat/completions": RequestBody(_CHAT, ("messages",), has_options=True),
    "/v1/completions": RequestBody(
        {
            **_STREAM,
            "model": _MODEL,
            "prompt": {"oneOf": [TEXT, _IDS, _list({"oneOf": [TEXT, _IDS]})]},
            "suffix": _kind("string", "The answer stands between prompt and this."),
            "echo": FLAG,
            "logprobs": {"oneOf": [NUMBER, FLAG]},
            "best_of": NUMBER,
        },
        ("prompt",),
        has_options=True,
    ),
    "/v1/messages": RequestBody(
        # max_tokens is one of the options.
        {**_ANTHROPIC, "stream": FLAG, "stop_sequences": _list(TEXT)},
        ("messages", "max_tokens"),
        has_options=True,
    ),
    "/v1/messages/count_tokens": RequestBody(_ANTHROPIC, ("messages",)),
    "/v1/responses": RequestBody(_RESPONSE, ("input",), has_options=True),
    "/v1/responses/input_tokens": RequestBody(_RESPONSE, ("input",), has_options=True),
    "/v1/responses/compact": RequestBody(),
    "/v1/responses/{name}/cancel": RequestBody(),
    "/v1/conversations": RequestBody({"items": _list(_ITEM), "metadata": _METADATA}),
    "/v1/conversations/{name}": RequestBody({"metadata": _METADATA}, ("metadata",)),
    "/v1/conversations/{name}/items": RequestBody({"items": _list(_ITEM)}, ("items",)),
    "/v1/embeddings": RequestBody(
        {
            "model": _MODEL,
            "adapter": _ADAPTER,
            "input": {"oneOf": [TEXT, _list()]},
            "encoding_format": _kind("string", enum=["float", "base64"]),
            "dimensions": NUMBER,
            "normalize": FLAG,
        },
        ("input",),
    ),
    "/v1/score": RequestBody(
        {
            "model": _MODEL,
            "adapter": _ADAPTER,
            "items": _list(_SCORE_ITEM),
            "prompt": TEXT,
            "continuation": {"oneOf": [TEXT, _list(TEXT)]},
            "top_logprobs": NUMBER,
        }
    ),
    "/v1/files": RequestBody({"purpose": _kind("string", enum=["batch"]), "file": _kind("string", format="binary")}),
    "/v1/batches": RequestBody(
        {
            "input_file_id": TEXT,
            "endpoint": TEXT,
            "completion_window": _kind("string", "A duration such as 24h."),
            "metadata": _METADATA,
        },
        ("input_file_id", "endpoint"),
    ),
    "/v1/batches/{name}/cancel": RequestBody(),
    "/tokenize": RequestBody({**_TEMPLATE, **_TURN, "prompt": TEXT, "content": TEXT, "add_special_tokens": FLAG}),
    "/detokenize": RequestBody({"model": _MODEL, "tokens": _IDS, "skip_special_tokens": FLAG}, ("tokens",)),
    "/apply-template": RequestBody({**_TEMPLATE, **_TURN}, ("messages",)),
}
