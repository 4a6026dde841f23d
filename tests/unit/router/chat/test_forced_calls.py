"""Grammars of forced calls: they take the format's own spelling, and whatever they let through are whole calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from factories.engine.grammars import (
    EOS,
    VOCAB_SIZE,
    accepts,
    allowed,
    compiled,
    compiled_around,
    ids_of,
    lark,
    regex,
    text_tokenizer,
)
from penstock.router.chat.chat_output import make_parser
from penstock.router.chat.forced_calls import answer_grammar, forced_grammar
from penstock.router.chat.formats import TOOLS, choose_format

CITY = {"type": "string", "enum": ["Oslo", "São Paulo"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "ping": {"type": "object", "properties": {}, "additionalProperties": False},
}
NOTE = {"note": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}
NAMES = [row.name for row in TOOLS]
MEMBERS = ["qwen3_coder", "seed_oss", "minimax_m2", "glm4", "deepseek_v32"]


def grammar_of(name: str, schemas: dict[str, dict[str, Any]], **settings: Any) -> str:
    settings = {"max_calls": 9, "in_reasoning": False, "reasoning": "none", **settings}
    chat = choose_format("", name, settings.pop("reasoning"))
    ids = {marker: ids_of(marker) for marker in chat.kept_for(with_tools=True)}
    token_ids = settings.pop("token_ids", {marker: found[0] for marker, found in ids.items() if len(found) == 1})
    return forced_grammar(chat, schemas, token_ids, **settings)


def calls_of(name: str, text: str, schemas: dict[str, dict[str, Any]]) -> tuple[str, list[tuple[str, Any]], bool]:
    """Return (text, calls, ends in calls) of an answer."""
    parser = make_parser(choose_format("", name, "none"), parse_tools=True, schemas=schemas)
    pieces = [parser.feed(text), parser.finish()]
    found: dict[int, list[str]] = {}
    for one in (call for piece in pieces for call in piece.tool_calls):
        entry = found.setdefault(one.index, [one.name, ""])
        entry[1] += one.arguments
    calls = [(called, json.loads(arguments)) for called, arguments in found.values()]
    return "".join(piece.text for piece in pieces), calls, parser.ends_in_tool_calls


def written(grammar: str, begin: str, seed: int, most: int = 4000) -> str:
    """Text of an output that begins with `begin`, drawn from all that the grammar allows, which likes to end."""
    draw, state, ids = random.Random(seed), compiled(lark(grammar)).start(EOS), ids_of(begin)
    assert all(state.advance(token_id) for token_id in ids)
    while len(ids) < most:
        choices = allowed(state)
        if choices & set(EOS):
            return str(text_tokenizer().decode(ids, skip_special_tokens=False))
        ids.append(draw.choice(sorted(choices)))
        assert state.advance(ids[-1])
    raise AssertionError("it does not end")


@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_grammar_allows_is_calls_of_the_tools(name: str) -> None:
    for seed in range(3):
        # A thought of gpt-oss has no end that a draw would find.
        text = written(grammar_of(name, SCHEMAS), "<|channel|>commentary" if name == "harmony" else "", seed)
        rest, calls, ends = calls_of(name, text, SCHEMAS)
        assert (rest.strip(), ends) == ("", True), text
        assert calls
        assert all(called in SCHEMAS for called, _ in calls)
        for called, arguments in calls:
            assert set(arguments) <= {"city", "days"} if called == "get_weather" else arguments == {}
            if called == "get_weather":
                assert arguments["city"] in CITY["enum"]
                assert arguments.get("days", 1) in range(1, 10)


@pytest.mark.parametrize("name", MEMBERS)
def test_text_of_a_parameter_may_be_anything(name: str) -> None:
    grammar = compiled(lark(grammar_of(name, NOTE)))
    for note in ('say "x"\n <b>', "{é]"):
        text = {
            "qwen3_coder": f"<tool_call>\n<function=note>\n<parameter=text>\n{note}\n</parameter>\n"
            "</function>\n</tool_call>",
            "seed_oss": f"<seed:tool_call>\n<function=note>\n<parameter=text>\n{note}\n</parameter>\n</function>\n"
            "</seed:tool_call>",
            "minimax_m2": f'<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">{note}</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
            "glm4": f"<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>{note}</arg_value>\n</tool_call>",
            "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="note">\n<｜DSML｜parameter name="text" '
            f'string="true">{note}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        }[name]
        assert accepts(grammar, text)
        assert calls_of(name, text, NOTE)[1] == [("note", {"text": note})]


def test_one_call_only_where_one_is_allowed() -> None:
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert accepts(compiled(lark(grammar_of("hermes", SCHEMAS))), f"{call}\n{call}")
    assert not accepts(compiled(lark(grammar_of("hermes", SCHEMAS, max_calls=1))), f"{call}\n{call}")
    assert accepts(compiled(lark(grammar_of("hermes", SCHEMAS, max_calls=1))), call)


def test_text_and_calls_of_other_tools_are_not_allowed() -> None:
    grammar = compiled(lark(grammar_of("hermes", {"ping": SCHEMAS["ping"]})))
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, '<tool_call>\n{"name": "pong", "arguments": {}}\n</tool_call>')


def test_a_thought_may_come_first_and_ends_where_the_prompt_began_it() -> None:
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    free = compiled(lark(grammar_of("hermes", SCHEMAS, reasoning="think")))
    assert accepts(free, call)
    assert accepts(free, f"<think>\nWell, <b>.\n</think>\n\n{call}")
    begun = compiled(lark(grammar_of("hermes", SCHEMAS, reasoning="think", in_reasoning=True)))
    assert accepts(begun, f"Well.\n</think>\n\n{call}")
    assert not accepts(begun, call)


def answer_state(name: str, reasoning: str, **settings: Any) -> Any:
    chat = choose_format("", name, reasoning)
    ids = {marker: ids_of(marker) for marker in chat.kept_for(with_tools=True)}
    token_ids = {marker: found[0] for marker, found in ids.items() if len(found) == 1}
    return compiled_around(regex("[0-9]+"), answer_grammar(chat, token_ids, **settings))


def test_an_answer_of_channels_comes_in_the_final_one_after_a_thought_or_at_once() -> None:
    grammar = answer_state("harmony", "auto", in_reasoning=False)
    answer = "<|channel|>final<|message|>42"
    assert accepts(grammar, answer)
    assert accepts(grammar, f"<|channel|>analysis<|message|>Is it 7?<|end|><|start|>assistant{answer}")
    for wrong in ("42", answer.removesuffix("42") + "x", "<|channel|>analysis<|message|>42", answer.removesuffix("42")):
        assert not accepts(grammar, wrong)


def test_an_answer_of_a_model_without_thoughts_is_all() -> None:
    grammar = answer_state("hermes", "none", in_reasoning=False)
    assert accepts(grammar, "42")
    assert not accepts(grammar, "<think>a</think>42")


def test_markers_that_are_tokens_are_forced_as_such() -> None:
    marker = EOS[1] - 1
    grammar = compiled(lark(grammar_of("mistral", {"ping": SCHEMAS["ping"]}, token_ids={"[ARGS]": marker})))
    state = grammar.start(EOS)
    assert all(state.advance(token_id) for token_id in ids_of("[TOOL_CALLS]ping"))
    assert allowed(state) == {marker}
    assert marker < VOCAB_SIZE


def test_name_and_schema_cannot_break_out_of_the_grammar() -> None:
    name = 'a"b\n\\start: "x'
    schema = {"type": "object", "properties": {'k"\n': {"const": '"\nstart: /x/'}}, "required": ['k"\n']}
    for format_name in ("hermes", "qwen3_coder"):
        grammar = compiled(lark(grammar_of(format_name, {name: schema})))
        assert not accepts(grammar, "x")
