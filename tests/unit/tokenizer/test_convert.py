"""Proto messages in the shape that Hugging Face's templates expect, and options as transformers names them."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import struct_pb2
from penstock.common.errors import InvalidArgument
from penstock.tokenizer import convert
from penstock.tokenizer.tokenizer import Encoded, EncodeOptions
from penstock.v1 import tokenizer_pb2 as pb


def struct(value: dict[str, object]) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(value)
    return message


def test_a_message_has_only_what_was_set() -> None:
    request = pb.ApplyChatTemplateRequest(messages=[pb.Message(role="user", content="hi")])
    assert convert.conversation(request).messages == [{"role": "user", "content": "hi"}]


def test_parts_of_text_are_a_content() -> None:
    parts = [pb.ContentPart(text="a "), pb.ContentPart(text=""), pb.ContentPart(text="b")]
    request = pb.ApplyChatTemplateRequest(messages=[pb.Message(role="user", parts=parts)])
    assert convert.conversation(request).messages == [{"role": "user", "content": "a b"}]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Message(parts=[pb.ContentPart(text="a"), pb.ContentPart(image=pb.MediaPart(url="x"))]), "[1].image"),
        (pb.Message(parts=[pb.ContentPart(audio=pb.MediaPart(data=b"x"))]), "[0].audio"),
        (pb.Message(parts=[pb.ContentPart()]), "[0]"),
        (pb.Message(content="a", parts=[pb.ContentPart(text="a")]), ""),
    ],
)
def test_other_parts_are_refused_by_name(message: pb.Message, field: str) -> None:
    message.role = "user"
    with pytest.raises(InvalidArgument) as raised:
        convert.conversation(pb.ApplyChatTemplateRequest(messages=[pb.Message(role="user", content="x"), message]))
    assert raised.value.field == f"messages[1].parts{field}"


def test_tool_calls_have_arguments_as_an_object() -> None:
    call = pb.ToolCall(id="1", name="f", arguments='{"b": 1, "a": 2.5}')
    request = pb.ApplyChatTemplateRequest(messages=[pb.Message(role="assistant", tool_calls=[call])])
    function = {"name": "f", "arguments": {"b": 1, "a": 2.5}}
    assert convert.conversation(request).messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        (" ", {}),
        ("null", {}),
        ("[1]", {"arguments": [1]}),
        ("nonsense", {"arguments": "nonsense"}),
        ('{"city": "Os', {"arguments": '{"city": "Os'}),
        ('{"half": "\\ud83d"}', {"arguments": '{"half": "\\ud83d"}'}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
    ids=lambda one: str(one)[:12],
)
def test_a_call_that_was_cut_or_broken_keeps_its_text(arguments: str, shown: dict[str, Any]) -> None:
    call = pb.ToolCall(name="f", arguments=arguments)
    request = pb.ApplyChatTemplateRequest(messages=[pb.Message(role="assistant", tool_calls=[call])])
    (message,) = convert.conversation(request).messages
    assert message["tool_calls"][0]["function"]["arguments"] == shown


def test_a_schema_comes_back_in_a_stable_order_with_whole_numbers() -> None:
    schema = {"required": ["x"], "properties": {"x": {"maximum": 5, "type": "number"}}, "type": "object", "y": 0.5}
    request = pb.ApplyChatTemplateRequest(tools=[pb.Tool(name="f", description="d", parameters=struct(schema))])
    (tool,) = convert.conversation(request).tools
    assert str(tool["function"]["parameters"]) == (
        "{'type': 'object', 'properties': {'x': {'type': 'number', 'maximum': 5}}, 'required': ['x'], 'y': 0.5}"
    )


def test_variables_keep_their_json_types() -> None:
    values = {"flag": False, "none": None, "text": "t", "list": [1, "a", {"b": 2.5}], "huge": 1e300}
    assert convert.struct_to_dict(struct(values)) == values
    assert isinstance(convert.struct_to_dict(struct({"n": 3}))["n"], int)


@pytest.mark.parametrize(
    ("continues", "asked", "prompt"),
    [(False, None, True), (False, False, False), (True, None, False), (True, True, True)],
)
def test_a_new_message_is_begun_unless_the_last_is_continued(continues: bool, asked: bool | None, prompt: bool) -> None:
    request = pb.ApplyChatTemplateRequest(continue_final_message=continues, add_generation_prompt=asked)
    assert convert.conversation(request).add_generation_prompt is prompt


def test_unset_options_are_transformers_defaults() -> None:
    assert convert.encode_options(pb.EncodeRequest()) == EncodeOptions()


def test_set_options_are_told_apart_from_zero() -> None:
    request = pb.EncodeRequest(
        add_special_tokens=False, truncation=False, max_length=0, padding=pb.PADDING_STRATEGY_MAX_LENGTH
    )
    expected = EncodeOptions(add_special_tokens=False, truncation=False, max_length=0, padding="max_length")
    assert convert.encode_options(request) == expected


def test_masks_and_offsets_travel_only_when_they_exist() -> None:
    response = convert.encode_response([Encoded([1, 2]), Encoded([3], [1], [(0, 4)])])
    assert not response.encodings[0].attention_mask
    assert not response.encodings[0].offsets
    assert response.encodings[1].offsets[0] == pb.Offset(start=0, end=4)
