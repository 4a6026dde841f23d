"""Grammars of calls that a model chooses to make: each format's own spelling, and nothing that is no call of a tool."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from factories.engine.grammars import EOS, allowed, compiled, held, ids_of, lark, text_tokenizer
from penstock.generation.grammar.call_grammar import HeldCalls
from penstock.generation.grammar.call_spec import MOST_MARKERS
from penstock.generation.grammar.grammar_limits import GrammarLimits
from penstock.router.chat.chat_output import make_parser
from penstock.router.chat.forced_calls import HeldGrammar, held_grammar
from penstock.router.chat.formats import TOOLS, choose_format
from penstock.text.thoughts import Thought

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "São Paulo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "get": {"type": "object", "properties": {}, "additionalProperties": False},
}
HARMONY = "<|channel|>final<|message|>Well, let me see.<|end|><|start|>assistant"
NAMES = [row.name for row in TOOLS]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def grammar_of(name: str, *strict: str, max_calls: int = 3) -> HeldGrammar:
    chat = choose_format("", name, "none")
    ids = {marker: ids_of(marker) for marker in chat.kept_for(with_tools=True)}
    token_ids = {marker: found[0] for marker, found in ids.items() if len(found) == 1}
    return held_grammar(chat, SCHEMAS, strict, token_ids, max_calls=max_calls)


def state_of(name: str, *strict: str, thought: Thought | None = None) -> HeldCalls:
    return held(grammar_of(name, *strict), thought).start(EOS)


def take(state: HeldCalls, text: str) -> bool:
    return all(state.advance(token_id) for token_id in ids_of(text))


def calls_of(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = make_parser(choose_format("", name, "none"), parse_tools=True, schemas=SCHEMAS)
    pieces = [parser.feed(text), parser.finish()]
    found: dict[int, list[str]] = {}
    for one in (call for piece in pieces for call in piece.tool_calls):
        entry = found.setdefault(one.index, [one.name, ""])
        entry[1] += one.arguments
    calls = [(called, json.loads(arguments)) for called, arguments in found.values()]
    return "".join(piece.text for piece in pieces), calls


def drawn(name: str, seed: int, *strict: str) -> str:
    """Text before a marker, the marker, and a call drawn from all that is allowed, until the text is free again."""
    draw, state, made = random.Random(seed), state_of(name, *strict), grammar_of(name, *strict)
    # Each of them is drawn by some seed.
    marker = made.opens[seed % len(made.opens)]
    # Behind text, Llama 4's list of calls is one after its tag alone.
    before = "Well, let me see. " + ("<|python_start|>" if marker.startswith("[") and name == "llama4" else "")
    ids = ids_of(HARMONY if name == "harmony" else before)
    assert all(state.advance(token_id) and state.is_free for token_id in ids)
    marker_ids = ids_of(marker)
    assert all(state.advance(token_id) for token_id in marker_ids)
    ids += marker_ids
    while not state.is_free:
        assert len(ids) < 6000
        ids.append(draw.choice(sorted(allowed(state))))
        assert ids[-1] not in EOS
        assert state.advance(ids[-1])
    return str(text_tokenizer().decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", NAMES)
def test_tools_without_strict_share_one_grammar_of_any_arguments(name: str) -> None:
    chat = choose_format("", name, "none")
    schemas = {f"tool_{number}": SCHEMAS["get_weather"] for number in range(100)}
    made = held_grammar(chat, schemas, (), {}, max_calls=3)
    # Any JSON takes a second to compile, and for each tool again.
    assert made.grammar.count("%json") + made.grammar.count("%text") <= 2
    assert compiled(lark(made.grammar))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_begins_is_a_call_of_a_tool_and_obeys_a_strict_one(name: str) -> None:
    for seed in range(max(2, len(grammar_of(name).opens))):
        text, calls = calls_of(name, drawn(name, seed, "get_weather", "get"))
        assert text.strip() == "Well, let me see."
        assert calls
        for called, arguments in calls:
            assert called in SCHEMAS
            assert set(arguments) <= ({"city", "days"} if called == "get_weather" else set())
            assert arguments.get("city", "Oslo") in ("Oslo", "São Paulo")
            assert arguments.get("days", 1) in range(1, 10)
            assert ("city" in arguments) == (called == "get_weather")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_a_tool_that_is_not_strict_are_any(name: str) -> None:
    grammar = compiled(lark(grammar_of(name).grammar))
    strict = compiled(lark(grammar_of(name, "get").grammar))
    text = {
        "hermes": '<tool_call>{"name": "get", "arguments": {"x": [1]}}\n</tool_call>',
        "granite": '<|tool_call|>[{"name": "get", "arguments": {"x": [1]}}]',
        "phi4": '<|tool_call|>[{"name": "get", "arguments": {"x": [1]}}]<|/tool_call|>',
        "llama3": '{"name": "get", "parameters": {"x": [1]}}',
        "llama4": '{"name": "get", "parameters": {"x": [1]}}',
        "lfm2": "<|tool_call_start|>[get(x=[1])]<|tool_call_end|>",
        "mistral": '[TOOL_CALLS] [{"name": "get", "arguments": {"x": [1]}}]',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
        '{"x": [1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
        '{"x": [1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="x" '
        'string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="x" '
        'string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
        '{"x": [1]}<|tool_call_end|><|tool_calls_section_end|>',
        "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|><|open|>argument key="x" '
        'type="array"<|sep|>[1]<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "minimax_m2": '<minimax:tool_call>\n<invoke name="get">\n<parameter name="x">[1]</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "qwen3_coder": "<tool_call>\n<function=get>\n<parameter=x>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "seed_oss": "<seed:tool_call><function=get>\n<parameter=x>\n[1]\n</parameter>\n</function>\n</seed:tool_call>",
        "glm4": "<tool_call>get\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        "gemma4": "<|tool_call>call:get{x:[1]}<tool_call|>",
        "harmony": "<|channel|>commentary to=functions.get <|constrain|>json<|message|>" + '{"x": [1]}<|call|>',
    }[name]
    ids = ids_of(text)
    for one, is_taken in ((grammar, True), (strict, False)):
        state = one.start(EOS)
        assert (all(state.advance(token_id) for token_id in ids) and state.is_done) is is_taken
    before = "<|start|>assistant" if name == "harmony" else ""
    assert calls_of(name, before + text) == ("", [("get", {"x": [1]})])


# Spellings that models begin by themselves beside their template's, whole.
FURTHER = {
    "qwen3_coder": ["<function=get>\n</function>"],
    "phi4": ['functools[{"name": "get", "arguments": {}}]', 'functools[ {"name": "get", "arguments": {}}]'],
    "granite": ['<tool_call>[{"name": "get", "arguments": {}}, {"name": "get", "arguments": {}}]'],
    "llama3": [
        '{"name":"get","parameters":{}}',
        '{"type": "function", "name": "get", "parameters": {}}',
        "<|python_tag|>get_weather.call(city='Oslo')",
        "<|python_tag|>get_weather(city='Oslo')",
    ],
    "llama4": ["<|python_start|>get_weather(city='Oslo')", '{"type":"function","name":"get","parameters":{}}'],
    "harmony": [
        "<|channel|>analysis to=functions.get <|constrain|>json<|message|>{}<|call|>",
        " to=functions.get<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FURTHER.items() for text in texts])
def test_a_call_in_a_further_spelling_of_its_format_is_held(name: str, text: str) -> None:
    state = state_of(name, "get", "get_weather")
    ids, was_held = ids_of(text), False
    for token_id in ids:
        assert state.advance(token_id)
        was_held = was_held or not state.is_free
    assert was_held
    assert state.is_free
    before = "<|start|>assistant" if name == "harmony" else ""
    said, calls = calls_of(name, before + text)
    assert said.strip() == ""
    assert calls
    assert all(call in [("get", {}), ("get_weather", {"city": "Oslo"})] for call in calls)
    # A tool that was not offered cannot be written; where its name is part of the beginning, the text is no call.
    state, wrong = state_of(name, "get"), text.replace("get", "rm")
    assert not take(state, wrong) or state.is_free


@pytest.mark.parametrize("text", ["<|python_tag|>import math\nprint(math.pi)", '{"name": "Ada", "born": 1815}'])
def test_code_behind_llamas_tag_and_data_stay_free(text: str) -> None:
    state = state_of("llama3", "get")
    assert take(state, text)
    assert state.is_free


def test_hundreds_of_tools_have_no_more_beginnings_than_a_service_takes() -> None:
    schemas = {f"tool_{number}": SCHEMAS["get"] for number in range(400)}
    made = held_grammar(choose_format("", "llama4", "none"), schemas, (), {}, max_calls=1)
    assert len(made.opens) == MOST_MARKERS
    # Each tool by the usual spellings.
    assert set(made.opens) >= {f'{{"name": "{name}"' for name in schemas} | {f"[{name}(" for name in schemas}


def test_many_strict_tools_of_llama_are_held_in_json_rather_than_refused() -> None:
    def made(number: int) -> HeldGrammar:
        schemas = {f"tool_{one}": SCHEMAS["get_weather"] for one in range(number)}
        return held_grammar(choose_format("", "llama3", "none"), schemas, list(schemas), {}, max_calls=1)

    few, many = made(10), made(200)
    assert any(one.startswith("<|python_tag|>") for one in few.opens)
    assert not any(one.startswith("<|python_tag|>") for one in many.opens)
    assert '{"name": "tool_199"' in many.opens
    assert len(many.grammar.encode()) < GrammarLimits().max_constraint_bytes
    assert compiled(lark(many.grammar))


def test_text_before_a_call_and_after_it_is_free() -> None:
    state = state_of("hermes", "get_weather")
    for part in ("a < b, <tool", " and <tool_calls>, then ", HERMES[: len("<tool_call")]):
        assert take(state, part)
        assert state.is_free
    assert take(state, ">")
    assert not state.is_free
    assert not state.copy().advance(ids_of("x")[0])
    assert take(state, HERMES.removeprefix("<tool_call>"))
    assert state.is_free
    assert take(state, " anything <tool_call>\n")
    assert not state.is_free


def test_a_call_of_no_tool_cannot_be_written() -> None:
    state = state_of("hermes")
    assert take(state, '<tool_call>\n{"name": "')
    assert not take(state, "rm")


def test_an_output_does_not_end_within_a_call() -> None:
    state = state_of("hermes")
    assert state.copy().advance(EOS[0])
    assert take(state, "<tool_call>")
    assert not allowed(state) & set(EOS)
    assert not state.advance(EOS[0])


def test_a_copy_goes_its_own_way() -> None:
    state = state_of("hermes")
    assert take(state, "<tool_")
    twin = state.copy()
    assert take(twin, "call>")
    assert (state.is_free, twin.is_free) == (True, False)
    assert take(state, "call")
    assert state.is_free


def test_a_marker_may_be_spelled_in_pieces_and_its_last_token_may_go_on() -> None:
    state = state_of("hermes")
    (token_id,) = ids_of(">\n")
    assert take(state, "I see. <tool_call")
    assert state.is_free
    assert state.advance(token_id)
    assert not state.is_free
    assert take(state, '{"name": "get", "arguments": {}}\n</tool_call>')
    assert state.is_free


@pytest.mark.parametrize("is_open", [True, False])
def test_a_call_drafted_in_a_thought_is_free(is_open: bool) -> None:
    state = state_of("hermes", thought=Thought("<think>", ("</think>",), is_open=is_open))
    assert take(state, ("" if is_open else "<think>") + "I could write <tool_call> x, too.")
    assert state.is_free
    assert take(state, "</think>\n\n<tool_call>")
    assert not state.is_free


def test_an_answer_without_the_thought_that_might_come_is_held() -> None:
    state = state_of("hermes", thought=Thought("<think>", ("</think>",)))
    assert take(state, "<tool_call>")
    assert not state.is_free


def test_a_name_that_begins_another_is_told_from_it() -> None:
    for called in ("get", "get_weather"):
        state = state_of("harmony")
        assert take(state, f"<|channel|>commentary to=functions.{called} <|constrain|>json<|message|>" + "{}<|call|>")
        assert state.is_free


def test_gemmas_values_within_values_are_free_where_its_tool_is_not_strict() -> None:
    text = '<|tool_call>call:get{x:[1,{a:<|"|>b, "c"}<|"|>,d:{}}],y:null}<tool_call|>'
    state = compiled(lark(grammar_of("gemma4").grammar)).start(EOS)
    assert all(state.advance(token_id) for token_id in ids_of(text))
    assert state.is_done
    assert calls_of("gemma4", text) == ("", [("get", {"x": [1, {"a": 'b, "c"}', "d": {}}], "y": None})])


# How a list of calls as Python writes them begins and ends.
LISTS = {"lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>"), "llama4": ("[", "]")}


def takes(name: str, text: str, *strict: str) -> bool:
    begin, end = LISTS[name]
    state = compiled(lark(grammar_of(name, *strict).grammar)).start(EOS)
    return all(state.advance(token_id) for token_id in ids_of(f"{begin}{text}{end}")) and state.is_done


@pytest.mark.parametrize("name", LISTS)
def test_calls_as_python_writes_them_are_held(name: str) -> None:
    begin, end = LISTS[name]
    calls = {
        "get_weather(city='Oslo', days=3), get()": [("get_weather", {"city": "Oslo", "days": 3}), ("get", {})],
        'get_weather(city="São Paulo")': [("get_weather", {"city": "São Paulo"})],
    }
    for text, meant in calls.items():
        assert takes(name, text, "get", "get_weather")
        assert calls_of(name, f"{begin}{text}{end}") == ("", meant)
    for wrong in ("rm()", "get(x=1)", "get_weather()", "get_weather(city='Rome')", "get_weather(city='Oslo', days=10)"):
        assert not takes(name, wrong, "get", "get_weather"), wrong


@pytest.mark.parametrize("name", LISTS)
def test_pythons_values_are_free_where_its_tool_is_not_strict(name: str) -> None:
    begin, end = LISTS[name]
    text = """get(x=[1, {'a': 'b "c"', "d": {}}], from="it's", on=True, content-type=None)"""
    meant = {"x": [1, {"a": 'b "c"', "d": {}}], "from": "it's", "on": True, "content-type": None}
    assert takes(name, text)
    assert calls_of(name, f"{begin}{text}{end}") == ("", [("get", meant)])


def test_a_model_that_is_asked_for_json_writes_lfm2s_calls_so() -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "get", "arguments": {}}'
    assert takes("lfm2", text, "get", "get_weather")


def test_a_strict_tool_has_values_of_every_kind_in_pythons_spelling() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": point, "minItems": 1},
            "note": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "null"}]},
            "class": {"enum": [1, "a", True]},
        },
        "required": ["points"],
    }
    made = held_grammar(choose_format("", "lfm2", "none"), {"plot": schema}, ["plot"], {}, max_calls=1)
    grammar = compiled(lark(made.grammar))

    def obeys(arguments: str) -> bool:
        state = grammar.start(EOS)
        text = f"<|tool_call_start|>[plot({arguments})]<|tool_call_end|>"
        return all(state.advance(token_id) for token_id in ids_of(text)) and state.is_done

    for arguments in (
        'points=[{"x": 1.5, "on": True}, {\'x\': -2}], note=None, class="a"',
        'points=[{"x":1,"on":false}],note="ab"',
        'points=[{"x": 1}], class=1',
    ):
        assert obeys(arguments), arguments
    for arguments in ("points=[]", 'points=[{"on": True}]', 'points=[{"x": 1}], note="A"', "points=[{'x': '1'}]", ""):
        assert not obeys(arguments), arguments


def test_a_tool_that_python_cannot_name_is_called_as_an_object() -> None:
    schemas: dict[str, dict[str, Any]] = {
        "odd name": {"type": "object", "properties": {}},
        "odd": {"properties": {"a b": {"type": "string"}}},
    }
    made = held_grammar(choose_format("", "lfm2", "none"), schemas, list(schemas), {}, max_calls=1)
    assert compiled(lark(made.grammar))
    assert "odd(" not in made.grammar
