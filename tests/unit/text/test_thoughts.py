"""Thoughts before an answer: where the answer begins, in any split of text or bytes, and stop strings behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.text.stop_strings import StopStrings
from penstock.text.thoughts import Thought

THINK = Thought("<think>", ("</think>",))
OPEN = Thought("<think>", ("</think>",), is_open=True)
HARMONY = Thought("<|channel|>", ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"))


def parted(thought: Thought, pieces: list[str]) -> tuple[str, str]:
    """Return (thought, answer) of an output that comes in pieces."""
    gate, before = thought.gate(), ""
    for place, piece in enumerate(pieces):
        more, answer = gate.feed(piece)
        before += more
        if answer is not None:
            return before, answer + "".join(pieces[place + 1 :])
    return before, gate.finish()


def stopped(thought: Thought | None, pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Return the text up to a stop string, and that one."""
    strings = StopStrings(stops, False, thought)
    text = "".join(strings.push(piece).text for piece in pieces)
    return text + strings.finish("", None).text, strings.matched


@pytest.mark.parametrize(
    ("thought", "text", "before"),
    [
        (THINK, "<think>a</think>b", "<think>a</think>"),
        (THINK, "\n<think>\n</think></think>", "\n<think>\n</think>"),
        (THINK, "a<think>b</think>", ""),
        (THINK, " <thin", ""),
        (THINK, "<think>a", "<think>a"),
        (OPEN, "a<</think>b", "a<</think>"),
        (OPEN, "</think>", "</think>"),
        (OPEN, "", ""),
        (HARMONY, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
         "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>"),
        (HARMONY, "<|channel|>final<|message|>b", "<|channel|>final<|message|>"),
    ],
)  # fmt: skip
def test_the_answer_begins_behind_the_thought_in_any_split(thought: Thought, text: str, before: str) -> None:
    wanted = (before, text[len(before) :])
    assert parted(thought, [text]) == wanted
    assert parted(thought, list(text)) == wanted
    for place in range(len(text)):
        assert parted(thought, [text[:place], text[place:]]) == wanted


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "\n", "é", "stop", "st"]), max_size=9), st.booleans()
)
def test_bytes_are_parted_as_text_is(pieces: list[str], is_open: bool) -> None:
    thought = OPEN if is_open else THINK
    before, answer = parted(thought, pieces)
    gate, found = thought.byte_gate(), b""
    for place, byte in enumerate(data := "".join(pieces).encode()):
        more, begun = gate.copy().feed(bytes([byte]))
        gate.feed(bytes([byte]))
        found += more
        if begun is not None:
            assert (found.decode(), (begun + data[place + 1 :]).decode()) == (before, answer)
            return
    assert (found.decode(), gate.finish().decode()) == (before, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "\n", "stop", "st", "op."]), max_size=9))
def test_stop_strings_count_in_the_answer_alone(pieces: list[str]) -> None:
    text = "".join(pieces)
    before, answer = parted(THINK, [text])
    end = min((place for stop in ("stop", "<") if (place := answer.find(stop)) >= 0), default=len(answer))
    wanted = before + answer[:end]
    assert stopped(THINK, [text], ["stop", "<"])[0] == wanted
    assert stopped(THINK, list(text), ["stop", "<"])[0] == wanted
    assert stopped(None, ["a stop"], ["stop"]) == ("a ", "stop")
