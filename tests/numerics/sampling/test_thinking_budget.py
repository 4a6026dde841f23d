"""Budgets of thinking on a model: kept to the token in four formats, and the same ids alone, in company, preempted,
drafted and moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from factories.engine.fake_engine import request
from factories.engine.model_engine import answer_alone, check_any_company, in_any_company, load_tiny
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.core.request import Request
from penstock.generation.core.thought_budget import ThoughtBudget, ThoughtEnd
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.models.decoder import CausalLM
from penstock.text.thoughts import Thought
from penstock.text.token_bytes import TokenBytes

PROMPT = [17, 203, 44, 9, 118, 60, 7]
FIRST = 200
MARKERS = range(FIRST, FIRST + 8)
LENGTH = 24


@dataclass(frozen=True)
class Format:
    """Markers of a format, and the pieces of the text that closes its thoughts."""

    name: str
    opens: tuple[str, ...]
    closes: str
    ending: tuple[str, ...]
    # Pieces of `ending` that count as tokens of the thought.
    num_blank: int = 0


FORMATS = (
    Format("a token after a line's end, as Qwen3", ("<think>",), "</think>", ("\n", "</think>"), 1),
    Format("a token, as Magistral", ("[THINK]",), "[/THINK]", ("[/THINK]",)),
    Format("several tokens, as Kimi", ("◁", "think▷"), "◁/think▷", ("◁/", "think", "▷")),
    Format(
        "a sentence, as Granite",
        ("Here is my", " thought process:"),
        "Here is my response:",
        ("Here is my", " response", ":"),
    ),
)


def table_of(one: Format) -> tuple[TokenBytes, list[int], tuple[int, ...]]:
    """Return a vocabulary, the ids that open the format's thoughts, and those that close them."""
    pieces = list(dict.fromkeys((*one.opens, *one.ending)))
    tokens = {token_id: b"%d " % token_id for token_id in range(2048)}
    tokens |= {FIRST + place: piece.encode() for place, piece in enumerate(pieces)}
    ids = {piece: FIRST + place for place, piece in enumerate(pieces)}
    return (
        TokenBytes(tokens, special=[ids[one.opens[0]], ids[one.ending[-1]]]),
        [ids[piece] for piece in one.opens],
        tuple(ids[piece] for piece in one.ending),
    )


def budget(one: Format, tokens: int, *, is_open: bool) -> dict[str, Any]:
    """Options of a request with this budget; of its own the model draws none of the markers."""
    table, _, end = table_of(one)
    thought = Thought("".join(one.opens), (one.closes,), is_open)
    return {
        "thought_budget": ThoughtBudget.of(tokens, ThoughtEnd(thought, end), table),
        "suppress_tokens": tuple(MARKERS),
        "ignore_eos": True,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=11))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_budget_is_kept_to_the_token(model: CausalLM, one: Format, tokens: int, sampled: bool) -> None:
    _, opens, end = table_of(one)
    options: dict[str, Any] = {"do_sample": sampled, "seed": 5, "max_new_tokens": LENGTH}
    free = answer_alone(model, request(PROMPT, **options, **budget(one, 999, is_open=True))).ids[0]
    ids = answer_alone(model, request(PROMPT, **options, **budget(one, tokens, is_open=True))).ids[0]
    blank = min(one.num_blank, tokens)
    written = tokens - blank
    assert ids[:written] == free[:written]
    assert tuple(ids[written : written + len(end) - one.num_blank + blank]) == end[one.num_blank - blank :]
    answer = ids[written + len(end) - one.num_blank + blank :]
    assert len(ids) == LENGTH
    assert set(answer).isdisjoint(MARKERS), "the answer is free, and the thought is closed once"
    # The same thought, begun by the model itself.
    begun = request(
        PROMPT,
        resumed_token_ids=[opens],
        **{**options, "max_new_tokens": LENGTH + len(opens)},
        **budget(one, tokens, is_open=False),
    )
    rest = answer_alone(model, begun).ids[0]
    assert tuple(rest[written : written + len(end) - one.num_blank + blank]) == end[one.num_blank - blank :]
    assert set(rest[written + len(end) - one.num_blank + blank :]).isdisjoint(MARKERS)


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_an_answer_without_a_thought_and_one_that_is_over_are_left_alone(model: CausalLM, one: Format) -> None:
    _, _, end = table_of(one)
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "seed": 3, "do_sample": True}
    plain = {key: value for key, value in budget(one, 3, is_open=False).items() if key != "thought_budget"}
    free = answer_alone(model, request(PROMPT, **options, **plain)).ids
    assert answer_alone(model, request(PROMPT, **options, **budget(one, 3, is_open=False))).ids == free
    # It closed the thought itself, one token before the budget was spent.
    closed = {"resumed_token_ids": [[1, 2, *end]]}
    free = answer_alone(model, request(PROMPT, **options, **plain, **closed)).ids
    assert answer_alone(model, request(PROMPT, **options, **budget(one, 4, is_open=True), **closed)).ids == free


def requests() -> list[Request]:
    common: dict[str, Any] = {"max_new_tokens": 14, "do_sample": True}
    qwen, _, kimi, granite = FORMATS
    return [
        request(PROMPT, request_id="one", seed=3, **common, **budget(qwen, 4, is_open=True)),
        request(PROMPT, request_id="three", seed=4, num_return_sequences=3, **common, **budget(kimi, 5, is_open=True)),
        request(PROMPT * 2, request_id="greedy", max_new_tokens=14, **budget(granite, 6, is_open=True)),
        request(PROMPT[2:] * 2, request_id="plain", seed=5, **common),
    ]


@in_any_company
def test_the_same_ids_alone_and_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    check_any_company(model, requests, config)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_change_nothing(model: CausalLM, one: Format, sampled: bool) -> None:
    prompt = PROMPT * 3
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "seed": 3, "do_sample": sampled}
    for tokens in (0, 3, 9):
        plain = answer_alone(model, request(prompt, **options, **budget(one, tokens, is_open=True))).ids
        drafts = AssistanceOptions(prompt_lookup_num_tokens=4)
        drafted = request(prompt, mode=drafts, **options, **budget(one, tokens, is_open=True))
        assert answer_alone(model, drafted).ids == plain


def test_resumed_ids_go_on_where_they_were(model: CausalLM) -> None:
    for one in FORMATS:
        options = {"max_new_tokens": LENGTH, "seed": 3, "do_sample": True, **budget(one, 5, is_open=True)}
        whole = answer_alone(model, request(PROMPT, **options)).ids[0]
        for kept in range(1, 10):
            rest = request(PROMPT, resumed_token_ids=[whole[:kept]], **options)
            assert answer_alone(model, rest).ids == {0: whole[kept:]}
