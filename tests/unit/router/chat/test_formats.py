"""Tool-call formats: examples in each published spelling, with names of this test, give the same calls in any split.

The spellings are those of model cards, of openai/harmony's docs/format.md, and of the parsers' tests of vLLM
(tests/tool_parsers) and SGLang (test/registered/function_call), as of November 2026.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.errors import StartupError
from penstock.router.chat.chat_output import make_parser
from penstock.router.chat.formats import REASONING, TOOLS, ToolFormat, choose_format
from penstock.router.chat.prompt_thought import thought_before
from penstock.router.config import RouterConfig

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "properties": {"city": {"type": "string"}, "metric": {"type": "string"}, "days": {"type": "integer"}}
    },
    "get_time": {"properties": {"zone": {"type": "string"}}},
    "search": {
        "properties": {"query": {"type": "string"}, "filters": {"type": "object"}, "exact": {"type": "boolean"}}
    },
    "note": {
        "properties": {
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": ["integer", "null"]},
            "either": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        }
    },
}


class Example(NamedTuple):
    """A text as a model writes it, and what it says."""

    format: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str = ""
    reasoning: str = ""


OSLO = ("get_weather", {"city": "Oslo"})
PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {"zone": "Europe/Oslo"})
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
EXAMPLES = [
    Example("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', [OSLO]),
    Example(
        "hermes",
        "<think>\nBoth are needed.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "Europe/Oslo"}}\n</tool_call>',
        [PARIS, TIME],
        "I look.\n",
        "Both are needed.",
    ),
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n<parameter=zone>\nEurope/Oslo\n</parameter>\n"
        "</function>\n</tool_call>",
        [PARIS, TIME],
    ),
    Example(
        "qwen3_coder",
        'A moment.\n<tool_call>\n<function=search>\n<parameter=query>\na "b"\n  <c> &\n</parameter>\n'
        "<parameter=filters>\n"
        '{"year": [2024, null]}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>',
        [("search", {"query": 'a "b"\n  <c> &', "filters": {"year": [2024, None]}, "exact": True})],
        "A moment.\n",
    ),
    Example("llama3", '{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eom_id|>'[:-10], [OSLO]),
    Example(
        "llama3", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}', [OSLO]
    ),
    Example(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "get_time", "parameters": {"zone": "Europe/Oslo"}}',
        [PARIS, TIME],
    ),
    Example("llama3", '<|python_tag|>search.call(query="latest (news)")', [("search", {"query": "latest (news)"})]),
    Example("llama4", "[get_weather(city=\"Paris\", days=3), get_time(zone='Europe/Oslo')]", [PARIS, TIME]),
    Example("llama4", '<|python_start|>[get_weather(city="Oslo")]<|python_end|>', [OSLO]),
    Example(
        "llama4",
        '[search(query="]) \\" x", filters={"a": [1, -2], "b": None}, exact=True)]',
        [("search", {"query": ']) " x', "filters": {"a": [1, -2], "b": None}, "exact": True})],
    ),
    Example("lfm2", '<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>', [OSLO]),
    Example(
        "lfm2",
        "I look.<|tool_call_start|>[get_weather(city='Paris', days=3), "
        'get_time(zone="Europe/Oslo")]<|tool_call_end|>',
        [PARIS, TIME],
        "I look.",
    ),
    Example(
        "lfm2",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|tool_call_end|>',
        [OSLO],
    ),
    # Words of Python's own, and a hyphen, as keys; JSON's escapes, and some that neither language has.
    Example(
        "lfm2",
        r"""<|tool_call_start|>[search(from="a\/\ud83d\ude00", content-type='\d, "x"', class={"k": [null, "\\"]})]"""
        "<|tool_call_end|>",
        [("search", {"from": "a/\U0001f600", "content-type": '\\d, "x"', "class": {"k": [None, "\\"]}})],
    ),
    Example(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n'
        '<｜DSML｜parameter name="zone" string="true">Europe/Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        [PARIS, TIME],
    ),
    Example(
        "mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "VvvODy9mT"}]', [OSLO]
    ),
    Example(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "get_time", "arguments": {"zone": "Europe/Oslo"}}]',
        [PARIS, TIME],
    ),
    Example(
        "mistral",
        'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}'
        '[TOOL_CALLS]get_time[ARGS]{"zone": "Europe/Oslo"}',
        [PARIS, TIME],
        "Well.",
    ),
    Example("mistral", '[TOOL_CALLS]get_weather[CALL_ID]Xa9[ARGS]{"city": "Oslo"}', [OSLO]),
    Example("mistral", '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather{"city": "Oslo"}', [OSLO], reasoning="Hm."),
    Example(
        "deepseek_v3",
        f'<｜tool▁calls▁begin｜>{BEGIN}function{SEP}get_weather\n```json\n{{"city": "Paris", "days": 3}}\n```{END}\n'
        f'{BEGIN}function{SEP}get_time\n```json\n{{"zone": "Europe/Oslo"}}\n```{END}<｜tool▁calls▁end｜>',
        [PARIS, TIME],
    ),
    Example(
        "deepseek_v31",
        f'<｜tool▁calls▁begin｜>{BEGIN}get_weather{SEP}{{"city": "Paris", "days": 3}}{END}'
        f'{BEGIN}get_time{SEP}{{"zone": "Europe/Oslo"}}{END}<｜tool▁calls▁end｜>',
        [PARIS, TIME],
    ),
    Example(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        'Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">'
        "3</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
        "</｜DSML｜function_calls>",
        [PARIS],
    ),
    Example(
        "glm4",
        "<think>ask</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_time<arg_key>zone</arg_key><arg_value>Europe/Oslo</arg_value></tool_call>",
        [PARIS, TIME],
        reasoning="ask",
    ),
    Example("glm4", "<tool_call>get_time\n</tool_call>", [("get_time", {})]),
    Example(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
        '<|tool_call_argument_begin|>{"zone": "Europe/Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        [PARIS, TIME],
    ),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
        reasoning="Need the weather.",
    ),
    Example(
        "harmony",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant to=functions.get_time<|channel|>"
        'commentary json<|message|>{"zone": "Europe/Oslo"}<|call|>',
        [TIME],
        "I look it up.",
    ),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
        [],
        "It is 4.",
        "Easy.",
    ),
    # Further shapes that model cards, other engines' tests and reports show.
    Example("harmony", "<|channel|>commentary to=functions.get_time<|message|>{}", [("get_time", {})]),
    Example(
        "harmony",
        '<|channel|>commentary to=functions.get_weather<|constrain|>json\n<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
    ),
    Example(
        "kimi_k2",
        "Wait.<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.get_weather:0<|tool_call_argument_begin|>\n"
        '{"city": "Oslo"}\n<|tool_call_end|>\n<|tool_calls_section_end|>',
        [OSLO],
        "Wait.",
    ),
    Example(
        "deepseek_v31",
        f"北<｜tool▁calls▁begin｜>\n{BEGIN}get_time{SEP}{{}}{END}\n<｜tool▁calls▁end｜>",
        [("get_time", {})],
        "北",
    ),
    Example("mistral", '[TOOL_CALLS] get_weather{"city": "Oslo"}', [OSLO]),
    Example("hermes", '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>', [OSLO]),
    Example(
        "llama4",
        """I see: <|python_start|>[search(query='It\\'s "so"', exact=False)]<|python_end|>""",
        [("search", {"query": 'It\'s "so"', "exact": False})],
        "I see: ",
    ),
    Example(
        "hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', [OSLO]
    ),
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        [PARIS],
    ),
    Example(
        "qwen3_coder",
        "I look.\n\n<function=get_weather>\n<parameter=city>Oslo\n</function>\n</tool_call>",
        [OSLO],
        "I look.\n\n",
    ),
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=note>\n<parameter=text>\n12\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
        '<parameter=either>\n12\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        [("note", {"text": "12", "count": 12, "either": 12, "tags": ["a", "b"]})],
    ),
    Example(
        "minimax_m2",
        '<minimax:tool_call><invoke name="note"><parameter name="text">null</parameter><parameter name="either">true'
        "</parameter></invoke></minimax:tool_call>",
        [("note", {"text": None, "either": "true"})],
    ),
    Example(
        "llama3",
        'I call {"name": "get_weather", "parameters": {"city": "Oslo"}}',
        [OSLO],
        "I call ",
    ),
    *(
        Example(
            "llama3",
            f'{{"name": "get_weather", "arguments": {{"city": "Paris", "days": 3}}}}{separator}'
            '{"name": "get_time", "parameters": {"zone": "Europe/Oslo"}}',
            [PARIS, TIME],
        )
        for separator in (";", " ; ", ";\n", "\n")
    ),
    Example(
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}'
        '<|python_tag|>{"name": "get_time", "parameters": {}}',
        [OSLO, ("get_time", {})],
    ),
    Example(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{\n"city": "Paris", "days": 3\n}\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [PARIS, ("get_time", {})],
    ),
    Example(
        "phi4",
        'functools[\n  {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}},\n'
        '  {"name": "get_time", "arguments": {"zone": "Europe/Oslo"}}\n]',
        [PARIS, TIME],
    ),
    Example("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [OSLO]),
    Example(
        "granite",
        '<tool_call>[{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}, '
        '{"name": "get_time", "arguments": {"zone": "Europe/Oslo"}}]',
        [PARIS, TIME],
    ),
    Example("phi4", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', [OSLO]),
    Example(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        [PARIS],
    ),
    # GLM-4.7 and 5: no line breaks, and calls without parameters.
    Example(
        "glm4",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        [OSLO, ("get_time", {})],
    ),
    Example("gemma4", '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>', [OSLO]),
    Example(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        [OSLO],
    ),
    Example(
        "kimi_k3",
        "<|open|>think<|sep|>Both.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Paris<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="get_time" index="2"<|sep|><|open|>argument '
        'key="zone" type="string"<|sep|>Europe/Oslo<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        [PARIS, TIME],
        "I look.",
        "Both.",
    ),
    # Values of every type, attributes with escapes, and a call without arguments.
    Example(
        "kimi_k3",
        '<|open|>tools<|sep|>\n<|open|>call tool="search" index="1"<|sep|><|open|>argument key="query" '
        'type="string"<|sep|> żółw "<b>" &amp;\n<|close|>argument<|sep|><|open|>argument key="filters" '
        'type="object"<|sep|>{"by": ["a", null, -1.5e3]}<|close|>argument<|sep|><|open|>argument key="exact" '
        'type="boolean"<|sep|>true<|close|>argument<|sep|><|open|>argument key="a &amp; &quot;b&quot;" '
        'type="null"<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>\n<|open|>call tool="get_time" index="2"'
        "<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [
            (
                "search",
                {
                    "query": ' żółw "<b>" &amp;\n',
                    "filters": {"by": ["a", None, -1500.0]},
                    "exact": True,
                    'a & "b"': None,
                },
            ),
            ("get_time", {}),
        ],
    ),
    # One object of JSON in place of the arguments; a value without its type.
    Example(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"city": "Paris", "days": 3}<|close|>json<|sep|><|close|>call<|sep|><|open|>call tool="get_weather" '
        'index="2"<|sep|><|open|>argument key="days"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        [PARIS, ("get_weather", {"days": 3})],
    ),
    Example("kimi_k3", "<|open|>response<|sep|>It is 4.<|close|>response<|sep|>", [], "It is 4."),
    # The prompt has begun the answer.
    Example("kimi_k3", "It is 4.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", [], "It is 4."),
    Example(
        "gemma4",
        "<|channel>thought\nBoth are needed.\n<channel|>I look."
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_time{zone:<|"|>Europe/Oslo<|"|>}<tool_call|>',
        [PARIS, TIME],
        "I look.",
        "Both are needed.",
    ),
    Example(
        "gemma4",
        'So: <|tool_call>call:search{exact:true,filters:{by:[<|"|>a, "b" {c}\n<|"|>,-1.5e3,null,[]],<|"|>x:y<|"|>:{}},'
        'query:<|"|>żółw [1]: {\\}<|"|>}<tool_call|>',
        [
            (
                "search",
                {
                    "exact": True,
                    "filters": {"by": ['a, "b" {c}\n', -1500.0, None, []], "x:y": {}},
                    "query": "żółw [1]: {\\}",
                },
            )
        ],
        "So: ",
    ),
    # Without quotes, as JSON, and as where a template was handed a text.
    Example(
        "gemma4",
        '<|tool_call>call:get_weather{city:Oslo, "days": 3}<tool_call|>'
        '<|tool_call>call:get_weather{{"city": "Oslo"}}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        [("get_weather", {"city": "Oslo", "days": 3}), OSLO, ("get_time", {})],
    ),
    Example(
        "seed_oss",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
        "</function>\n</seed:tool_call>",
        [OSLO],
        reasoning="Hm.",
    ),
]
# Reasoning of the examples' own models.
THOUGHTS = {"gemma4": "gemma", "kimi_k3": "kimi_k3", "mistral": "mistral", "seed_oss": "seed"}


