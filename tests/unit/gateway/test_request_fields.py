"""Fields of a JSON body become options of generate(), by every name that a client may know."""

from __future__ import annotations

from typing import Any, cast

import pytest
from penstock.common.errors import InvalidArgument
from penstock.compat.option_names import ALIASES
from penstock.gateway.chat import chat_completions
from penstock.gateway.chat_history import messages_of
from penstock.gateway.chat_tools import take_tools
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.request_fields import Fields, checked, options_of, token_lists, tools_of
from penstock.generation.options.table import SECTIONS
from penstock_client import check_options


def call_with(**body: Any) -> HttpCall:
    """A call whose client is never asked."""
    return HttpCall(body, cast("Any", None), GatewayConfig())


def options(**body: Any) -> dict[str, Any]:
    """Options of a body, all fields of which are read."""
    call = call_with(**body)
    fields = Fields(call)
    found = options_of(fields, call)
    fields.done()
    assert not call.ignored
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "name",
    [
        name
        for section, specs in SECTIONS.items()
        for name in specs
        if section != "output"
        or name in ("skip_special_tokens", "stream_interval", "return_token_ids", "prompt_logprobs")
    ],
)
def test_every_option_of_the_table_is_a_field_under_its_own_name(name: str) -> None:
    call = call_with(**{name: 1})
    fields = Fields(call)
    found = options_of(fields, call)
    fields.done()
    assert name in found or name.startswith("negative_prompt")


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name, some in ALIASES.items() for alias in some])
def test_every_alias_of_the_table_is_the_option(name: str, alias: str) -> None:
    assert options(**{alias: 1})[name] == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": 4}, {"max_new_tokens": 4}),
        (
            {"stop": "a", "min_tokens": 2, "ignore_eos": True},
            {"stop_strings": "a", "min_new_tokens": 2, "ignore_eos": True},
        ),
        ({"top_k": -1, "do_sample": True}, {"top_k": 0, "do_sample": True}),
        ({"temperature": 0}, {"temperature": 0, "do_sample": False}),
        ({"temperature": 0.5}, {"temperature": 0.5, "do_sample": True}),
        ({"temperature": 0.5, "do_sample": False}, {"temperature": 0.5, "do_sample": False}),
        ({"n": 2}, {"num_return_sequences": 2, "do_sample": True}),
        ({"n": 2, "num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}),
        ({"seed": 1}, {"seed": 1}),
        ({"n": 3, "use_beam_search": True}, {"num_return_sequences": 3, "num_beams": 3, "do_sample": False}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            {"json_schema": {"type": "object"}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}},
            {"json_schema": {}},
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
            {"json_schema": {"type": "object", "x-guidance": {"compact": True}}},
        ),
        (
            {"guided_json": {"type": "null"}, "guided_whitespace_pattern": " ?"},
            {"json_schema": {"type": "null", "x-guidance": {"whitespace_pattern": " ?"}}},
        ),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"temperature": None, "stop": None}, {}),
    ],
    ids=str,
)
def test_other_names(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options(**body) == expected


def test_a_field_that_nothing_reads_is_reported() -> None:
    call = call_with(colour=1, user="me", metadata=None, seed=3)
    fields = Fields(call)
    options_of(fields, call)
    fields.done()
    assert call.ignored == ["colour", "user"]
    assert (b"x-penstock-ignored-fields", b"colour, user") in call.headers()


def test_names_of_fields_cannot_make_headers() -> None:
    call = call_with(**{"a\r\nset-cookie: x": 1, "ü": 2, "plain": 3, **{f"f{n}": n for n in range(99)}})
    Fields(call).done()
    ((_, listed),) = call.headers()
    assert listed.startswith(b"plain, f0, ")
    assert listed.count(b",") == GatewayConfig().max_ignored_fields - 1


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"bad_words_ids": "x"}, "bad_words_ids"),
        ({"regex": "a", "grammar": "b"}, "regex"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_names_its_option_and_not_the_value(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked(given, lambda: check_options(**given))
    assert caught.value.field == field
    assert "hot" not in str(caught.value)


def test_prompts() -> None:
    assert token_lists("a", "prompt") == ["a"]
    assert token_lists([1, 2], "prompt") == [[1, 2]]
    assert token_lists(["a", [1]], "prompt") == ["a", [1]]
    for wrong, field in (
        (None, "prompt"),
        ([], "prompt"),
        ([1, "a"], "prompt"),
        (["a", [-1]], "prompt[1]"),
        ([True], "prompt[0]"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            token_lists(wrong, "prompt")
        assert caught.value.field == field


def test_messages_of_other_clients_are_understood() -> None:
    call = call_with()
    made = messages_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "refusal": None, "reasoning": "Hm", "annotations": [],
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        call,
    )  # fmt: skip
    assert made == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "1", "name": "f", "arguments": '{"a": 1}'}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert call.ignored == ["messages[].annotations"]


FORM = {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": "text"}, "modalities"),
        ({"response_format": FORM}, "response_format.json_schema.strict"),
    ],
)
async def test_a_flag_of_a_wrong_type_and_an_answer_that_is_not_text_are_refused(
    body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await chat_completions(call_with(messages=[{"role": "user", "content": "Hi"}], **body))
    assert caught.value.field == field


def test_a_choice_of_tools_beside_functions_is_named_since_nothing_reads_it() -> None:
    functions = [{"name": "get_weather", "parameters": {"type": "object"}}]
    call = call_with(functions=functions, tool_choice="none")
    fields = Fields(call)
    take_tools(fields, call)
    fields.done()
    assert call.ignored == ["tool_choice"]


def test_tools_are_functions() -> None:
    assert tools_of([{"type": "function", "function": {"name": "f", "strict": None}}]) == [{"name": "f"}]
    for wrong, field in (({"type": "web"}, "tools[0].type"), ({"function": {"name": 1}}, "tools[0].function.name")):
        with pytest.raises(InvalidArgument) as caught:
            tools_of([wrong])
        assert caught.value.field == field
