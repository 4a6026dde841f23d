"""Conversion between messages and plain values. Whole numbers of a Struct become int, as in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from google.protobuf import struct_pb2

from penstock.common.errors import InvalidArgument
from penstock.text.detokenizer import DecodeTable
from penstock.tokenizer.chat_template import Conversation
from penstock.tokenizer.tokenizer import Encoded, EncodeOptions, SideName
from penstock.v1 import tokenizer_pb2 as pb

_SIDES: dict[int, SideName | None] = {pb.SIDE_UNSPECIFIED: None, pb.SIDE_LEFT: "left", pb.SIDE_RIGHT: "right"}
_PADDINGS: dict[int, Literal["", "longest", "max_length"]] = {
    pb.PADDING_STRATEGY_UNSPECIFIED: "",
    pb.PADDING_STRATEGY_LONGEST: "longest",
    pb.PADDING_STRATEGY_MAX_LENGTH: "max_length",
}
# A Struct does not keep the order of its fields, and templates print schemas. So these names come first, in people's
# usual order; others follow alphabetically.
_SCHEMA_ORDER = (
    "type",
    "title",
    "description",
    "enum",
    "const",
    "format",
    "default",
    "items",
    "properties",
    "required",
)
# Number of ids in one part of a decode table: a part takes less than a millisecond to make.
_TABLE_PART = 2048
_RANK = {name: rank for rank, name in enumerate(_SCHEMA_ORDER)}


def encode_options(request: pb.EncodeRequest) -> EncodeOptions:
    """Convert the options. Raises InvalidArgument for unknown values of enums."""
    return EncodeOptions(
        add_special_tokens=_default(request, "add_special_tokens", True),
        truncation=request.truncation if request.HasField("truncation") else None,
        max_length=request.max_length if request.HasField("max_length") else None,
        truncation_side=_known(_SIDES, request.truncation_side, "truncation_side"),
        padding=_known(_PADDINGS, request.padding, "padding"),
        padding_side=_known(_SIDES, request.padding_side, "padding_side"),
        return_offsets=request.return_offsets,
        parse_special_tokens=_default(request, "parse_special_tokens", True),
    )


def encode_response(encodings: Sequence[Encoded]) -> pb.EncodeResponse:
    """Make the response: one Encoding per text, in order."""
    response = pb.EncodeResponse()
    for encoded in encodings:
        encoding = response.encodings.add(
            ids=encoded.ids,
            attention_mask=encoded.attention_mask or (),
            spelled_control_tokens=encoded.spelled,
        )
        if encoded.offsets is not None:
            encoding.offsets.extend(pb.Offset(start=start, end=end) for start, end in encoded.offsets)
    return response


def conversation(request: pb.ApplyChatTemplateRequest) -> Conversation:
    """Convert a conversation to the form of Hugging Face's templates. Raises InvalidArgument for bad tool calls."""
    continues = request.continue_final_message
    return Conversation(
        messages=[_message(message, f"messages[{place}]") for place, message in enumerate(request.messages)],
        tools=[_tool(tool) for tool in request.tools],
        documents=[{"title": document.title, "text": document.text} for document in request.documents],
        # A request to continue the last message implies that no new one begins.
        add_generation_prompt=_default(request, "add_generation_prompt", not continues),
        continue_final_message=continues,
        variables=struct_to_dict(request.chat_template_kwargs),
        template_name=request.template_name,
    )


def _message(message: pb.Message, path: str) -> dict[str, Any]:
    """Convert a message. Empty fields are left out, since templates test for them; content never is."""
    if not message.role:
        raise InvalidArgument(f"{path}.role", "is needed")
    value: dict[str, Any] = {"role": message.role, "content": _content(message, path)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name):
            value[name] = getattr(message, name)
    if message.tool_calls:
        value["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)
        ]
    return value


def _content(message: pb.Message, path: str) -> str:
    """Return the content of a message, or the text of its parts. Raises InvalidArgument for other parts."""
    if not message.parts:
        return message.content
    if message.content:
        raise InvalidArgument(f"{path}.parts", "cannot be combined with content")
    for place, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidArgument(f"{path}.parts[{place}]", "must have a text")
        if kind != "text":
            raise InvalidArgument(
                f"{path}.parts[{place}].{kind}", f"{kind} parts are not supported: Penstock's models read text"
            )
    return "".join(part.text for part in message.parts)


def _tool_call(call: pb.ToolCall, path: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidArgument(f"{path}.name", "is needed")
    arguments = _arguments(call.arguments)
    value: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **value} if call.id else value


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as the object that templates show.

    A model's call in the history may have been cut, or not be JSON: then its text is returned.
    """
    try:
        arguments = json.loads(text.strip() or "{}")
        if "\\u" in text:  # an escape can spell a lone surrogate, which is JSON but not text
            json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {"arguments": text}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _tool(tool: pb.Tool) -> dict[str, Any]:
    parameters = struct_to_dict(tool.parameters) or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def struct_to_dict(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Convert a Struct to a dict with its fields in a stable order, which a Struct lacks."""
    names = sorted(struct.fields, key=lambda name: (_RANK.get(name, len(_RANK)), name))
    return {name: _value(struct.fields[name]) for name in names}


def _value(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return struct_to_dict(value.struct_value)
    if kind == "list_value":
        return [_value(item) for item in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    return None if kind in (None, "null_value") else getattr(value, kind)


def _default(request: Any, name: str, default: bool) -> bool:
    return bool(getattr(request, name)) if request.HasField(name) else default


def _known(values: Mapping[int, Any], number: int, field: str) -> Any:
    if number not in values:
        raise InvalidArgument(field, "is not a value that this release knows")
    return values[number]


def decode_table(table: DecodeTable | None) -> Iterator[pb.GetDecodeTableResponse]:
    """Yield a decoder's table in parts; a single empty part if it has none."""
    if table is None:
        yield pb.GetDecodeTableResponse()
        return
    is_byte_level = table.kind == "byte_level"
    yield pb.GetDecodeTableResponse(
        kind=pb.DECODE_TABLE_KIND_BYTE_LEVEL if is_byte_level else pb.DECODE_TABLE_KIND_BYTE_FALLBACK,
        strip=table.strip,
        strip_count=table.strip_count,
        special_token_ids=table.special_ids,
        # At byte level the pieces that are not text are exactly the bytes, so the list is not needed.
        lone_byte_ids=() if is_byte_level else table.table.raw,
    )
    pieces = table.table.pieces()
    while part := list(islice(pieces, _TABLE_PART)):
        yield pb.GetDecodeTableResponse(pieces=part)
