"""Grammars of forced calls: they take the format's own spelling, and whatever they let through are whole calls."""

from __future__ import annotations

import json
import random
from dataclasses import replace
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
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from penstock.generation.grammar.spec import ConstraintKind
from penstock.generation.grammar.translate import Untranslatable, to_lark
from penstock.router.chat.chat_output import make_parser
from penstock.router.chat.forced_calls import answer_grammar, answer_or_calls_grammar, forced_grammar
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
MEMBERS = ["qwen3_coder", "seed_oss", "minimax_m2", "glm4", "deepseek_v32", "deepseek_v4", "kimi_k3"]


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
        text = member_call(name, note)
        assert accepts(grammar, text)
        assert calls_of(name, text, NOTE)[1] == [("note", {"text": note})]


def member_call(name: str, value: str, *, is_string: bool = True) -> str:
    """Call of `note` with the parameter `text`, as the format writes it."""
    return {
        "qwen3_coder": f"<tool_call>\n<function=note>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>",
        "seed_oss": f"<seed:tool_call>\n<function=note>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
        "</seed:tool_call>",
        "minimax_m2": f'<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">{value}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "glm4": f"<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "kimi_k3": '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="note" index="1"<|sep|>'
        f'<|open|>argument key="text" type="{"string" if is_string else "null"}"<|sep|>{value}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="note">\n<｜DSML｜parameter name="text" '
        f'string="{str(is_string).lower()}">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    }[name.replace("_v4", "_v32")].replace(
        "function_calls", "tool_calls" if name == "deepseek_v4" else "function_calls"
    )


def note_with(schema: dict[str, Any], **root: Any) -> dict[str, dict[str, Any]]:
    return {"note": {"type": "object", "properties": {"text": schema}, "required": ["text"], **root}}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ({"pattern": "^[a-z]+/[0-9]{2}$"}, ["ab/12"], ["ab/1", "AB/12", "xab/12 "]),
        ({"pattern": "b+"}, ["abc", "b"], ["ac", ""]),
        ({"pattern": "^a|c$"}, ["ab", "bc"], ["bca"]),
        ({"minLength": 2, "maxLength": 4}, ["ab", "a\nbc", "éééé"], ["a", "abcde"]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "soon"]),
        ({"format": "email"}, ["a.b@example.org"], ["a b@example.org", "a@b"]),
        ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ({"format": "ipv4"}, ["192.0.2.7"], ["192.0.2.256"]),
        ({"const": "left"}, ["left"], ["right"]),
        ({"maxLength": 6, "pattern": "^[a-z]+$", "minLength": 3}, ["abc"], ["ab", "abcdefg", "ABC"]),
        ({"allOf": [{"pattern": "^a"}, {"maxLength": 3}]}, ["abc"], ["abcd", "bcd"]),
        ({"format": "regex", "title": "Note"}, ["any(", ""], []),
    ],
)
def test_text_of_a_parameter_obeys_its_schema(
    name: str, words: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    schemas = note_with({"type": "string", **words})
    grammar = compiled(lark(grammar_of(name, schemas)))
    for value in good:
        assert accepts(grammar, member_call(name, value)), value
        assert calls_of(name, member_call(name, value), schemas)[1] == [("note", {"text": value})]
    for value in bad:
        assert not accepts(grammar, member_call(name, value)), value


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize(
    "schemas",
    [
        note_with({"$ref": "#/$defs/Side"}, **{"$defs": {"Side": {"type": "string", "enum": ["left", "right"]}}}),
        note_with({"allOf": [{"$ref": "#/$defs/Side"}], "enum": ["left"]}, **{"$defs": {"Side": {"type": "string"}}}),
        note_with({"anyOf": [{"enum": ["left", "right"]}, {"type": "null"}]}),
        note_with({"type": ["string", "null"], "maxLength": 5}),
        note_with({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}]}),
    ],
)
def test_a_text_by_reference_or_among_others_is_written_as_a_text(name: str, schemas: dict[str, Any]) -> None:
    grammar = compiled(lark(grammar_of(name, schemas)))
    text = member_call(name, "left")
    assert accepts(grammar, text)
    assert calls_of(name, text, schemas)[1] == [("note", {"text": "left"})]
    assert not accepts(grammar, member_call(name, "sideways"))


