"""Budgets of thinking on a real model in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from factories.engine.local_generators import local_generator
from penstock import Generator
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "max_new_tokens": 200}
GREEDY: dict[str, Any] = {**THINKING, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Iterator[Generator]:
    with local_generator(demo_folder()) as made:
        yield made


def test_a_budget_cuts_the_thought_and_nothing_else(model: Generator) -> None:
    free = model.generate(QUESTION, **GREEDY)
    length = free.usage.reasoning_tokens
    assert length > 4
    # The last token of a spent budget is the line's end before the marker.
    assert model.generate(QUESTION, thinking_budget_tokens=length + 2, **GREEDY).choices == free.choices
    for tokens in (1, 2, length - 2):
        bound = model.generate(QUESTION, thinking_budget_tokens=tokens, **GREEDY)
        assert bound.usage.reasoning_tokens == tokens
        assert free.choices[0].reasoning.startswith(bound.choices[0].reasoning)
        assert bound.choices[0].text
        assert "think>" not in bound.choices[0].text


def test_no_budget_at_all_switches_the_thought_off(model: Generator) -> None:
    switched = model.generate(QUESTION, max_new_tokens=200, do_sample=False, thinking_budget_tokens=0)
    closed = model.generate(QUESTION, thinking_budget_tokens=0, **GREEDY)
    for answer in (switched, closed):
        assert not answer.choices[0].reasoning
        assert answer.choices[0].text
        assert answer.usage.reasoning_tokens == 0


def test_the_answer_is_the_constraints(model: Generator) -> None:
    (bound,) = model.generate(QUESTION, thinking_budget_tokens=3, regex="[0-9]{1,3}!", **GREEDY).choices
    assert bound.reasoning
    assert re.fullmatch("[0-9]{1,3}!", bound.text)


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 4}, {"lookahead_window": 3}], ids=str)
def test_drafts_change_nothing_and_every_answer_has_the_budget(model: Generator, drafts: dict[str, Any]) -> None:
    options: dict[str, Any] = {**THINKING, "do_sample": True, "seed": 3, "num_return_sequences": 3}
    plain = model.generate(QUESTION, thinking_budget_tokens=4, **options)
    assert 0 < plain.usage.reasoning_tokens <= 3 * 4
    assert all(choice.text for choice in plain.choices)
    drafted = model.generate(QUESTION, thinking_budget_tokens=4, **drafts, **options)
    assert [choice.text for choice in drafted.choices] == [choice.text for choice in plain.choices]
    assert [choice.reasoning for choice in drafted.choices] == [choice.reasoning for choice in plain.choices]


def test_beams_refuse_a_budget_by_name(model: Generator) -> None:
    with pytest.raises(InvalidArgument, match="beam search") as refused:
        model.generate(QUESTION, thinking_budget_tokens=4, num_beams=2, **GREEDY)
    assert refused.value.field == "config.thinking_budget_tokens"


def test_an_answer_without_a_thought_has_a_warning(model: Generator) -> None:
    told = "config.thinking_budget_tokens has no effect: the answer has no thought"
    assert told in model.generate("Hello", thinking_budget_tokens=4, max_new_tokens=2).started.warnings