def parse(
    name: str, pieces: list[str], *, thought: str = "", is_cut: bool = False, is_stopped: bool = False, **settings: Any
) -> tuple[str, str, list[list[str]], bool]:
    """Return (text, reasoning, [name, arguments, id given] of the calls, ends in calls) of `pieces`."""
    chat = choose_format("", name, thought or THOUGHTS.get(name, "auto"))
    settings.setdefault("schemas", SCHEMAS)
    parser = make_parser(chat, parse_tools=True, make_id=lambda: "made", **settings)
    text = reasoning = ""
    calls: list[list[str]] = []
    for piece in [*map(parser.feed, pieces), parser.finish(is_cut=is_cut, is_stopped=is_stopped)]:
        text, reasoning = text + piece.text, reasoning + piece.reasoning
        for call in piece.tool_calls:
            if call.index == len(calls):
                calls.append([call.name, "", call.call_id])
            calls[call.index][1] += call.arguments
    return text, reasoning, calls, parser.ends_in_tool_calls


def named(example: Example) -> str:
    return f"{example.format}-{EXAMPLES.index(example) if example in EXAMPLES else 'bare'}"


def test_at_least_twelve_formats_have_examples() -> None:
    assert {example.format for example in EXAMPLES} == {row.name for row in TOOLS}
    assert len(TOOLS) >= 12


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_an_example_gives_its_calls(example: Example) -> None:
    text, reasoning, calls, ends = parse(example.format, [example.text])
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == example.calls
    assert (text, reasoning, ends) == (example.content, example.reasoning, bool(example.calls))


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_split_at_every_place_and_at_all_of_them_gives_the_same(example: Example) -> None:
    whole = parse(example.format, [example.text])
    assert parse(example.format, list(example.text)) == whole
    for place in range(1, len(example.text)):
        assert parse(example.format, [example.text[:place], example.text[place:]]) == whole


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_every_byte_for_itself_gives_the_same(example: Example) -> None:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    pieces = [decode(bytes([byte])) for byte in example.text.encode()]
    assert parse(example.format, pieces) == parse(example.format, [example.text])


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_answer_cut_anywhere_is_text_or_a_partial_call(example: Example) -> None:
    whole = parse(example.format, [example.text])
    for place in range(len(example.text)):
        # However it came: any text is parsed alike in every split.
        _, _, calls, ends = parse(example.format, [example.text[:place]])
        complete = [call for call in calls if is_json(call[1])]
        # An answer that ends in calls has whole ones only, and those that it shares with the whole answer.
        assert not ends or complete == calls
        assert [call[0] for call in calls] == [call[0] for call in whole[2]][: len(calls)]


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