@pytest.mark.parametrize("name", MEMBERS)
def test_null_beside_a_text_is_null(name: str) -> None:
    schemas = note_with({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]})
    text = member_call(name, "null", is_string=False)
    assert accepts(compiled(lark(grammar_of(name, schemas))), text)
    assert calls_of(name, text, schemas)[1] == [("note", {"text": None})]


@pytest.mark.parametrize("name", MEMBERS)
def test_texts_with_a_bound_that_the_grammar_allows_are_read_back_as_they_are(name: str) -> None:
    schemas = note_with({"type": "string", "minLength": 1, "maxLength": 9, "pattern": r"^[<>/a-z\n\]\[p]+$"})
    for seed in range(4):
        rest, calls, ends = calls_of(name, written(grammar_of(name, schemas, max_calls=1), "", seed), schemas)
        assert (rest.strip(), ends) == ("", True)
        (call,) = calls
        assert 1 <= len(call[1]["text"]) <= 9


def test_a_text_that_no_grammar_holds_names_the_tool_and_the_keyword() -> None:
    text = grammar_of("glm4", note_with({"type": "string", "not": {"const": "x"}}))
    with pytest.raises(Untranslatable, match=r"tool note, parameter text, at #: `not` is not supported"):
        to_lark(ConstraintKind.GRAMMAR, text, ())


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


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3", "kimi_k2"])
@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "description": "Nothing."}, False),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object", "properties": {}, "minProperties": 1}, True),
    ],
)
def test_a_tool_without_parameters_is_called_without_arguments(
    name: str, schema: dict[str, Any], is_open: bool
) -> None:
    grammar = compiled(lark(grammar_of(name, {"ping": schema}, max_calls=1)))
    call = {
        "hermes": '<tool_call>\n{"name": "ping", "arguments": %s}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "ping", "arguments": %s}]',
        "llama3": '{"name": "ping", "parameters": %s}',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>%s"
        "<|tool_call_end|><|tool_calls_section_end|>",
    }[name]
    assert accepts(grammar, call % '{"a": null}') is is_open
    assert accepts(grammar, call % "{}") is ("minProperties" not in schema)


def test_kimi_k3_names_the_types_that_a_schema_has_and_escapes_names() -> None:
    schemas = {
        'a"&b': {
            "type": "object",
            "properties": {
                'k"': {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "t": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            },
            "required": ['k"'],
        }
    }
    grammar = compiled(lark(grammar_of("kimi_k3", schemas)))

    def call(kind: str, value: str, *more: str) -> str:
        key = f'<|open|>argument key="k&quot;" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        begin = '<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="a&quot;&amp;b"'
        return f'{begin} index="1"<|sep|>{key}{"".join(more)}<|close|>call<|sep|><|close|>tools<|sep|>'

    text = call("number", "3", '<|open|>argument key="t" type="array"<|sep|>[1, 2]<|close|>argument<|sep|>')
    assert accepts(grammar, text)
    assert calls_of("kimi_k3", text, schemas) == ("", [('a"&b', {'k"': 3, "t": [1, 2]})], True)
    assert accepts(
        grammar, call("null", "null", '<|open|>argument key="t" type="string"<|sep|>x<|close|>argument<|sep|>')
    )
    for wrong in (call("string", "3"), call("boolean", "3"), call("number", '"3"')):
        assert not accepts(grammar, wrong)


def test_a_key_that_looks_like_a_placeholder_is_written_as_it_is() -> None:
    schemas = {"note": {"type": "object", "properties": {"%s": {"type": "integer"}}, "required": ["%s"]}}
    for name in ("deepseek_v4", "kimi_k3"):
        text = written(grammar_of(name, schemas, max_calls=1), "", 1)
        (call,) = calls_of(name, text, schemas)[1]
        assert set(call[1]) == {"%s"}


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


def test_an_answer_of_kimi_k3_begins_behind_its_marker() -> None:
    grammar = answer_state("kimi_k3", "kimi_k3", in_reasoning=True)
    assert accepts(grammar, "Is it 7?<|close|>think<|sep|><|open|>response<|sep|>42")
    assert not accepts(grammar, "Is it 7?<|close|>think<|sep|><|open|>response<|sep|>x")


def test_an_answer_of_a_model_without_thoughts_is_all() -> None:
    grammar = answer_state("hermes", "none", in_reasoning=False)
    assert accepts(grammar, "42")
    assert not accepts(grammar, "<think>a</think>42")


def either(name: str, schemas: dict[str, dict[str, Any]], strict: tuple[str, ...] = ()) -> Any:
    """Grammar of an answer of digits, or of calls."""
    chat = choose_format("", name, "none")
    ids = {marker: ids_of(marker) for marker in chat.kept_for(with_tools=True)}
    token_ids = {marker: found[0] for marker, found in ids.items() if len(found) == 1}
    around = answer_or_calls_grammar(
        chat, schemas, strict, token_ids, max_calls=2, in_reasoning=False, may_think=chat.tools.is_harmony
    )
    return compiled_around(replace(regex("[0-9]+"), may_be_calls=True), around)


@pytest.mark.parametrize("name", NAMES)
def test_beside_a_constraint_an_output_is_the_answer_or_calls(name: str) -> None:
    """A constraint left no room for calls: a model with tools and a schema for its answer never called one."""
    begin = {"harmony": "<|channel|>final<|message|>", "kimi_k3": "<|open|>response<|sep|>"}.get(name, "")
    seeds = range(2)
    head = "<|channel|>commentary" if name == "harmony" else ""
    calls = [written(grammar_of(name, SCHEMAS, max_calls=2), head, seed) for seed in seeds]
    strict, free = either(name, SCHEMAS, ("get_weather", "ping")), either(name, SCHEMAS)
    for grammar in (strict, free):
        assert accepts(grammar, f"{begin}42")
        for wrong in (f"{begin}x", "", f"{begin}42{calls[0]}", f"{calls[0]}42", "It rains."):
            assert not accepts(grammar, wrong), wrong
    for text in calls:
        assert accepts(strict, text), text
        assert calls_of(name, text, SCHEMAS)[2]


def test_arguments_beside_a_constraint_obey_the_schemas_of_strict_tools_alone() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "who": [1]}}\n</tool_call>'
    assert accepts(either("hermes", SCHEMAS), call)
    assert accepts(either("hermes", SCHEMAS, ("ping",)), call)
    assert not accepts(either("hermes", SCHEMAS, ("get_weather",)), call)
    assert not accepts(either("hermes", SCHEMAS), call.replace("get_weather", "get_time"))


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


