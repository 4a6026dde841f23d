"""Chat output: thoughts and tool calls are found in any split of the text, everything else passes unchanged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.router.chat.chat_output import ChatParser, prompt_opens_reasoning


def parse(pieces: list[str], *, tools: bool, in_reasoning: bool = False) -> tuple[str, str, list[dict[str, str]], bool]:
    """(text, reasoning, calls, ends in calls) of `pieces`, fed one by one."""
    parser = ChatParser(parse_tools=tools, in_reasoning=in_reasoning, make_id=lambda: "call_x")
    text = reasoning = ""
    calls: list[dict[str, str]] = []
    for piece in [*(parser.feed(part) for part in pieces), parser.finish()]:
        text += piece.text
        reasoning += piece.reasoning
        for call in piece.tool_calls:
            if call.index == len(calls):
                calls.append({"id": call.call_id, "name": call.name, "arguments": ""})
            calls[call.index]["arguments"] += call.arguments
    return text, reasoning, calls, parser.ends_in_tool_calls


def splits(text: str) -> st.SearchStrategy[list[str]]:
    """Every way to cut `text` into pieces."""
    positions = st.sets(st.integers(min_value=0, max_value=len(text)))
    return positions.map(
        lambda cuts: [text[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True)]
    )


TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<",
    "</t",
    "\n",
    "\n\n",
    " ",
    '{"name": "f", "arguments": ',
]
FRAGMENTS = [*TAGS, '{"a": "</tool_call>"}', '{"a": [1, {"b": "}\\""}]}', "}", '{"name": "g"}', "héllo 你好", "x"]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join).flatmap(lambda t: st.tuples(st.just(t), splits(t))),
    st.booleans(),
    st.booleans(),
)
def test_result_does_not_depend_on_the_split(case: tuple[str, list[str]], tools: bool, in_reasoning: bool) -> None:
    text, pieces = case
    whole = parse([text], tools=tools, in_reasoning=in_reasoning)
    assert parse(pieces, tools=tools, in_reasoning=in_reasoning) == whole
    assert parse(list(text), tools=tools, in_reasoning=in_reasoning) == whole


@given(st.text().flatmap(lambda t: st.tuples(st.just(t), splits(t))), st.booleans())
def test_text_without_tags_passes_unchanged(case: tuple[str, list[str]], tools: bool) -> None:
    text, pieces = case
    assert parse(pieces, tools=tools) == (text, "", [], False)


def test_thought_at_the_beginning_becomes_reasoning() -> None:
    assert parse(["<think>\nIt is two.\n</think>\n\nTwo."], tools=False) == ("Two.", "It is two.", [], False)


def test_newlines_within_a_thought_stay() -> None:
    assert parse(["<think>\na\n\nb\n</think>\nc"], tools=False)[1] == "a\n\nb"


def test_tag_in_the_middle_of_an_answer_is_text() -> None:
    answer = "Write <think> and </think> or <tool_call>."
    assert parse([answer], tools=False) == (answer, "", [], False)
    assert parse([answer], tools=True) == (answer, "", [], False)


def test_prompt_that_ends_in_a_thought_starts_in_reasoning() -> None:
    assert prompt_opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert parse(["so\n</think>\n\nyes"], tools=False, in_reasoning=True) == ("yes", "so", [], False)


def test_unfinished_thought_is_all_reasoning() -> None:
    assert parse(["<think>one </thin"], tools=False) == ("", "one </thin", [], False)


def test_tool_call_gives_name_and_arguments() -> None:
    text, reasoning, calls, ends = parse(
        ['Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'], tools=True
    )
    assert (text, reasoning, ends) == ("Let me look.\n", "", True)
    assert calls == [{"id": "call_x", "name": "weather", "arguments": '{"city": "Oslo"}'}]


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ChatParser(parse_tools=True)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    name = parser.feed('{"text"').tool_calls
    more = parser.feed(': "long').tool_calls
    assert [piece.name for piece in name] == ["f", ""]
    assert name[0].call_id.startswith("call_")
    assert [piece.arguments for piece in more] == [': "long']


def test_two_calls_in_a_row() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"n": %d}}\n</tool_call>'
    text, _, calls, ends = parse([call % 1 + "\n" + call % 2], tools=True)
    assert text == ""
    assert [json.loads(entry["arguments"])["n"] for entry in calls] == [1, 2]
    assert ends


def test_arguments_before_name_are_understood() -> None:
    _, _, calls, ends = parse(['<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>'], tools=True)
    assert calls == [{"id": "call_x", "name": "f", "arguments": '{"a": "é"}'}]
    assert ends


def test_tool_call_is_text_when_no_tools_were_offered() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse([answer], tools=False) == (answer, "", [], False)


def test_broken_call_comes_back_as_text() -> None:
    answer = "<tool_call>not json</tool_call> and so on"
    assert parse([answer], tools=True) == (answer, "", [], False)


def test_text_behind_a_call_is_not_an_end_in_calls() -> None:
    text, _, calls, ends = parse(['<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.'], tools=True)
    assert (text, len(calls), ends) == ("\nDone.", 1, False)


def test_call_cut_off_in_its_arguments_is_incomplete() -> None:
    _, _, calls, ends = parse(['<tool_call>{"name": "f", "arguments": {"a": 1'], tools=True)
    assert calls[0]["arguments"] == '{"a": 1'
    assert not ends


def test_call_without_its_closing_tag_is_complete_when_the_json_is() -> None:
    assert parse(['<tool_call>{"name": "f", "arguments": {}}'], tools=True)[3]


def test_thought_then_tool_call() -> None:
    answer = '<think>\nask\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text, reasoning, calls, ends = parse([answer], tools=True)
    assert (text, reasoning, len(calls), ends) == ("", "ask", 1, True)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": "\\ud800", "name": "f"}',
        '{"arguments": {"a": 1e999}, "name": "f"}',
        '{"arguments": {"a": NaN}, "name": "f"}',
    ],
)
def test_call_that_no_message_can_carry_is_text(call: str) -> None:
    answer = f"<tool_call>{call}</tool_call>"
    assert parse([answer], tools=True) == (answer, "", [], False)


def test_half_a_surrogate_pair_in_arguments_stays_escaped() -> None:
    _, _, calls, ends = parse(['<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'], tools=True)
    assert (calls[0]["arguments"], ends) == ('{"a": "\\ud800"}', True)


@pytest.mark.parametrize("arguments", ["{a: 1}", '{"a": [1}}', '{"a": NaN}', '{"a" 1}'])
def test_call_whose_arguments_only_look_like_json_is_incomplete(arguments: str) -> None:
    answer = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"
    assert not parse([answer], tools=True)[3]
    assert not parse(list(answer), tools=True)[3]
