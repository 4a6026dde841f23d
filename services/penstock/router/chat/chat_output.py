"""Parser of a chat model's text: `<think>…</think>`, `<tool_call>{json}</tool_call>` and the rest.

It works on text as it arrives. Its output does not depend on how the text is split, and text without such tags comes
out as it went in.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.router.chat.tool_calls import OPEN_TAG, CallResult, ToolCallPiece, ToolCallReader

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(slots=True)
class ChatPiece:
    """Text, reasoning and tool calls that a piece of text turned into."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)


class _State(enum.Enum):
    START = 1
    REASONING = 2
    AFTER_REASONING = 3
    CONTENT = 4
    AFTER_CALL = 5
    CALL = 6


def new_call_id() -> str:
    """Make a tool call id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def prompt_opens_reasoning(prompt: str) -> bool:
    """True when the rendered prompt ends inside a thought, as templates that force thinking do."""
    return prompt.rstrip().endswith(THINK_OPEN)


class ChatParser:
    """Parser of one returned answer.

    A thought counts only at the very beginning of an answer, tool calls only when `parse_tools` (the request offered
    tools). Newlines around a thought belong to the tags, as in Qwen3's own template.
    """

    def __init__(
        self,
        *,
        parse_tools: bool,
        in_reasoning: bool = False,
        max_head_chars: int = 65536,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._parse_tools = parse_tools
        self._state = _State.REASONING if in_reasoning else _State.START
        self._reasoning_started = False
        self._held = ""
        self._call: ToolCallReader | None = None
        self._calls = 0
        self._max_head_chars = max_head_chars
        self._make_id = make_id
        self._ends_in_calls = False

    @property
    def in_reasoning(self) -> bool:
        """True while the text so far ends inside a thought."""
        return self._state is _State.REASONING

    @property
    def is_plain(self) -> bool:
        """True when all text from here on comes out as it goes in, and nothing is held back."""
        return self._state is _State.CONTENT and not self._parse_tools

    @property
    def ends_in_tool_calls(self) -> bool:
        """True when one or more complete calls ended the answer. Meaningful after `finish`."""
        return self._ends_in_calls

    def feed(self, text: str) -> ChatPiece:
        """Take more text, which may be empty, and return what is certain."""
        piece = ChatPiece()
        if self.is_plain:
            piece.text = text
            return piece
        self._held += text
        while self._held and self._step(piece):
            pass
        return piece

    def finish(self) -> ChatPiece:
        """Return what was held back: no more text comes."""
        piece = ChatPiece()
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            piece.reasoning = held if self._reasoning_started else held.lstrip("\n")
        elif self._state is _State.CALL and self._call is not None:
            result = self._call.finish()
            self._take_call(result, piece)
        elif self._state is _State.AFTER_CALL:
            # The held text is white space, or white space and the beginning of another tag.
            if held.strip():
                piece.text, self._ends_in_calls = held, False
        elif self._state is not _State.AFTER_REASONING:
            piece.text = held
        return piece

    def _step(self, piece: ChatPiece) -> bool:
        """Consume some of the held text; False when more text is needed."""
        return self._STEPS[self._state](self, piece)

    def _start(self, piece: ChatPiece) -> bool:
        stripped = self._held.lstrip()
        if stripped.startswith(THINK_OPEN):
            self._held = stripped[len(THINK_OPEN) :]
            self._state = _State.REASONING
            return True
        if THINK_OPEN.startswith(stripped):
            return False
        self._state = _State.CONTENT
        return True

    def _reasoning(self, piece: ChatPiece) -> bool:
        if not self._reasoning_started:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
        end = self._held.find(THINK_CLOSE)
        keep = end if end >= 0 else len(self._held) - _overlap(self._held, THINK_CLOSE)
        thought = self._held[:keep].rstrip("\n")
        if thought:
            piece.reasoning += thought
            self._reasoning_started = True
        if end < 0:
            self._held = self._held[len(thought) :]
            return False
        self._held = self._held[end + len(THINK_CLOSE) :]
        self._state = _State.AFTER_REASONING
        return True

    def _after_reasoning(self, piece: ChatPiece) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = _State.CONTENT
        return bool(self._held)

    def _content(self, piece: ChatPiece) -> bool:
        if not self._parse_tools:
            piece.text += self._held
            self._held = ""
            return False
        begin = self._held.find(OPEN_TAG)
        keep = begin if begin >= 0 else len(self._held) - _overlap(self._held, OPEN_TAG)
        piece.text += self._held[:keep]
        self._held = self._held[keep:]
        if begin < 0:
            return False
        self._open_call()
        return True

    def _after_call(self, piece: ChatPiece) -> bool:
        stripped = self._held.lstrip()
        if stripped.startswith(OPEN_TAG):
            self._held = stripped
            self._open_call()
            return True
        if OPEN_TAG.startswith(stripped):
            return False
        self._state, self._ends_in_calls = _State.CONTENT, False
        return True

    def _open_call(self) -> None:
        self._held = self._held[len(OPEN_TAG) :]
        self._call = ToolCallReader(self._calls, self._make_id(), self._max_head_chars)
        self._state = _State.CALL

    def _in_call(self, piece: ChatPiece) -> bool:
        if self._call is None:
            return False
        result = self._call.feed(self._held)
        self._held = ""
        self._take_call(result, piece)
        self._held = result.rest
        return bool(self._held)

    def _take_call(self, result: CallResult, piece: ChatPiece) -> None:
        piece.tool_calls += result.pieces
        if not result.closed:
            return
        self._call = None
        if result.raw:
            piece.text += result.raw
            self._state, self._ends_in_calls = _State.CONTENT, False
            return
        self._calls += 1
        self._state, self._ends_in_calls = _State.AFTER_CALL, result.complete

    _STEPS: ClassVar[Mapping[_State, Callable[[ChatParser, ChatPiece], bool]]] = {
        _State.START: _start,
        _State.REASONING: _reasoning,
        _State.AFTER_REASONING: _after_reasoning,
        _State.CONTENT: _content,
        _State.AFTER_CALL: _after_call,
        _State.CALL: _in_call,
    }


def _overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that `text` ends with."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