@pytest.mark.parametrize("name", MEMBERS)
def test_a_service_that_knows_no_schemas_of_texts_takes_the_grammar_as_any_text(name: str) -> None:
    text = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}
    schemas = {"note": {"type": "object", "properties": {"text": text}, "required": ["text"]}}
    grammar = grammar_of(name, schemas)
    assert "%text" in grammar
    # What such a service gives to llguidance; the schemas stand in comments there.
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    assert "%text" not in to_lark(ConstraintKind.GRAMMAR, grammar, ())


# A schema of every kind that Gemma's spelling has, and of some that only JSON has.
DEEP: dict[str, dict[str, Any]] = {
    "plan": {
        "type": "object",
        "properties": {
            "who": {"$ref": "#/$defs/person"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "either": {"anyOf": [{"type": "string", "enum": ["x", "y"]}, {"type": "integer", "minimum": 7}]},
            "odd: key": {"type": ["boolean", "null"]},
            "pair": {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "minItems": 2, "maxItems": 2},
            "tree": {"$ref": "#/$defs/tree"},
        },
        "required": ["who", "tags"],
        "$defs": {
            "person": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}, "age": {"type": "integer"}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}},
            },
        },
    }
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("seed", range(4))
def test_gemmas_own_spelling_obeys_a_schema_of_every_kind(seed: int) -> None:
    text = written(grammar_of("gemma4", DEEP), "", seed, 8000)
    _, calls, ends = calls_of("gemma4", text, DEEP)
    assert ends, text
    for _, arguments in calls:
        assert not list(Draft202012Validator(DEEP["plan"]).iter_errors(arguments)), text


def test_gemmas_own_spelling_of_a_nested_value_is_taken() -> None:
    call = '<|tool_call>call:plan{either:9,tags:[<|"|>a<|"|>,<|"|>b<|"|>],who:{name:<|"|>Ada<|"|>}}<tool_call|>'
    assert accepts(compiled(lark(grammar_of("gemma4", DEEP))), call)
    wrong = call.replace("Ada", "ada")
    assert not accepts(compiled(lark(grammar_of("gemma4", DEEP))), wrong)
