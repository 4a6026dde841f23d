"""Reader of one Hermes tool call, `{"name": …, "arguments": {…}}`, from text that arrives in arbitrary pieces."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, field

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
# The usual order of keys: the arguments can be streamed as they come.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)


@dataclass(slots=True)
class ToolCallPiece:
    """A piece of call number `index`: id and name come first, then the arguments' JSON text in pieces."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class CallResult:
    """Result of `ToolCallReader.feed`. `rest` is the text after the closing tag when `closed`."""

    pieces: list[ToolCallPiece] = field(default_factory=list)
    closed: bool = False
    # Set with `closed`: a well-formed call was read. Otherwise `raw` holds text that is not a call.
    complete: bool = False
    raw: str = ""
    rest: str = ""
    # Set with `closed`: calls that began.
    calls: int = 0


class _Phase(enum.Enum):
    HEAD = 1
    ARGUMENTS = 2
    TAIL = 3


class ToolCallReader:
    """Reads the text between `<tool_call>` and `</tool_call>`. The result does not depend on how the text is split."""

    def __init__(self, index: int, call_id: str, max_head_chars: int) -> None:
        """`max_head_chars`: more characters than this without a recognisable call are plain text."""
        self._index = index
        self._call_id = call_id
        self._max_head_chars = max_head_chars
        self._phase = _Phase.HEAD
        self._buffer = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._well_formed = False
        # All of the arguments so far: only the whole text can be checked to be JSON.
        self._arguments: list[str] = []

    def feed(self, text: str) -> CallResult:
        """Take more text and return the pieces that it completes."""
        result = CallResult()
        self._buffer += text
        if self._phase is _Phase.HEAD:
            self._read_head(result)
        if self._phase is _Phase.ARGUMENTS:
            self._read_arguments(result)
        if self._phase is _Phase.TAIL and not result.closed:
            self._read_tail(result)
        result.calls = int(result.closed and not result.raw)
        return result

    def finish(self, *, is_cut: bool = False) -> CallResult:
        """Return the rest: no more text comes. A call without its closing tag still counts if its JSON is complete.

        `is_cut`: the model would have continued. A partial call is then left out, not returned as text.
        """
        result = CallResult(closed=True)
        if self._phase is _Phase.HEAD:
            self._read_whole(self._buffer, result, "" if is_cut else OPEN_TAG + self._buffer)
            result.calls = int(result.complete)
            return result
        result.complete = self._phase is _Phase.TAIL and self._well_formed
        result.calls = 1
        return result

    def _read_head(self, result: CallResult) -> None:
        match = _HEAD.match(self._buffer)
        begin = len(self._buffer) - len(self._buffer.lstrip())
        if self._buffer[begin : begin + 1] not in ("", "{"):
            # No call starts like this: reading starts afresh after it.
            result.closed = True
            result.raw, result.rest = OPEN_TAG + self._buffer[:begin], self._buffer[begin:]
            return
        close = self._buffer.find(CLOSE_TAG)
        if match is not None and not 0 <= close < match.end():
            name = loads(match.group(1))
            if isinstance(name, str) and is_text(name):
                result.pieces.append(ToolCallPiece(self._index, self._call_id, name))
                self._buffer = self._buffer[match.end() :]
                self._phase = _Phase.ARGUMENTS
                return
        if close >= 0:
            body = self._buffer[:close]
            result.closed, result.rest = True, self._buffer[close + len(CLOSE_TAG) :]
            self._read_whole(body, result, OPEN_TAG + body + CLOSE_TAG)
        elif len(self._buffer) > self._max_head_chars:
            result.closed, result.raw = True, OPEN_TAG + self._buffer

    def _read_whole(self, body: str, result: CallResult, raw: str) -> None:
        call = loads(body)
        name = call.get("name") if isinstance(call, dict) else None
        text = argument_text(call.get("arguments", call.get("parameters", {}))) if isinstance(call, dict) else None
        if not isinstance(name, str) or not is_text(name) or text is None:
            result.raw = raw
            return
        result.pieces += [
            ToolCallPiece(self._index, self._call_id, name),
            ToolCallPiece(self._index, arguments=text),
        ]
        result.complete = True

    def _read_arguments(self, result: CallResult) -> None:
        end = self._scan(self._buffer)
        taken = len(self._buffer) if end is None else end
        if taken:
            self._arguments.append(self._buffer[:taken])
            result.pieces.append(ToolCallPiece(self._index, arguments=self._arguments[-1]))
        self._buffer = self._buffer[taken:]
        if end is not None:
            self._phase = _Phase.TAIL
            self._well_formed = isinstance(loads("".join(self._arguments)), dict)
            self._arguments.clear()

    def _scan(self, text: str) -> int | None:
        """Index in `text` at which the arguments' object ends; None while it continues."""
        for position, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
            elif char == "<":
                # Not JSON: the closing tag came before the last brace.
                return position
        return None

    def _read_tail(self, result: CallResult) -> None:
        close = self._buffer.find(CLOSE_TAG)
        if close < 0:
            # Only the part that may be the start of the tag matters.
            self._buffer = self._buffer[-(len(CLOSE_TAG) - 1) :]
            return
        result.closed, result.complete = True, self._well_formed
        result.rest = self._buffer[close + len(CLOSE_TAG) :]


def loads(text: str) -> object:
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value


def _refuse(constant: str) -> object:
    """Refuse NaN and Infinity, which Python's parser accepts and JSON does not have. Raises ValueError."""
    raise ValueError(constant)


def argument_text(arguments: object) -> str | None:
    """JSON text of arguments, or None when no message could carry them. A model may already have written them as JSON
    inside a string."""
    if isinstance(arguments, str) and (not is_text(arguments) or isinstance(loads(arguments), dict)):
        return arguments if is_text(arguments) else None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if is_text(text) else json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        # Python's bytes, sets and complex numbers, which JSON lacks, or a number too large for a float.
        return None


def is_text(value: str) -> bool:
    """True when the value has no lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
