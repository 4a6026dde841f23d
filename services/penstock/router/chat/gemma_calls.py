"""Program of Gemma 4's tool calls: call:name{key:value,…}, with texts between <|"|>, turned into JSON as they come.

Source: the chat template of google/gemma-4-31B-it (its macro format_argument).
"""

from __future__ import annotations

import json
import re

from penstock.router.chat.call_block import CallBlock, Steps
from penstock.router.chat.tool_calls import loads

GEMMA_QUOTE, GEMMA_END = '<|"|>', "<tool_call|>"
_NAME = re.compile(r"[\w.\-/]+")
# Characters that no key without quotes has.
_NOT_IN_KEY = re.compile(r'[{}\[\],<>"\n]')
# Lists and objects within one another.
_MOST_DEPTH = 32
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def gemma(block: CallBlock) -> Steps:
    """Read one call. A template that got arguments as a text shows models call:name{{"key": …}}."""
    yield from block.expect("call:")
    name, _ = yield from block.until("{")
    name = name.strip()
    if _NAME.fullmatch(name) is None:
        block.refuse()
    block.begin(name)
    if (yield from block.peek()) == "{":
        yield from block.object()
        yield from block.expect("}")
    else:
        yield from _members(block, 0, name)
    block.end()
    if (yield from block.peek()):
        yield from block.one_of(GEMMA_END)


def _members(block: CallBlock, depth: int, tool: str = "") -> Steps:
    """Read members up to the brace that closes them. `tool`: they are its parameters, with types in its schema."""
    is_first = True
    while (yield from block.peek()) != "}" or not is_first:
        key = yield from _key(block)
        yield from _value(block, depth, key, is_first=is_first, tool=tool)
        is_first = False
        if (yield from block.expect(",", "}")) == "}":
            block.add("}")
            return
    yield from block.expect("}")
    block.add("{}")


def _key(block: CallBlock) -> Steps:
    """Return the key of a member, read up to its colon."""
    if (yield from block.one_of(GEMMA_QUOTE)):
        key, _ = yield from block.until(GEMMA_QUOTE)
        yield from block.expect(":")
        return key
    if (yield from block.one_of('"')):
        key = yield from _json_text(block)
        yield from block.expect(":")
        return key
    key, _ = yield from block.until(":")
    key = key.strip()
    if not key or _NOT_IN_KEY.search(key):
        block.refuse()
    return key


def _value(block: CallBlock, depth: int, key: str | None, *, is_first: bool, tool: str = "") -> Steps:
    """Read a value: of the member `key`, or of a list where that is None."""
    before = "" if is_first else ", "
    if key is not None:
        before = ("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
    if (yield from block.one_of(GEMMA_QUOTE)):
        text, _ = yield from block.until(GEMMA_QUOTE)
        block.add(before + json.dumps(text, ensure_ascii=False))
        return
    opened = yield from block.one_of("{", "[", '"')
    if opened and opened != '"' and depth >= _MOST_DEPTH:
        block.refuse()
    if opened == "{":
        block.add(before)
        yield from _members(block, depth + 1)
    elif opened == "[":
        block.add(before + "[")
        yield from _list(block, depth + 1)
    elif opened == '"':
        text = yield from _json_text(block)
        block.add(before + json.dumps(text, ensure_ascii=False))
    else:
        text, end = yield from block.until(",", "}", "]")
        block.unread(len(end))
        if not text.strip():
            block.refuse()
        if tool and key is not None:
            block.member(tool, key, text.strip(), is_first=is_first)
        else:
            block.add(before + _constant(text.strip()))


def _list(block: CallBlock, depth: int) -> Steps:
    """Read values up to the bracket that closes them."""
    is_first = True
    while (yield from block.peek()) != "]" or not is_first:
        yield from _value(block, depth, None, is_first=is_first)
        is_first = False
        if (yield from block.expect(",", "]")) == "]":
            block.add("]")
            return
    yield from block.expect("]")
    block.add("]")


def _json_text(block: CallBlock) -> Steps:
    """Return a text of JSON, behind its first quote."""
    parts = []
    while True:
        part, _ = yield from block.until('"')
        parts.append(part)
        # A quote behind an odd number of backslashes does not end it.
        if (len(part) - len(part.rstrip("\\"))) % 2 == 0:
            break
    raw = '"'.join(parts)
    text = loads(f'"{raw}"')
    return text if isinstance(text, str) else raw


def _constant(text: str) -> str:
    """Return the JSON of a value without quotes; a text where it is nothing else."""
    value = loads(text)
    if value is None:
        value = _WORDS.get(text.lower(), text)
    return json.dumps(value, ensure_ascii=False)
