"""Grammars that force tool calls: Lark text for structured output, for answers that the format's parser can read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.router.chat.call_block import Schemas
from penstock.router.chat.formats import ChatFormat

# Placeholder in a form's text: the number of the call.
_NUMBER = "\0"
_CONTROL = re.compile("[\x7f-\x9f]")
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


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_OBJECT = '{"name": "%s", "arguments": '
_INVOKE = ('<invoke name="%s">\n', "</invoke>\n", ('<parameter name="%s">', "</parameter>\n"))
_TEXTS: Mapping[str, _Text] = {
    "hermes": _Text("<tool_call>\n" + _OBJECT, "}\n</tool_call>"),
    "granite": _Text(_OBJECT, "}", "<|tool_call|>[", ", ", "]"),
    "phi4": _Text(_OBJECT, "}", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "llama3": _Text('{"name": "%s", "parameters": ', "}", separator="; "),
    "llama4": _Text('{"name": "%s", "parameters": ', "}", separator="; "),
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
    "deepseek_v32": _Text(
        '<｜DSML｜invoke name="%s">\n',
        "</｜DSML｜invoke>\n",
        "<｜DSML｜function_calls>\n",
        "",
        "</｜DSML｜function_calls>",
        ('<｜DSML｜parameter name="%s" string="%s">', "</｜DSML｜parameter>\n"),
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
    "harmony": _Text("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", "<|call|>", is_single=True),
}
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


class _Grammar:
    """Builder of a grammar."""

    def __init__(self, chat: ChatFormat, token_ids: Mapping[str, int]) -> None:
        self._chat = chat
        self._ids = token_ids
        self._rules: list[str] = []
        pattern = "|".join(re.escape(marker) for marker in sorted(token_ids, key=len, reverse=True))
        self._split: Callable[[str], list[str]] = re.compile(f"({pattern})").split if pattern else lambda text: [text]
        name = chat.tools.name
        self._written = _TEXTS["mistral_list" if name == "mistral" and "[ARGS]" not in token_ids else name]

    def build(self, schemas: Schemas, *, max_calls: int, in_reasoning: bool, may_think: bool) -> str:
        written = self._written
        thought = self._thought(in_reasoning) if may_think else ""
        calls = " | ".join(self._call(name, schema) for name, schema in schemas.items())
        most = 1 if written.is_single else max_calls
        many = f"({self._text(written.separator)} call){{0,{most - 1}}}" if most > 1 else ""
        start = f"{thought} {self._text(written.begin)} call {many} {self._text(written.end)}"
        return "\n".join([f"start: {start}", f"call: {calls}", *self._rules]) + "\n"

    def build_answer(self, *, in_reasoning: bool) -> str:
        begin = f"{self._text(_HARMONY_ANSWER)} " if self._chat.tools.is_harmony else ""
        return "\n".join([f"start: {self._thought(in_reasoning)} {begin}@answer", *self._rules]) + "\n"

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

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        rule = f"call_{len(self._rules)}"
        place = len(self._rules)
        self._rules.append("")
        # In JSON the name stands in quotes: a quote in it would end it.
        is_json = '"name": "' in self._written.head
        head = self._written.head.replace("%s", json.dumps(name, ensure_ascii=False)[1:-1] if is_json else name)
        body = self._members(schema, name) if self._written.members else self._json({"type": "object", **schema}, name)
        self._rules[place] = f"{rule}: {self._text(head)} {body} {self._text(self._written.tail)}"
        return rule

    def _members(self, schema: Mapping[str, Any], tool: str) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        parts = []
        for key, one in properties.items() if isinstance(properties, Mapping) else ():
            member = self._member(str(key), one if isinstance(one, Mapping) else {}, schema, tool)
            parts.append(member if isinstance(required, list) and key in required else f"({member})?")
        return " ".join(parts)

    def _member(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], tool: str) -> str:
        opens, closes = self._written.members or ("", "")
        is_text = schema.get("type") == "string"
        opens = opens.replace("%s", key, 1).replace("%s", "true" if is_text else "false")
        if is_text and isinstance(schema.get("enum"), list):
            values = " | ".join(self._text(str(value)) for value in schema["enum"])
            return f"{self._text(opens)} ({values}) {self._text(closes)}"
        if is_text:
            return f"{self._text(opens)} {self._text_up_to(closes)}"
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return (
            f"{self._text(opens)} {self._json({**shared, **schema}, f'{tool}, parameter {key}')} {self._text(closes)}"
        )

    def _json(self, schema: Mapping[str, Any], origin: str) -> str:
        """Rule of a value; an error about the schema names its `origin`."""
        rule = f"json_{len(self._rules)}"
        document = json.dumps({"x-guidance": _GUIDANCE, **schema, "$comment": f"tool {origin}"}, ensure_ascii=True)
        self._rules.append(f"{rule}: %json {document}")
        return rule

    def _text_up_to(self, closes: str) -> str:
        """Rule of any text up to and including `closes`."""
        rule = f"text_{len(self._rules)}"
        if self._split(closes)[0] == "" and len(self._split(closes)) > 1:
            # A token ends it, and no text contains one.
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


def _literal(text: str) -> str:
    """Quote a Lark string: as in JSON, but with escapes for control characters that only JSON allows unescaped."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