FRAGMENTS = sorted(
    {
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        ",",
        ";",
        "\n",
        " ",
        "get_weather",
        "to=functions.f",
        "```json",
        "<function=",
    }
    | {
        "<parameter=",
        ">",
        "</parameter>",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "a=1",
        "[" * 300,
        "{" * 300,
        "\\",
        "é",
    }
)


def fragments_of(row: ToolFormat) -> st.SearchStrategy[tuple[str, list[str]]]:
    """Pieces of a format: its markers, its examples and what is cut out of them, mixed with what breaks calls."""
    texts = [example.text for example in EXAMPLES if example.format == row.name]
    spans = st.tuples(st.sampled_from(texts), st.integers(0, 200), st.integers(1, 40))
    cuts = spans.map(lambda span: span[0][span[1] % len(span[0]) :][: span[2]])
    piece = st.sampled_from([*row.opens, *row.inner, *texts, *FRAGMENTS]) | cuts
    return st.tuples(st.just(row.name), st.lists(piece, max_size=10))


@given(st.sampled_from(TOOLS).flatmap(fragments_of))
def test_any_text_parses_alike_in_every_split(case: tuple[str, list[str]]) -> None:
    name, fragments = case
    text = "".join(fragments)
    whole = parse(name, [text])
    assert parse(name, list(text)) == whole
    assert parse(name, fragments) == whole
    assert all(name.encode() and arguments.encode() is not None for name, arguments, _ in whole[2])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "unknown_tool", "parameters": {}}'),
        ("llama4", "[see the (docs) for more]"),
        ("llama4", "[get_weather(city=open('x'))]"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("granite", "<|tool_call|>[not json]"),
        ("glm4", "<tool_call>no name here {}</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>nothing"),
        ("kimi_k3", "<|open|>tools<|sep|>nothing"),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|>'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>nothing"),
        ("qwen3_coder", "<tool_call>nothing</tool_call>"),
        ("gemma4", "<|tool_call>weather{city:1}<tool_call|>"),
        ("gemma4", "<|tool_call>call:get weather{}<tool_call|>"),
    ],
)
def test_what_is_no_call_comes_back_as_it_was(name: str, text: str) -> None:
    assert parse(name, [text]) == (text, "", [], False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm4", "<tool_call>no {} </tool_call>"),
        ("qwen3_coder", "<tool_call>nothing</tool_call>\n"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather\n</function>\n</tool_call>\n"),
        ("granite", "<|tool_call|>[not json]"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("llama3", 'An object: {"name": "Oslo", "parameters": {}} '),
        ("llama4", "<|python_start|>[get_weather(Oslo)]"),
        ("minimax_m2", "<minimax:tool_call>x"),
        ("gemma4", "<|tool_call>x"),
        ("kimi_k3", "<|open|>tools<|sep|>x"),
        ("phi4", "Python has functools and "),
    ],
)
def test_call_behind_what_is_none_is_found_in_every_split(name: str, text: str) -> None:
    row = next(row for row in TOOLS if row.name == name)
    marks = (*row.opens, *row.inline)
    call = next(one for one in EXAMPLES if one.format == name and one.calls and one.text.startswith(marks))
    whole = parse(name, [text + call.text])
    assert (whole[0].strip(), [one[0] for one in whole[2]]) == (text.strip(), [one[0] for one in call.calls])
    assert parse(name, list(text + call.text)) == whole


@pytest.mark.parametrize("value", ["b'x'", "{1, 2}", "3j", "...", "{[1]}", "1e999", "-'a'"])
def test_constant_that_json_has_none_of_leaves_the_text(value: str) -> None:
    text = f"[search(query={value})]"
    assert parse("llama4", [text]) == (text, "", [], False)


def test_arguments_that_are_a_text_come_as_json() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": "now"}</tool_call>'
    assert [call[1] for call in parse("hermes", [text])[2]] == ['"now"']


def test_arguments_come_as_they_are_written() -> None:
    parser = make_parser(choose_format("", "mistral"), parse_tools=True)
    assert [one.name for one in parser.feed('[TOOL_CALLS]f[ARGS]{"a"').tool_calls] == ["f", ""]
    assert [one.arguments for one in parser.feed(': "lo').tool_calls] == [': "lo']


def test_ids_that_a_model_writes_are_kept() -> None:
    text = next(one.text for one in EXAMPLES if one.format == "kimi_k2")
    assert [call[2] for call in parse("kimi_k2", [text])[2]] == ["functions.get_weather:0", "functions.get_time:1"]


@pytest.mark.parametrize("example", [one for one in EXAMPLES if len(one.calls) > 1], ids=named)
def test_further_calls_are_dropped_where_one_is_allowed(example: Example) -> None:
    _, _, calls, ends = parse(example.format, [example.text], max_calls=1)
    assert ([(name, json.loads(arguments)) for name, arguments, _ in calls], ends) == (example.calls[:1], True)


def test_value_without_a_schema_is_json_where_it_is_some() -> None:
    text = "<tool_call>f\n<arg_key>a</arg_key><arg_value>7</arg_value>"
    text += "<arg_key>b</arg_key><arg_value>x</arg_value></tool_call>"
    assert parse("glm4", [text], schemas={})[2][0][1] == '{"a": 7, "b": "x"}'


def test_text_of_a_parameter_that_is_text_stays_as_it_is() -> None:
    text = "<tool_call>get_time\n<arg_key>zone</arg_key><arg_value>007</arg_value></tool_call>"
    assert parse("glm4", [text])[2][0][1] == '{"zone": "007"}'


def test_no_thought_comes_where_the_prompt_has_begun_the_answer() -> None:
    chat = choose_format("<|open|><|close|><|sep|>")
    assert thought_before(chat, '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>', goes_on=False) is None
    found = thought_before(chat, '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', goes_on=False)
    assert found is not None
    assert (found.is_open, list(found.closes)) == (True, ["<|close|>think<|sep|>"])


def test_markers_around_an_answer_are_no_part_of_it_where_no_tools_are_offered() -> None:
    chat = choose_format("<|open|><|close|><|sep|>")
    parser = make_parser(chat, parse_tools=False, in_reasoning=True)
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>a <|b<|close|>response<|sep|><|close|>message<|sep|>"
    pieces = [*map(parser.feed, text), parser.finish()]
    assert "".join(piece.reasoning for piece in pieces) == "Hm."
    assert "".join(piece.text for piece in pieces) == "a <|b"


@pytest.mark.parametrize("row", REASONING, ids=lambda row: row.name)
def test_thought_of_each_reasoning_format(row: Any) -> None:
    parser = make_parser(choose_format("", "hermes", row.name), parse_tools=False)
    pieces = [parser.feed(char) for char in f"{row.opens}so it is{row.closes}Yes."] + [parser.finish()]
    assert "".join(piece.reasoning for piece in pieces).strip() == "so it is"
    assert "".join(piece.text for piece in pieces) == "Yes."


def test_reasoning_none_leaves_thoughts_in_the_text() -> None:
    parser = make_parser(choose_format("", "hermes", "none"), parse_tools=False)
    assert parser.feed("<think>a</think>b").text == "<think>a</think>b"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }} <think></think>", "hermes", "think"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", "think"),
        ('<|start_header_id|>ipython ... {"name": function name, "parameters": x}', "llama3", "think"),
        ("<|header_start|>system<|header_end|> <|python_start|>", "llama4", "think"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][ARGS][THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\\n```json", "deepseek_v3", "think"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜></think>", "deepseek_v31", "think"),
        ("<tool_call>x<arg_key>k</arg_key><arg_value>", "glm4", "think"),
        ("<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi_k2", "think"),
        ("<|im_user|>user<|im_middle|>{{ content }}<|im_end|>", "kimi_k2", "think"),
        ("{{ '<|open|>' + tag }}{{ '<|sep|>' }} {{ '<|close|>' + tag + '<|sep|>' }}", "kimi_k3", "kimi_k3"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", "think"),
        ("<|start_of_role|>assistant<|tool_call|> Here is my thought process:", "granite", "granite"),
        ("<minimax:tool_call>", "minimax_m2", "think"),
        ("<｜DSML｜tool_calls>\\n<｜DSML｜invoke name=", "deepseek_v4", "think"),
        ("<｜DSML｜function_calls>\\n<｜DSML｜invoke name=", "deepseek_v32", "think"),
        ("List of tools: <|tool_list_start|>[<|tool_list_end|>", "lfm2", "think"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}} '<|channel>thought\\n'", "gemma4", "gemma"),
        ("plain {{ messages }}", "hermes", "think"),
    ],
)
def test_template_chooses_its_formats(template: str, tools: str, reasoning: str) -> None:
    chat = choose_format(template)
    assert (chat.tools.name, chat.reasoning.name if chat.reasoning else "") == (tools, reasoning)


def test_markers_of_a_response_template_win_over_those_of_the_chat_template() -> None:
    told = json.dumps(
        {
            "fields": {
                "thinking": {"open": "[THINK]", "close": "[/THINK]"},
                "tool_calls": {"open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]"},
            }
        }
    )
    chat = choose_format("<tool_call> <think>", response_template=told)
    assert (chat.tools.name, chat.reasoning and chat.reasoning.name) == ("mistral", "mistral")


def test_name_wins_over_the_template() -> None:
    assert choose_format("[TOOL_CALLS]", "glm4", "granite").tools.name == "glm4"


def test_unknown_name_is_refused_with_its_flag() -> None:
    with pytest.raises(StartupError, match="--tool-format"):
        choose_format("", "nothing")


def test_options_of_the_router_name_every_row() -> None:
    hints = get_type_hints(RouterConfig)
    assert get_args(hints["tool_format"]) == ("auto", *(row.name for row in TOOLS))
    assert get_args(hints["reasoning_format"]) == ("auto", "none", *(row.name for row in REASONING))


# Calls that a marker begins, which tells them in any place.
MARKED = [
    Example(example.format, example.text.rpartition("</seed:think>")[2], example.calls, example.content)
    for example in EXAMPLES
    if example.calls
    and (example.format == "seed_oss" or not example.reasoning)
    and example.format != "harmony"
    # In a thought these markers are a part of it.
    and "<|open|>response" not in example.text
    and not (example.format.startswith("llama") and example.text[:1] in "[{")
]


def test_every_format_but_messages_of_channels_has_marked_examples() -> None:
    assert {example.format for example in MARKED} == {row.name for row in TOOLS} - {"harmony"}


@pytest.mark.parametrize("example", MARKED, ids=named)
def test_a_call_ends_a_thought_that_nothing_closes(example: Example) -> None:
    text = f"I need it.\n{example.text}"
    for thought in REASONING:
        whole = parse(example.format, [text], thought=thought.name, in_reasoning=True)
        content, reasoning, calls, ends = whole
        assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == example.calls, thought.name
        assert (content, ends) == ("", True), thought.name
        assert reasoning.rstrip() == f"I need it.\n{example.content}".rstrip(), thought.name
        assert parse(example.format, list(text), thought=thought.name, in_reasoning=True) == whole, thought.name
        assert parse(example.format, [thought.opens + text], thought=thought.name) == whole, thought.name


@pytest.mark.parametrize("example", MARKED, ids=named)
def test_a_call_in_a_thought_that_is_closed_is_a_draft(example: Example) -> None:
    for thought in REASONING:
        text = f"Perhaps {example.text}{thought.closes}Yes."
        whole = parse(example.format, [text], thought=thought.name, in_reasoning=True)
        assert whole == ("Yes.", f"Perhaps {example.text}".rstrip("\n"), [], False), thought.name
        assert parse(example.format, list(text), thought=thought.name, in_reasoning=True) == whole, thought.name


@pytest.mark.parametrize("example", MARKED, ids=named)
def test_a_call_that_a_thought_goes_on_after_is_a_draft(example: Example) -> None:
    text = f"Perhaps {example.text}\nNo, better {example.text}"
    whole = parse(example.format, [text], in_reasoning=True)
    content, reasoning, calls, ends = whole
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == example.calls
    assert (content, ends) == ("", True)
    assert reasoning.rstrip() == f"Perhaps {example.text}\nNo, better {example.content}".rstrip()
    assert parse(example.format, list(text), in_reasoning=True) == whole
    assert parse(example.format, [f"{text} Or not."], in_reasoning=True) == ("", f"{text} Or not.", [], False)


def cuts(example: Example) -> list[int]:
    """Places at which the text may be cut: all, but within the markers of gpt-oss, which are tokens of every model."""
    inside = {
        place
        for found in (re.finditer(r"<\|\w+\|>", example.text) if example.format == "harmony" else ())
        for place in range(found.start() + 1, found.end())
    }
    return [place for place in range(len(example.text) + 1) if place not in inside]


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_no_half_of_a_call_is_text_wherever_an_answer_is_cut(example: Example) -> None:
    thought = THOUGHTS.get(example.format, "think")
    for place in cuts(example):
        text, reasoning, calls, _ = parse(example.format, [example.text[:place]], thought=thought, is_cut=True)
        # One character behind text may be text.
        for whole, part in ((example.content, text), (example.reasoning, reasoning.strip())):
            assert whole.startswith((part, part[:-1].strip())), place
        assert [name for name, _, _ in calls] == [name for name, _ in example.calls][: len(calls)], place


@pytest.mark.parametrize("example", MARKED, ids=named)
def test_no_half_of_a_call_in_a_thought_is_text_wherever_it_is_cut(example: Example) -> None:
    for place in range(len(example.text) + 1):
        text, _, calls, _ = parse(example.format, [f"Hm. {example.text[:place]}"], is_cut=True, in_reasoning=True)
        assert text == "", place
        assert [name for name, _, _ in calls] == [name for name, _ in example.calls][: len(calls)], place


@pytest.mark.parametrize("name", [row.name for row in TOOLS])
def test_what_is_no_call_stays_text_also_where_it_is_cut(name: str) -> None:
    for text in ("a <b> and", "Of a proof", '{"answer": [1, 2', "x = [1, 2"):
        assert parse(name, [text], is_cut=True)[0] == text


@pytest.mark.parametrize("text", ["hello <", "if a <", "less is <", "see <tool"])
def test_a_stop_string_takes_nothing_but_itself(text: str) -> None:
    assert parse("hermes", [text], is_cut=True, is_stopped=True) == (text, "", [], False)
    assert parse("hermes", [text], is_cut=True, is_stopped=True, in_reasoning=True) == ("", text, [], False)
    half = '<tool_call>{"name": "f", "argu'
    assert parse("hermes", [f"So. {half}"], is_cut=True, is_stopped=True) == ("So. ", "", [], False)


def test_one_character_behind_text_is_no_half_a_marker() -> None:
    assert parse("hermes", ["if a <"], is_cut=True) == ("if a <", "", [], False)
    assert parse("hermes", ["if a <to"], is_cut=True) == ("if a ", "", [], False)
    assert parse("hermes", ["if a <"], is_cut=True, in_reasoning=True) == ("", "if a <", [], False)
    assert parse("hermes", ["<"], is_cut=True) == ("", "", [], False)
