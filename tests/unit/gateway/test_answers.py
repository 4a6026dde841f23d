"""Parts of OpenAI's answers: texts as JSON, and deltas that become one event for a reader that is behind."""

from __future__ import annotations

import json

import pytest
from penstock.gateway.answers import TextLogprobs, dumps, merged, quoted, stop_reason
from penstock_client import Choice, Delta, LogprobEntry


@pytest.mark.parametrize(
    "text", ["", "a", 'quote " slash \\ / line\n tab\t nul\0', "é 漢 😀", "half \ud83d of a pair", "\u2028<"]
)
def test_a_text_is_quoted_as_json_is_made_of_anything_else(text: str) -> None:
    assert quoted(text) == dumps(text)
    assert json.loads(quoted(text)) == text.encode("utf-8", "replace").decode()


def test_texts_that_follow_each_other_are_one_delta() -> None:
    deltas = [Delta(0, 0, "", "think"), Delta(1, 0, "", "ing"), Delta(2, 0, "one"), Delta(3, 0, " two")]
    assert merged(deltas) == [Delta(3, 0, "one two", "thinking")]


def test_order_is_kept_between_choices_and_between_text_and_reasoning() -> None:
    deltas = [Delta(0, 0, "a"), Delta(1, 1, "b"), Delta(2, 0, "c"), Delta(3, 0, "", "d"), Delta(4, 0, "e")]
    assert merged(deltas) == [
        Delta(0, 0, "a"),
        Delta(1, 1, "b"),
        Delta(2, 0, "c"),
        Delta(4, 0, "e", "d"),
    ]


def test_a_delta_of_more_than_text_stays_as_it_is() -> None:
    ids, scored = Delta(1, 0, "b", token_ids=(7,)), Delta(2, 0, "c", logprobs=(LogprobEntry(7, "c", -0.5, 1),))
    deltas = [Delta(0, 0, "a"), ids, scored, Delta(3, 0, "d")]
    assert merged(deltas) == deltas


def test_tokens_that_read_alike_keep_their_names_apart() -> None:
    """`<0x41>` and `A` of a model with byte tokens; the chosen one has the name that its alternative has."""
    others = (
        LogprobEntry(1, "A", -0.1, 1),
        LogprobEntry(2, "A", -1.0, 2),
        LogprobEntry(3, "\ufffd", -2.0, 3, (), b"\xe4"),
    )
    lists = TextLogprobs().lists([LogprobEntry(2, "A", -1.0, 2, others), LogprobEntry(4, "B", -9.0, 7, others)])
    assert lists["tokens"] == ["token_id:2", "B"]
    assert lists["top_logprobs"] == [{r"bytes:\xe4": -2.0, "token_id:2": -1.0, "A": -0.1}] * 2
    assert lists["text_offset"] == [0, 1]


def test_the_end_of_sequence_behind_a_tool_call_is_no_stop_reason() -> None:
    """Its id was told, as if the caller had asked to stop there."""
    assert stop_reason(Choice(index=0, finish_reason="TOOL_CALLS", stop_token_id=2)) is None
    assert stop_reason(Choice(index=0, finish_reason="TOOL_CALLS", stop_string="END")) == "END"
    assert stop_reason(Choice(index=0, finish_reason="STOP_EOS", stop_token_id=2)) is None
    assert stop_reason(Choice(index=0, finish_reason="STOP_TOKEN", stop_token_id=7)) == 7
