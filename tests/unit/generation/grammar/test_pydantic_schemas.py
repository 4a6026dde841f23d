"""Schemas of 200 pydantic models: random walks through their grammars end, and what they wrote is valid.

A walk draws from the allowed tokens; behind some of them it prefers those that close what is open, as a model that
comes to an end does. `tools/pydantic_trial.py` asks a real model for the same.
"""

from __future__ import annotations

import json
import random

import factories.wire.pydantic_models as models
import pytest
from factories.engine.grammars import EOS, VOCAB_SIZE, allowed, grammar_tokenizer, ids_of, text_tokenizer
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.trial_process import answer_to

COUNT, IN_A_TEST = 200, 20
# Tokens of free choice, and most of a walk: with the bounds of numbers and keys no end is as far as that.
FREE, MOST = 60, 3000
CLOSING = ("}", "]", '"', ": ", ":", ", ", ",", "=", "T", "Z", ".", "/", "-", "0", "1")


def closing_ids() -> list[int]:
    ids = [text_tokenizer().token_to_id(text) for text in CLOSING]
    return [token_id for token_id in ids if token_id is not None]


def walk(document: object, seed: int) -> str:
    """Return what a walk through the grammar of a schema wrote."""
    tokenizer = grammar_tokenizer()
    answer = answer_to(tokenizer, {"kind": "json_schema", "text": json.dumps(document), "choices": ()}, 10.0)
    assert "lark" in answer, answer
    state = CompiledGrammar(new_matcher(tokenizer, answer["lark"]), tokenizer, "constraint.json_schema").start(EOS)
    draw, ids, ends = random.Random(seed), list[int](), closing_ids()
    (quote,) = ids_of('"')
    while not state.is_done:
        choices = allowed(state)
        if choices & set(EOS):
            break
        assert len(ids) < MOST, text_tokenizer().decode(ids)[-200:]
        if len(ids) > FREE and len(choices) > VOCAB_SIZE // 4 and quote in choices:
            # In a text, where brackets close nothing.
            ids.append(quote)
        else:
            closing = [token_id for token_id in ends if token_id in choices] if len(ids) > FREE else []
            ids.append(closing[0] if closing else draw.choice(sorted(choices)))
        assert state.advance(ids[-1])
    return str(text_tokenizer().decode(ids, skip_special_tokens=False))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("first", range(0, COUNT, IN_A_TEST))
def test_walks_end_and_are_valid(first: int) -> None:
    for number in range(first, first + IN_A_TEST):
        model = models.model_of(number)
        text = walk(model.model_json_schema(), number)
        assert models.fault_of(model, text) == "", (number, text)


def test_the_models_are_the_same_in_every_run() -> None:
    for number in (0, 7, 199):
        assert models.model_of(number).model_json_schema() == models.model_of(number).model_json_schema()
