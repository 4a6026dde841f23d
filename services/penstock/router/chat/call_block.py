"""Reader of a block of tool calls by a program: a generator that asks for text and waits when there is not enough.

The text alone decides the answers to a program's questions, never its pieces, so any split of a text gives the same
calls. Text that makes no call comes back as text; a call that breaks off after its name stays, incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn, TypeAlias

from penstock.router.chat.parameter_schema import alternatives, is_text_schema
from penstock.router.chat.python_values import read_members
from penstock.router.chat.tool_calls import CallResult, ToolCallPiece, argument_text, is_text, loads

Steps: TypeAlias = Generator[None, None, Any]
Program: TypeAlias = "Callable[[CallBlock], Steps]"
# Parameters' JSON Schemas by the name of a tool.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
# The usual order of keys: the arguments can be streamed as they come.
_HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_NAMES = {"true": True, "false": False, "null": None}
# A tool's name that a call in Python's syntax can have.
PYTHON_NAME = re.compile(r"[\w.\-]+")
# JSON Schema's types of the Python values read from JSON.
_KINDS: Mapping[type, frozenset[str]] = {
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
}


class _Broken(Exception):
    """The text is not a call."""


class _EndedInside(Exception):
    """The text ended inside a call."""


class CallBlock:
    """Calls after one opening marker. Programs use the methods that are generators, and `begin`, `add` and `end`."""

    def __init__(
        self,
        program: Program,
        opened: str,
        *,
        text: str = "",
        first_index: int,
        make_id: Callable[[], str],
        max_chars: int,
        schemas: Schemas,
    ) -> None:
        """`opened`: the marker as written. `text`: the beginning of the calls themselves, if that revealed them.
        `max_chars`: more characters without progress are not a call."""
        self.opened = opened
        self.schemas = schemas
        # Without a marker only the name of an offered tool distinguishes a call from text.
        self._needs_known = not opened.strip() and bool(schemas)
        self._index = first_index
        self._make_id = make_id
        self._max_chars = max_chars
        self._text = text
        self._position = 0
        # End of the shortest text that is known not to be a call: reading starts afresh after it.
        self._decided = len(text)
        # Start of the text that no complete call holds yet.
        self._mark = 0
        self._is_last = self._is_cut = False
        self._is_open = False
        self._all_complete = True
        self._calls = 0
        self._result = CallResult()
        self._program = program(self)

    def feed(self, text: str) -> CallResult:
        """Take more text and return the pieces that it completes."""
        self._result = CallResult()
        self._text += text
        self._run()
        return self._result

    def finish(self, *, is_cut: bool = False) -> CallResult:
        """Return the rest: no more text comes. A block without its end counts if its last call is complete.

        `is_cut`: the model would have continued. A partial call is then left out, not returned as text.
        """
        self._result = CallResult()
        self._is_last, self._is_cut = True, is_cut
        self._run()
        return self._result

    def _run(self) -> None:
        result = self._result
        try:
            next(self._program)
        except StopIteration:
            result.closed, result.complete = True, self._all_complete and self._calls > 0
            result.rest = self._text[self._position :]
            if not self._calls:
                result.raw, result.rest = self.opened + self._text[: self._position], result.rest
        except (_Broken, _EndedInside) as end:
            self._break_off(result, is_cut=isinstance(end, _EndedInside))
        else:
            self._drop_read()
        result.calls = self._calls if result.closed else 0

    def _break_off(self, result: CallResult, *, is_cut: bool) -> None:
        result.closed = True
        left = self._text[self._mark :]
        cut = len(self._text) if self._is_last else max(self._decided, self._position)
        is_half = is_cut and self._is_cut and (self._calls > 0 or bool(self.opened.strip()) or self._may_be_known())
        if not self._calls:
            if not is_half:
                result.raw, result.rest = self.opened + self._text[:cut], self._text[cut:]
        elif self._is_open:
            # A call cannot be taken back after its name was sent: it stays as it is, marked as incomplete.
            result.rest = "" if is_cut else self._text[self._position :]
        elif is_half or (is_cut and (not left.strip() or _may_close(left))):
            result.complete = self._all_complete
        else:
            result.raw, result.rest = self._text[self._mark : cut], self._text[cut:]

    def _may_be_known(self) -> bool:
        """True when the text, which no marker opened, may continue into a call of an offered tool."""
        text = re.sub(r"\s", "", self._text)
        heads = [head for name in self.schemas for head in (f'{{"name":"{name}"', f"[{name}(", f'[{{"name":"{name}"')]
        return any(head.startswith(text) or text.startswith(head) for head in heads)

    def _drop_read(self) -> None:
        """Drop text that is already in calls."""
        begin = self._position if self._is_open else self._mark
        if self._calls and begin:
            self._text = self._text[begin:]
            self._position -= begin
            self._mark = self._decided = 0

    # Methods for programs.

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call. Raises when its name is not valid."""
        if not name or not is_text(name) or (self._needs_known and name not in self.schemas):
            raise _Broken
        self._result.pieces.append(ToolCallPiece(self._index, call_id or self._make_id(), name))
        self._is_open = True
        self._calls += 1

    def add(self, arguments: str) -> None:
        """Add a piece of the arguments' JSON text."""
        if arguments:
            self._result.pieces.append(ToolCallPiece(self._index, arguments=arguments))

    def end(self, *, is_complete: bool = True) -> None:
        """End the open call."""
        self._is_open = False
        self._index += 1
        self._all_complete = self._all_complete and is_complete
        self._mark = self._position

    def unread(self, chars: int) -> None:
        """Go back: the last characters are read again."""
        self._position -= chars

    def done(self) -> None:
        """Note that the text read so far belongs to ended calls."""
        self._mark = self._position

    def whole(self, name: object, arguments: object, call_id: str = "") -> None:
        """Add a complete call. Raises when no message could carry it."""
        text = argument_text(arguments)
        if not isinstance(name, str) or text is None:
            raise _Broken
        self.begin(name, call_id)
        self.add(text)
        self.end()

    def refuse(self) -> None:
        """Raise: the text is not a call."""
        raise _Broken

    def _refuse_behind(self, chars: int) -> NoReturn:
        """Raise: the text is not a call, which takes the next `chars` characters, and no fewer, to tell."""
        self._decided = self._position + chars
        raise _Broken

    def more(self) -> Steps:
        """Wait for more text. Raises when there is none, or when too much waits."""
        if self._is_last:
            raise _EndedInside
        if len(self._text) - self._position > self._max_chars:
            self._decided = len(self._text)
            raise _Broken
        yield

    def until(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Return the text before the first of `ends`, and that end, which is also read."""
        scan, longest = self._position, max(map(len, ends))
        while True:
            found = [(place, end) for end in ends if (place := self._text.find(end, scan)) >= 0]
            if found:
                place, end = min(found)
                text, self._position = self._text[self._position : place], place + len(end)
                return text, end
            # `more` may drop text that was read.
            back = len(self._text) - self._position
            yield from self.more()
            scan = self._position + max(0, back - longest + 1)

    def one_of(self, *options: str) -> Generator[None, None, str]:
        """Skip white space, then read and return the option that follows; empty without one."""
        while True:
            yield from self.space()
            rest = self._text[self._position :]
            for option in options:
                if rest.startswith(option):
                    self._position += len(option)
                    return option
            if not rest and self._is_last:
                raise _EndedInside
            if rest and not any(option.startswith(rest) for option in options):
                return ""
            if self._is_last:
                if self._is_cut:
                    raise _EndedInside
                return ""
            yield from self.more()

    def expect(self, *options: str) -> Generator[None, None, str]:
        """Return the option that follows. Raises without one."""
        found = yield from self.one_of(*options)
        if not found:
            rest = self._text[self._position :]
            same = (length for length in range(len(rest)) if any(one.startswith(rest[:length]) for one in options))
            self._refuse_behind(max(same, default=0) + 1)
        return found

    def space(self) -> Steps:
        """Skip white space, up to another character or the end of the text."""
        while True:
            while self._position < len(self._text) and self._text[self._position].isspace():
                self._position += 1
            if self._position < len(self._text) or self._is_last:
                return
            yield from self.more()

    def peek(self) -> Generator[None, None, str]:
        """Return the next character other than white space without reading it; empty at the end of the text."""
        yield from self.space()
        return self._text[self._position : self._position + 1]

    def object(self) -> Generator[None, None, bool]:
        """Read one JSON object as arguments, in pieces as they come; True when it is JSON."""
        yield from self.space()
        scanner, parts = _Balance(), list[str]()
        if not self._text.startswith("{", self._position):
            if self._is_last and self._position == len(self._text):
                raise _EndedInside
            self._refuse_behind(1)
        while True:
            begin = self._position
            end = scanner.scan(self._text, begin)
            self._position = len(self._text) if end is None else end
            parts.append(self._text[begin : self._position])
            self.add(parts[-1])
            if end is not None:
                return isinstance(loads("".join(parts)), dict)
            yield from self.more()

    def arguments(self) -> Steps:
        """Read the arguments of the open call, and end it."""
        is_json = yield from self.object()
        self.end(is_complete=is_json)

    def balanced(self, depth: int = 0, quotes: str = '"') -> Generator[None, None, str]:
        """Return the text up to a closing bracket: of the one that follows, or of the `depth`-th open one."""
        scanner, scan = _Balance(depth, quotes), 0
        while True:
            end = scanner.scan(self._text, self._position + scan)
            if end is not None:
                text, self._position = self._text[self._position : end], end
                return text
            scan = len(self._text) - self._position
            yield from self.more()

    def call_object(self) -> Steps:
        """Read a call that is an object with `name`, and `arguments` or `parameters`."""
        yield from self.space()
        scanner, scan = _Balance(), 0
        while True:
            match = _HEAD.match(self._text, self._position)
            if match is not None:
                name = loads(match[1])
                self._position = match.end()
                # The brace after the head has been seen, too.
                self._decided = match.end() + 1
                self.begin(name if isinstance(name, str) else "")
                yield from self.arguments()
                yield from self.balanced(depth=1)
                self.done()
                return
            if self._position < len(self._text) and self._text[self._position] != "{":
                self._refuse_behind(1)
            end = scanner.scan(self._text, self._position + scan)
            if end is not None:
                call = loads(self._text[self._position : end])
                if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                    self._refuse_behind(end - self._position)
                self._position = end
                call_id = call.get("id")
                self.whole(
                    call["name"],
                    call.get("arguments", call.get("parameters", {})),
                    call_id if isinstance(call_id, str) and is_text(call_id) else "",
                )
                return
            scan = len(self._text) - self._position
            yield from self.more()

    def member(self, tool: str, key: str, value: str, *, is_first: bool, is_string: bool | None = None) -> None:
        """Add a member of the arguments from plain text; its schema gives the type of the value.

        `is_string`: the format itself says that it is a string, or not.
        """
        self.add(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if is_string is None:
            is_string = _takes_text(self.schemas.get(tool, {}), key, value)
        meant: object = value if is_string else loads(value.strip())
        if meant is None and value.strip() != "null":
            meant = _NAMES.get(value.strip().lower(), value)
        text = argument_text([meant])
        self.add(json.dumps(value) if text is None else text[1:-1])

    def python_call(self, suffix: str = "") -> Steps:
        """Read a call in Python's syntax, name(key=value, …), with constants for values; `suffix` follows its name."""
        name, _ = yield from self.until("(")
        name = name.strip().removesuffix(suffix)
        self._position -= 1
        inner = yield from self.balanced(quotes="\"'")
        values = read_members(inner)
        if values is None or not PYTHON_NAME.fullmatch(name):
            raise _Broken
        self.whole(name, values)


class _Balance:
    """Scanner for the bracket that closes the first one."""

    __slots__ = ("_depth", "_escaped", "_quote", "_quotes")

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self._depth = depth
        self._quotes = quotes
        self._quote = ""
        self._escaped = False

    def scan(self, text: str, begin: int) -> int | None:
        """Return the position after the closing bracket; None while there is none. Each character is seen once."""
        for position in range(begin, len(text)):
            char = text[position]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(":
                self._depth += 1
            elif char in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


def _may_close(text: str) -> bool:
    """True when `text` may be the start of a marker, or a bracket that ends a list."""
    text = text.strip()
    return text in ("]", "}", "}]", ";", ",") or (text.startswith("<") and len(text) < 32 and ">" not in text)


def _takes_text(schema: Mapping[str, Any], key: str, value: str) -> bool:
    """True when the value of parameter `key` is plain text: its schema says so, or the schema is silent and it is not
    JSON."""
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, Mapping) else None
    options = list(alternatives(one, schema)) if isinstance(one, Mapping) else []
    if any(isinstance(option.get("enum"), list) and value in option["enum"] for option in options):
        return True
    kinds = {"string" if is_text_schema(option) else option.get("type") for option in options}
    if None in kinds:
        kinds = set()
    if kinds and "string" not in kinds:
        return False
    meant = loads(value.strip())
    if value.strip() != "null" and (meant is None or isinstance(meant, str)):
        return True
    # JSON, but text may be meant: only a type that the schema names is read as JSON.
    return bool(kinds) and _KINDS[type(meant)].isdisjoint(kinds)
