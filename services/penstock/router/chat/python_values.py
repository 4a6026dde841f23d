"""Reader of arguments in Python's syntax, (key=value, …), with constants for values, as models write them in calls."""

from __future__ import annotations

import ast
import re

from penstock.router.chat.tool_calls import loads

# A key may be any word: tools have parameters that are Python's own words (from, class), or have a hyphen.
KEY = re.compile(r"[^\s=(){}\[\],:\"'<>|#\\]{1,128}")
_MEMBER = re.compile(rf"\s*({KEY.pattern})\s*=\s*(?!=)")
_TEXT = re.compile(r"""(?<!\w)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = frozenset("\n\\'\"abfnrtvxuUN01234567")
_NAMES = {"true": True, "false": False, "null": None}
_OPENS, _CLOSES = frozenset("([{"), frozenset(")]}")


def read_members(text: str) -> dict[str, object] | None:
    """Return the values by key of a text in parentheses; None where it is no such text."""
    # Texts in double quotes may have JSON's own escapes, and others are no reason for Python's warnings.
    text = _TEXT.sub(_in_python, text) if "\\" in text else text
    values: dict[str, object] = {}
    position, last = 1, len(text) - 1
    try:
        while text[position:last].strip():
            found = _MEMBER.match(text, position, last)
            if found is None:
                return None
            end = _end_of_value(text, found.end(), last)
            values[found[1]] = _constant(ast.parse(text[found.end() : end].strip(), mode="eval").body)
            position = end + 1
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    return values


def _in_python(found: re.Match[str]) -> str:
    text = found[1]
    if "\\" not in text:
        return text
    meant = loads(text) if text[0] == '"' else None
    return repr(meant) if isinstance(meant, str) else _ESCAPE.sub(_known_escape, text)


def _known_escape(found: re.Match[str]) -> str:
    return found[0] if found[1] in _ESCAPED else f"\\{found[0]}"


def _end_of_value(text: str, begin: int, last: int) -> int:
    """Return the position of the comma behind a value, or `last`."""
    depth, quote, position = 0, "", begin
    while position < last:
        char = text[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _OPENS:
            depth += 1
        elif char in _CLOSES:
            depth -= 1
        elif char == "," and depth == 0:
            return position
        position += 1
    return last


def _constant(node: ast.expr) -> object:
    """Value of a constant expression; JSON's true, false and null also count. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_constant(key)): _constant(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    value: object = ast.literal_eval(node)
    return value
