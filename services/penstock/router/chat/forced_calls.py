"""Grammars of tool calls that are forced, or begun by choice: Lark text, for answers that the format's parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.router.chat.argument_grammar import GrammarParts
from penstock.router.chat.call_block import Schemas
from penstock.router.chat.formats import ChatFormat
from penstock.router.chat.gemma_arguments import GemmaArguments
from penstock.router.chat.kimi_k3_calls import XTML_ANSWER, XTML_CALLS, escaped
from penstock.router.chat.parameter_schema import alternatives, is_text_schema
from penstock.router.chat.python_arguments import PythonArguments, takes_python

# Placeholder in a format's text: the number of the call.
_NUMBER = "\0"
# Keywords of a text that a grammar holds it to.
_TEXT_WORDS = ("pattern", "minLength", "maxLength", "format", "allOf", "not", "if")
# Arguments without a schema that holds.
_ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
_ANY_TOOL = "without a schema"
# Words of a schema that may allow keys which `properties` does not name.
_OPENING = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum"),
    }
)
_MOST_MEMBERS = 64
_CONTROL = re.compile("[\x7f-\x9f]")
# JSON's types that Kimi K3 names beside a value which is no text.
_XTML_KINDS = ("number", "boolean", "null", "object", "array")
# JSON as models write it: no text that a parser could take for the end of a call.
_GUIDANCE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True)
class _Text:
    """Text around calls: `head` has %s for the name; `members`: text around each parameter, with %s for its key."""

    head: str
    tail: str
    begin: str = ""
    separator: str = "\n"
    end: str = ""
    members: tuple[str, str] | None = None
    is_single: bool = False
    # By itself the model also, or rather, writes a list of calls as Python has them.
    has_python: bool = False
    # Text that begins a call, with %s for the name, where it is no marker of the format and no beginning of `head`.
    opens: str = ""
    # Arguments in Gemma's spelling, with their last brace.
    is_gemma: bool = False
    # Names are values of attributes, and the second %s of `members` is the type of a value.
    is_xtml: bool = False


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_OBJECT = '{"name": "%s", "arguments": '
_INVOKE = ('<invoke name="%s">\n', "</invoke>\n", ('<parameter name="%s">', "</parameter>\n"))
_TYPED_OBJECTS = (
    _Text('{"name":"%s","parameters":', "}"),
    _Text('{"type": "function", "name": "%s", "parameters": ', "}"),
    _Text('{"type":"function","name":"%s","parameters":', "}"),
)
_TEXTS: Mapping[str, _Text] = {
    "hermes": _Text("<tool_call>\n" + _OBJECT, "}\n</tool_call>"),
    "granite": _Text(_OBJECT, "}", "<|tool_call|>[", ", ", "]"),
    "phi4": _Text(_OBJECT, "}", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "llama3": _Text('{"name": "%s", "parameters": ', "}", separator="; "),
    "llama4": _Text('{"name": "%s", "parameters": ', "}", separator="; ", has_python=True),
    "mistral": _Text("[TOOL_CALLS]%s[ARGS]", "", separator=""),
    # For a vocabulary without [ARGS]: the older format.
    "mistral_list": _Text(_OBJECT, "}", "[TOOL_CALLS][", ", ", "]"),
    "deepseek_v3": _Text(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        _DEEPSEEK[0],
        "\n",
        _DEEPSEEK[1],
    ),
    "deepseek_v31": _Text(
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _DEEPSEEK[0], "", _DEEPSEEK[1]
    ),
    # JSON, which the model writes where it is asked to.
    "lfm2": _Text(_OBJECT, "}", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", has_python=True),
    "deepseek_v4": _Text(
        '<｜DSML｜invoke name="%s">\n',
        "</｜DSML｜invoke>\n",
        "<｜DSML｜tool_calls>\n",
        "",
        "</｜DSML｜tool_calls>",
        ('<｜DSML｜parameter name="%s" string="%s">', "</｜DSML｜parameter>\n"),
    ),
    "deepseek_v32": _Text(
        '<｜DSML｜invoke name="%s">\n',
        "</｜DSML｜invoke>\n",
        "<｜DSML｜function_calls>\n",
        "",
        "</｜DSML｜function_calls>",
        ('<｜DSML｜parameter name="%s" string="%s">', "</｜DSML｜parameter>\n"),
    ),
    "kimi_k3": _Text(
        f'<|open|>call tool="%s" index="{_NUMBER}"<|sep|>',
        "<|close|>call<|sep|>",
        XTML_CALLS[0],
        "",
        XTML_CALLS[1],
        ('<|open|>argument key="%s" type="%s"<|sep|>', "<|close|>argument<|sep|>"),
        is_xtml=True,
    ),
    "kimi_k2": _Text(
        f"<|tool_call_begin|>functions.%s:{_NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m2": _Text(*_INVOKE[:2], "<minimax:tool_call>\n", "", "</minimax:tool_call>", _INVOKE[2]),
    "qwen3_coder": _Text(
        "<tool_call>\n<function=%s>\n", "</function>\n</tool_call>", members=("<parameter=%s>\n", "\n</parameter>\n")
    ),
    "seed_oss": _Text(
        "<seed:tool_call>\n<function=%s>\n",
        "</function>\n</seed:tool_call>",
        members=("<parameter=%s>\n", "\n</parameter>\n"),
    ),
    "glm4": _Text(
        "<tool_call>%s\n",
        "</tool_call>",
        members=("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "gemma4": _Text("<|tool_call>call:%s{", "<tool_call|>", separator="", is_gemma=True),
    "harmony": _Text("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", "<|call|>", is_single=True),
}
# Further spellings that models begin by themselves, with a marker or a beginning of their own. What closes a block of
# calls stays out: behind the last bracket it is text, which the parser takes.
_FURTHER: Mapping[str, tuple[_Text, ...]] = {
    "qwen3_coder": (_Text("<function=%s>\n", "</function>", members=_TEXTS["qwen3_coder"].members),),
    # The word alone is one of Python's modules.
    "phi4": (_Text(_OBJECT, "}", "functools[", ", ", "]", opens="functools["),),
    "granite": (_Text(_OBJECT, "}", "<tool_call>[", ", ", "]"),),
    "llama3": _TYPED_OBJECTS,
    "llama4": _TYPED_OBJECTS,
    # The recipient stands before the channel, too: the blank begins a token.
    "harmony": (
        _Text("<|channel|>analysis to=functions.%s <|constrain|>json<|message|>", "<|call|>"),
        _Text(
            " to=functions.%s<|channel|>commentary <|constrain|>json<|message|>",
            "<|call|>",
            opens=" to=functions.%s<|channel|>",
        ),
    ),
}
# Formats with a tag before a call as Python writes it, name(…) or name.call(…).
_TAGGED = ("llama3", "llama4")
_CALLED = ("(", ".call(")
# Most characters of a grammar with these calls: those of strict tools take several times their schemas.
_MOST_TAGGED = 128 << 10
# Most texts that begin a call, as a generation service takes them.
_MOST_OPENS = 1024
_HARMONY_ANSWER = "<|channel|>final<|message|>"
_HARMONY_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def forced_grammar(
    chat: ChatFormat,
    schemas: Schemas,
    token_ids: Mapping[str, int],
    *,
    max_calls: int,
    in_reasoning: bool,
    may_think: bool = True,
) -> str:
    """Return the Lark text of up to `max_calls` calls of the tools in `schemas`, after a thought if the model has one.

    `token_ids`: the format's markers that are one token of the vocabulary; the others become text.
    `in_reasoning`: the prompt ends inside a thought. `may_think`: a thought comes, or may come.
    """
    grammar = _Grammar(chat, token_ids)
    return grammar.build(schemas, max_calls=max_calls, in_reasoning=in_reasoning, may_think=may_think)


def answer_grammar(chat: ChatFormat, token_ids: Mapping[str, int], *, in_reasoning: bool) -> str:
    """Return the Lark text of an answer, @answer, after a thought if the model has one; see `forced_grammar`."""
    return _Grammar(chat, token_ids).build_answer(in_reasoning=in_reasoning)


def answer_or_calls_grammar(
    chat: ChatFormat,
    schemas: Schemas,
    strict: Collection[str],
    token_ids: Mapping[str, int],
    *,
    max_calls: int,
    in_reasoning: bool,
    may_think: bool,
) -> str:
    """Return the Lark text of an output that is an answer, @answer, or up to `max_calls` calls of the tools in
    `schemas`, after a thought if the model has one; see `forced_grammar`.

    Arguments of tools named in `strict` obey their schemas; others are JSON, or parameters, of any kind.
    """
    grammar = _Grammar(chat, token_ids)
    held = {name: schema if name in strict else None for name, schema in schemas.items()}
    return grammar.build_either(held, max_calls=max_calls, in_reasoning=in_reasoning, may_think=may_think)


@dataclass(frozen=True)
class HeldGrammar:
    """Grammar of calls that the model chooses to make. `opens`: texts that begin one; it holds from there on."""

    opens: tuple[str, ...]
    grammar: str


def held_grammar(
    chat: ChatFormat, schemas: Schemas, strict: Collection[str], token_ids: Mapping[str, int], *, max_calls: int
) -> HeldGrammar:
    """Return the grammar of a call, or of a block of up to `max_calls`, of the tools in `schemas`.

    Arguments of tools named in `strict` obey their schemas; others are JSON, or parameters, of any kind. `token_ids`:
    see `forced_grammar`.
    """
    return _Grammar(chat, token_ids).build_held(schemas, strict, max_calls=max_calls)


class _Grammar:
    """Builder of a grammar."""

    def __init__(self, chat: ChatFormat, token_ids: Mapping[str, int]) -> None:
        self._chat = chat
        self._ids = token_ids
        self._rules: list[str] = []
        # Rule of arguments without a schema that holds; empty: there is none yet.
        self._free_rule = ""
        # Rules of arguments that obey a schema, by the name of the tool: all spellings of a format share them.
        self._held_rules: dict[str, str] = {}
        # The same for arguments as Python writes them; of an empty name: any arguments.
        self._python_rules: dict[str, str] = {}
        pattern = "|".join(re.escape(marker) for marker in sorted(token_ids, key=len, reverse=True))
        self._split: Callable[[str], list[str]] = re.compile(f"({pattern})").split if pattern else lambda text: [text]
        parts = GrammarParts(self._text, self._json, self._value_text, self._add)
        self._gemma, self._python = GemmaArguments(parts), PythonArguments(parts)
        name = chat.tools.name
        self._written = _TEXTS["mistral_list" if name == "mistral" and "[ARGS]" not in token_ids else name]

    def build(self, schemas: Schemas, *, max_calls: int, in_reasoning: bool, may_think: bool) -> str:
        thought = self._thought(in_reasoning) if may_think else ""
        return self._joined(f"{thought} {self._calls(schemas, max_calls)}")

    def build_either(
        self, schemas: Mapping[str, Mapping[str, Any] | None], *, max_calls: int, in_reasoning: bool, may_think: bool
    ) -> str:
        thought = self._thought(in_reasoning) if may_think else ""
        # Rules of their own: the terms of `start` are those that end an output which its limit of tokens cuts.
        self._rules += [f"answer: {self._answer()}", f"calls: {self._calls(schemas, max_calls)}"]
        return self._joined(f"{thought} (answer | calls)")

    def _joined(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _calls(self, schemas: Mapping[str, Mapping[str, Any] | None], max_calls: int) -> str:
        """Terms of the calls, with the rule `call`; None: arguments of any kind."""
        written = self._written
        self._rules.append(f"call: {' | '.join(self._call(name, schema) for name, schema in schemas.items())}")
        calls = _repeated("call", self._text(written.separator), 1 if written.is_single else max_calls)
        return f"{self._before_calls()} {self._text(written.begin)} {calls} {self._text(written.end)}"

    def build_held(self, schemas: Schemas, strict: Collection[str], *, max_calls: int) -> HeldGrammar:
        opens: list[str] = []
        starts: list[str] = []
        format_name = self._chat.tools.name
        for number, written in enumerate((self._written, *_FURTHER.get(format_name, ()))):
            self._written = written
            begun, start = self._held_spelling(schemas, strict, f"call{number or ''}", max_calls)
            opens += begun
            starts.append(start)
        if format_name in _TAGGED:
            before = len(self._rules)
            tagged, terms = self._tagged(schemas, strict)
            if sum(map(len, self._rules)) <= _MOST_TAGGED:
                opens += tagged
                starts += terms
            else:
                # A strict tool is refused for a grammar that is too long: rather than that, these are not held.
                del self._rules[before:]
        # The usual spellings come first: of hundreds of tools the rest is left to the model.
        opens = opens[:_MOST_OPENS]
        rules = [f"start: {' | '.join(starts)}", "WHITE: /[ \\n]{1,2}/", *self._rules]
        return HeldGrammar(tuple(opens), "\n".join(rules) + "\n")

    def _held_spelling(
        self, schemas: Schemas, strict: Collection[str], rule: str, max_calls: int
    ) -> tuple[list[str], str]:
        """Return the texts that begin a call in the spelling, and the terms from there on. Makes a rule of a call."""
        written = self._written
        first = written.begin or written.head
        marker = next((one for one in self._chat.tools.opens if first.startswith(one)), "")
        marker = marker if not written.opens else "" if "%s" in written.opens else written.opens
        # Models put a blank or a line break behind a marker, or none.
        skip = len(first) - len(first[len(marker) :].lstrip(" \n")) if marker else 0
        begin = f"{self._spelled(marker)} WHITE?" if marker else ""
        calls = " | ".join(
            self._call(name, schema if name in strict else None, 0 if written.begin else skip)
            for name, schema in schemas.items()
        )
        self._rules.append(f"{rule}: {calls}")
        python = " | ".join(self._python_calls(schemas, strict).values()) if written.has_python else ""
        if python:
            self._rules.append(f"python: {python}")
        start = f"{begin} {rule}"
        if written.begin:
            # Other formats begin each call with the marker.
            block = _repeated(rule, self._text(written.separator), max_calls)
            if python:
                block = f"({block} | {_repeated('python', self._text(written.separator), max_calls)})"
            start = f"{begin} {self._text(first[skip:])} {block} {self._text(written.end)}"
        elif python:
            start += f" | {self._text('[')} {_repeated('python', self._text(', '), max_calls)} {self._text(']')}"
        return ([marker] if marker else self._heads(schemas)), start

    def _spelled(self, marker: str) -> str:
        """Terms of a marker: a model may spell a control token as text."""
        return f"({self._text(marker)} | {_literal(marker)})" if marker in self._ids else self._text(marker)

    def _heads(self, schemas: Schemas) -> list[str]:
        """Beginnings of a call in a spelling without a marker."""
        if self._written.opens:
            return [self._written.opens.replace("%s", name) for name in schemas]
        objects = [self._head(name, upto_name=True) for name in schemas]
        named = [name for name, schema in schemas.items() if self._written.has_python and takes_python(name, schema)]
        return [*objects, *(f"[{name}(" for name in named)]

    def _tagged(self, schemas: Schemas, strict: Collection[str]) -> tuple[list[str], list[str]]:
        """Return beginnings of calls as Python writes them behind a tag, and their terms. Other code stays free."""
        calls = {called: self._python_calls(schemas, strict, called) for called in _CALLED}
        tags = self._chat.tools.opens
        opens = [f"{tag}{name}{called}" for tag in tags for called, named in calls.items() for name in named]
        terms = " | ".join(one for named in calls.values() for one in named.values())
        if not terms:
            return [], []
        self._rules.append(f"tagged: {terms}")
        return opens, [f"({' | '.join(map(self._spelled, tags))}) tagged"]

    def _python_calls(self, schemas: Schemas, strict: Collection[str], called: str = "(") -> dict[str, str]:
        """Terms of a call as Python writes it, by the name of a tool that can be called so."""
        calls = {}
        for name, schema in schemas.items():
            if not takes_python(name, schema):
                continue
            # All tools share it, as they share `_free_arguments`.
            key = name if name in strict else ""
            if key not in self._python_rules:
                rule = self._python_rules[key] = f"python_arguments_{len(self._python_rules)}"
                body = self._python.of(_closed(schema), name) if key else self._python.free(_ANY_TOOL)
                self._rules.append(f"{rule}: {body}")
            calls[name] = f"{self._text(f'{name}{called}')} {self._python_rules[key]}"
        return calls

    def _head(self, name: str, *, upto_name: bool = False) -> str:
        # In JSON the name stands in quotes: a quote in it would end it.
        head = self._written.head
        is_json = '"name":' in head
        if upto_name:
            head = head[: head.index("%s") + 2] + ('"' if is_json else "")
        return head.replace("%s", json.dumps(name, ensure_ascii=False)[1:-1] if is_json else self._name(name))

    def _name(self, name: str) -> str:
        return escaped(name) if self._written.is_xtml else name

    def _before_calls(self) -> str:
        """Terms of an empty answer before the calls, where the prompt may have begun one."""
        if not self._written.is_xtml:
            return ""
        opens, closes = XTML_ANSWER[:2]
        return f"({self._text(opens)})? {self._text(closes)}"

    def build_answer(self, *, in_reasoning: bool) -> str:
        return self._joined(f"{self._thought(in_reasoning)} {self._answer()}")

    def _answer(self) -> str:
        """Terms of an answer, with what the format has before it."""
        if self._chat.tools.is_harmony:
            return f"{self._text(_HARMONY_ANSWER)} @answer"
        return f"({self._text(XTML_ANSWER[0])})? @answer" if self._written.is_xtml else "@answer"

    def _thought(self, in_reasoning: bool) -> str:
        thought = self._chat.reasoning
        if self._chat.tools.is_harmony:
            opens, closes = _HARMONY_THOUGHT
        elif thought is None:
            return ""
        else:
            opens, closes = thought.opens, thought.closes
        text = self._text_up_to(closes)
        if not self._chat.tools.is_harmony:
            self._rules.append("LINES: /\\n{1,2}/")
            text += " LINES?"
        return text if in_reasoning else f"({self._text(opens)} {text})?"

    def _call(self, name: str, schema: Mapping[str, Any] | None, skip: int = 0) -> str:
        """Rule of a call; None: arguments of any kind. `skip`: characters of its head that came before."""
        rule = f"call_{len(self._rules)}"
        place = len(self._rules)
        self._rules.append("")
        body = self._free_arguments() if schema is None else self._held_arguments(name, schema)
        self._rules[place] = f"{rule}: {self._text(self._head(name)[skip:])} {body} {self._text(self._written.tail)}"
        return rule

    def _held_arguments(self, name: str, schema: Mapping[str, Any]) -> str:
        """Rule of arguments that obey a schema."""
        if name not in self._held_rules:
            if self._written.is_gemma:
                body = self._gemma.of(schema, name)
            elif self._written.members:
                body = self._members(schema, name)
            else:
                body = self._json({"type": "object", **_closed(schema)}, name)
            self._held_rules[name] = f"held_{len(self._rules)}"
            self._rules.append(f"{self._held_rules[name]}: {body}")
        return self._held_rules[name]

    def _free_arguments(self) -> str:
        """Rule of arguments of any kind. All tools share it: any JSON is a large grammar, and slow to compile."""
        if not self._free_rule:
            if self._written.is_gemma:
                body = self._gemma.free(_ANY_TOOL)
            else:
                body = self._free_members() if self._written.members else self._json(_ANYTHING, _ANY_TOOL)
            self._free_rule = f"free_{len(self._rules)}"
            self._rules.append(f"{self._free_rule}: {body}")
        return self._free_rule

    def _free_members(self) -> str:
        """Terms of parameters with any names and values."""
        opens, closes = self._written.members or ("", "")
        before, after = opens.split("%s", 1)
        texts = self._value_text({}, closes, _ANY_TOOL)
        key = f'{self._text(before)} /[^<>"=\\n]{{1,128}}/'
        if "%s" not in after:
            return f"({key} {self._text(after)} {texts}){{0,{_MOST_MEMBERS}}}"
        is_text = f"{self._typed(after, {'type': 'string'}, {})} {texts}"
        is_json = f"{self._typed(after, {}, {})} {self._json({}, _ANY_TOOL)} {self._text(closes)}"
        return f"({key} ({is_text} | {is_json})){{0,{_MOST_MEMBERS}}}"

    def _typed(self, opens: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Terms of the text before a value, with what tells its type in place of %s, where the format tells it."""
        is_text = is_text_schema(schema)
        if not self._written.is_xtml:
            return self._text(opens.replace("%s", "true" if is_text else "false"))
        before, after = opens.split("%s", 1)
        kinds = ("string",) if is_text else _kinds_of(schema, root)
        return f"{self._text(before)} ({' | '.join(map(_literal, kinds))}) {self._text(after)}"

    def _members(self, schema: Mapping[str, Any], tool: str) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        parts = []
        for key, one in properties.items() if isinstance(properties, Mapping) else ():
            member = self._member(str(key), one if isinstance(one, Mapping) else {}, schema, tool)
            parts.append(member if isinstance(required, list) and key in required else f"({member})?")
        return " ".join(parts)

    def _member(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], tool: str) -> str:
        origin = f"{tool}, parameter {key}"
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        options = list(alternatives(schema, root))
        # Without a text among them they are one value of JSON.
        options = options if any(map(is_text_schema, options)) else [schema]
        found = [self._value(key, one, shared, origin) for one in options]
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _value(self, key: str, schema: Mapping[str, Any], shared: Mapping[str, Any], origin: str) -> str:
        """Terms of a parameter; its values are texts, or none of them is."""
        opens, closes = self._written.members or ("", "")
        # A key may hold the placeholder itself.
        before, after = opens.split("%s", 1)
        before += self._name(key)
        begin = (
            f"{self._text(before)} {self._typed(after, schema, shared)}"
            if "%s" in after
            else self._text(before + after)
        )
        if not is_text_schema(schema):
            return f"{begin} {self._json({**shared, **schema}, origin)} {self._text(closes)}"
        listed = schema["enum"] if isinstance(schema.get("enum"), list) else None
        if listed is None and "const" in schema:
            listed = [schema["const"]]
        if listed is not None:
            values = " | ".join(self._text(str(value)) for value in listed)
            return f"{begin} ({values}) {self._text(closes)}"
        words = {word: schema[word] for word in _TEXT_WORDS if word in schema}
        return f"{begin} {self._value_text(words, closes, origin)}"

    def _add(self, name: str, terms: str) -> None:
        self._rules.append(f"{name}: {terms}")

    def _json(self, schema: Mapping[str, Any], origin: str) -> str:
        """Rule of a value; an error about the schema names its `origin`."""
        rule = f"json_{len(self._rules)}"
        document = json.dumps({"x-guidance": _GUIDANCE, **schema, "$comment": f"tool {origin}"}, ensure_ascii=True)
        self._rules.append(f"{rule}: %json {document}")
        return rule

    def _value_text(self, words: Mapping[str, Any], closes: str, origin: str) -> str:
        """Terms of a text that is a value, with keywords of its schema, up to and including `closes`.

        The schema stands in a comment: to a generation service that is older, the rule is any text.
        """
        name = f"text_{len(self._rules)}"
        ends_by_token = self._is_token_first(closes)
        schema = {**words, **({} if ends_by_token else {"x-end": closes}), "$comment": f"tool {origin}"}
        rule = name if ends_by_token else f"{name}[suffix={_literal(closes)}]"
        self._rules.append(f"{rule}: /(?s:.*)/ // %text {json.dumps(schema, ensure_ascii=True)}")
        return f"{name} {self._text(closes)}" if ends_by_token else name

    def _is_token_first(self, text: str) -> bool:
        """True where a marker that is a token begins the text: no other text contains it."""
        parts = self._split(text)
        return parts[0] == "" and len(parts) > 1

    def _text_up_to(self, closes: str) -> str:
        """Rule of any text up to and including `closes`."""
        rule = f"text_{len(self._rules)}"
        if self._is_token_first(closes):
            self._rules.append(f"{rule}: /(?s:.*)/ {self._text(closes)}")
        else:
            self._rules.append(f"{rule}[suffix={_literal(closes)}]: /(?s:.*)/")
        return rule

    def _text(self, text: str) -> str:
        """Terms of a fixed text: markers that are tokens as such, the rest as literals."""
        terms = []
        for part in self._split(text):
            if part in self._ids:
                terms.append(f"<[{self._ids[part]}]>")
            elif _NUMBER in part:
                before, _, after = part.partition(_NUMBER)
                terms += [_literal(before), "/[0-9]{1,3}/", *([_literal(after)] if after else [])]
            elif part:
                terms.append(_literal(part))
        return " ".join(terms)


def _repeated(rule: str, separator: str, most: int) -> str:
    """Terms of one to `most` of a rule."""
    return f"{rule} ({separator} {rule}){{0,{most - 1}}}" if most > 1 else rule


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's parameters. A tool without any is called without arguments: models invent some."""
    has_none = not schema or schema.get("properties") == {}
    return {**schema, "additionalProperties": False} if has_none and not _OPENING & schema.keys() else schema


def _kinds_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of Kimi K3 for the types that values of a schema may have; those of a text are no part of it."""
    named = {one.get("type") for one in alternatives(schema, root)}
    found = tuple(one for one in _XTML_KINDS if one in named or (one == "number" and "integer" in named))
    # Without a type it may be any.
    return _XTML_KINDS if None in named or not found else found


def _literal(text: str) -> str:
    """Quote a Lark string: as in JSON, but with escapes for control characters that only JSON allows unescaped."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
