"""The demo corpus: a split that holds, and text that trains what the template will show."""

import json
import sys
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from dev.demo.corpus import FAMILIES, held_out_prompts, messages_of  # noqa: E402
from dev.demo.model.hf import render  # noqa: E402
from dev.demo.model.render import Conversation, conversation_text, encode_conversations  # noqa: E402

DEMO = ROOT / "services" / "penstock" / "assets" / "demo"
TEMPLATE = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_held_out_prompts_are_the_same_on_every_call() -> None:
    first, second = ([(p.family, p.messages, p.tools) for p in held_out_prompts(5)] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("family", FAMILIES)
def test_training_never_draws_a_held_out_prompt(family: str) -> None:
    held_out = {json.dumps(p.messages) for p in held_out_prompts() if p.family == family}
    rng = Random(7)
    drawn = {json.dumps(messages_of(FAMILIES[family](rng, False).turns)[:-1]) for _ in range(3000)}
    assert not held_out & drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_the_corpus_passes_its_own_checkers(family: str) -> None:
    rng = Random(3)
    for held_out in (False, True):
        for _ in range(200):
            last = FAMILIES[family](rng, held_out).turns[-1]
            assert last.check(last.answer.replace("\x1f", "")), last


@cache
def demo_tokenizer() -> Tokenizer:
    """Read the tokenizer once: it takes longer than an example."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@given(text=st.text())
def test_composed_text_comes_back_from_the_tokenizer(text: str) -> None:
    tokenizer = demo_tokenizer()
    composed = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == composed


def test_only_answers_are_learnt(tokenizer: Tokenizer) -> None:
    turns = FAMILIES["reversing"](Random(1), True).turns
    row = encode_conversations([Conversation("", turns, (), None)], tokenizer, TEMPLATE)[0]
    learnt = tokenizer.decode([i for i, learn in zip(row.ids, row.learn, strict=True) if learn])
    assert learnt == turns[0].answer.replace("\x1f", "")


def test_training_text_is_what_the_template_renders_for_tool_calls() -> None:
    rng = Random(5)
    drawn = [FAMILIES["tool_calls"](rng, False) for _ in range(20)]
    dialogue = next(dialogue for dialogue in drawn if "<tool_call>" in dialogue.turns[0].answer)
    text, _ = conversation_text(Conversation("", dialogue.turns, dialogue.tools, None), TEMPLATE)
    assert text == render(TEMPLATE, messages_of(dialogue.turns), tools=dialogue.tools)
