"""Parser of a chat model's text: thoughts, tool calls and the rest, in the model's own format.

It works on text as it arrives. Its output does not depend on how the text is split, and text without such tags comes
out as it went in.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock.router.chat.call_block import CallBlock, Program, Schemas
from penstock.router.chat.call_filter import CallFilter
from penstock.router.chat.call_programs import harmony
from penstock.router.chat.formats import DEFAULT, THINK, ChatFormat, ReasoningFormat
from penstock.router.chat.marks import marks_of
from penstock.router.chat.tool_calls import CallResult, ToolCallPiece, ToolCallReader


@dataclass(slots=True)
class ChatPiece:
    """Text, reasoning and tool calls parsed from a piece of text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)


class _State(enum.Enum):
    START = 1
    REASONING = 2
    AFTER_REASONING = 3
    BEGIN = 4
    CONTENT = 5
    AFTER_CALL = 6
    CALL = 7
    HEADER = 8
    BODY = 9
    DRAFT = 10


def new_call_id() -> str:
    """Make a unique id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def prompt_opens_reasoning(prompt: str, reasoning: ReasoningFormat | None = THINK) -> bool:
    """True when the rendered prompt ends inside a thought, as templates that force thinking do."""
    return reasoning is not None and prompt.rstrip().endswith(reasoning.opens)


def make_parser(chat: ChatFormat, **settings: Any) -> ChatParser:
    """Make the parser of one returned answer; `settings` are ChatParser's."""
    return (HarmonyParser if chat.tools.is_harmony else ChatParser)(chat=chat, **settings)


class ChatParser:
    """Parser of one returned answer.

    A thought counts only at the very beginning of an answer, tool calls only when `parse_tools` (the request offered
    tools). Newlines around a thought belong to the tags, as in Qwen3's own template.

    A call ends a thought that nothing else ends. In a thought that is closed, or continues after it, it is a draft.
    """

    def __init__(
        self,
        *,
        parse_tools: bool,
        in_reasoning: bool = False,
        chat: ChatFormat = DEFAULT,
        schemas: Schemas | None = None,
        max_calls: int = 0,
        distinct_calls: bool = False,
        max_head_chars: int = 65536,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Make it. `schemas`: JSON Schemas of the offered tools' parameters, by name; formats without types need them.
        `max_calls`: one more call ends the answer; 0: no limit. `distinct_calls`: a repeated call also ends it."""
        self._parse_tools = parse_tools
        self._chat, self._format = chat, chat.tools
        self._opens, self._around = (*chat.tools.opens, *chat.tools.inline), chat.tools.around
        self._after_calls = (*self._opens, *self._around)
        self._thought = chat.reasoning or THINK
        closes = self._thought.closes
        self._close = marks_of(closes)
        self._marks = chat.tools.call_marks(*self._around) if parse_tools else marks_of(*self._around)
        self._thought_marks = chat.tools.call_marks(closes) if parse_tools else self._close
        self._schemas = schemas or {}
        self._filter = CallFilter(max_calls, distinct=distinct_calls)
        self._max_calls, self._distinct_calls = max_calls, distinct_calls
        self._state = _State.REASONING if in_reasoning else _State.START if chat.reasoning else _State.BEGIN
        self._reasoning_started = self._has_text = False
        # Characters of `_held`, inside a thought, in which no call can begin any more.
        self._passed = 0
        # Newlines at the start of `_held`, inside a thought: they are not examined again.
        self._newlines = 0
        self._draft: _DraftedCalls | None = None
        self._held = ""
        self._call: ToolCallReader | CallBlock | None = None
        self._calls = 0
        self._max_head_chars = max_head_chars
        self._make_id = make_id
        self._ends_in_calls = False

    @property
    def in_reasoning(self) -> bool:
        """True while the text so far ends inside a thought."""
        return self._state is _State.REASONING

    @property
    def is_undecided(self) -> bool:
        """True while a thought may have ended in a call; the text that follows decides."""
        return self._state is _State.DRAFT

    @property
    def is_plain(self) -> bool:
        """True when all further text comes out unchanged, and nothing is held back."""
        return self._state is _State.CONTENT and not self._parse_tools and not self._around

    @property
    def ends_in_tool_calls(self) -> bool:
        """True when one or more complete calls ended the answer. Meaningful after `finish`."""
        return self._ends_in_calls or self.is_over

    @property
    def is_over(self) -> bool:
        """True after a call that is not part of the answer: nothing after it is, either."""
        return self._filter.is_over

    def feed(self, text: str) -> ChatPiece:
        """Take more text, which may be empty, and return the certain output."""
        piece = ChatPiece()
        if self.is_plain:
            piece.text = text
            return piece
        self._held += text
        while self._held and not self.is_over and self._step(piece):
            pass
        return piece

    def finish(self, *, is_cut: bool = False, is_stopped: bool = False) -> ChatPiece:
        """Return the output that was held back: no more text comes.

        `is_cut`: the model did not end the answer itself. A partial call is then left out; else it is text.
        `is_stopped`: a stop string cut it in the place where a marker would have continued: the marker's start is text.
        """
        piece = ChatPiece()
        may_be_tag = is_cut and not is_stopped
        held, self._held = self._held, ""
        if self.is_over:
            return piece
        if self._state is _State.REASONING:
            half = self._close.half(held) if may_be_tag else len(held)
            if not _is_likely_text(held[half:]):
                held = held[:half]
            piece.reasoning = held if self._reasoning_started else held.lstrip("\n")
        elif self._state is _State.DRAFT and self._draft is not None:
            self._finish_draft(self._draft, held, piece, is_cut=is_cut)
        elif self._state is _State.CALL and self._call is not None:
            result = self._call.finish(is_cut=is_cut)
            self._take_call(result, piece)
            if result.rest.strip():
                piece.text, self._ends_in_calls = piece.text + result.rest, False
        elif self._state is _State.AFTER_CALL:
            # The held text is white space, or white space and the start of another tag.
            if held.strip() and not may_be_tag:
                piece.text, self._ends_in_calls = held, False
        elif may_be_tag and self._is_half_a_tag(held):
            pass
        elif self._state is not _State.AFTER_REASONING:
            piece.text = held
        return piece

    def _is_half_a_tag(self, held: str) -> bool:
        """True when the end of a cut answer is the start of a marker, not text."""
        if self._state is _State.START:
            is_call = self._parse_tools and any(one.startswith(held.strip()) for one in self._opens)
            return bool(held.strip()) and (self._chat.thinks or is_call)
        # The start of a marker counts as one when nothing came before it.
        return self._state is _State.CONTENT and not (self._has_text and _is_likely_text(held.strip()))

    def _finish_draft(self, draft: _DraftedCalls, held: str, piece: ChatPiece, *, is_cut: bool) -> None:
        """Take the calls that ended a thought; the rest is reasoning."""
        if draft.finish(held, is_cut=is_cut):
            piece.tool_calls += draft.calls
            self._ends_in_calls = draft.is_complete
        else:
            piece.reasoning += held if self._reasoning_started else held.lstrip("\n")

    def _step(self, piece: ChatPiece) -> bool:
        """Consume some of the held text; False when more text is needed."""
        return self._STEPS[self._state](self, piece)

    def _start(self, piece: ChatPiece) -> bool:
        stripped = self._held.lstrip()
        if stripped.startswith(self._thought.opens):
            self._held = stripped[len(self._thought.opens) :]
            self._state = _State.REASONING
            return True
        if self._thought.opens.startswith(stripped):
            return False
        self._state = _State.BEGIN
        return self._begin(piece)

    def _begin(self, piece: ChatPiece) -> bool:
        """Handle the start of the content: in some formats a call has no marker there."""
        stripped = self._held.lstrip()
        if not self._parse_tools or not self._format.starts:
            self._state = _State.CONTENT
        elif not stripped:
            return False
        elif stripped.startswith(self._format.starts):
            self._open_call(self._held[: len(self._held) - len(stripped)])
        else:
            self._state = _State.CONTENT
        return True

    def _reasoning(self, piece: ChatPiece) -> bool:
        if not self._reasoning_started:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
        # The end may begin in a marker that was passed, and not before it.
        first = max(self._newlines, self._passed - len(self._thought.closes))
        end = self._close.find(self._held, first)[0]
        begin, opened = self._marks.find(self._held, max(first, self._passed)) if end < 0 else (-1, "")
        keep = max(begin, end)
        if keep < 0:
            keep = self._thought_marks.half(self._held, max(first, self._passed))
            keep = min(keep, self._close.half(self._held, first)) if self._passed > first else keep
        new = self._held[self._newlines : keep].rstrip("\n")
        thought = "\n" * self._newlines + new if new else ""
        if thought:
            piece.reasoning += thought
            self._reasoning_started = True
        if end >= 0:
            self._held, self._passed, self._newlines = self._held[end + len(self._thought.closes) :], 0, 0
            self._state = _State.AFTER_REASONING
            return True
        self._held, self._passed = self._held[len(thought) :], max(0, self._passed - len(thought))
        self._newlines = keep - len(thought)
        if begin < 0:
            return False
        calls = ChatParser(
            parse_tools=True,
            chat=ChatFormat(self._format, None),
            schemas=self._schemas,
            max_calls=self._max_calls,
            distinct_calls=self._distinct_calls,
            max_head_chars=self._max_head_chars,
            make_id=self._make_id,
        )
        self._draft = _DraftedCalls(calls, begin - len(thought), len(opened))
        self._state = _State.DRAFT
        return True

    def _drafted(self, piece: ChatPiece) -> bool:
        """Handle the text after the start of a call inside a thought."""
        draft = self._draft
        if draft is None:
            return False
        closes = self._thought.closes
        is_closed = self._held.find(closes, max(0, draft.read - len(closes))) >= 0
        if not is_closed and draft.feed(self._held, self._close.half(self._held)):
            return False
        # Not a call, or one that the model only thought about: continue after the marker.
        self._passed, self._draft, self._state = draft.behind_marker, None, _State.REASONING
        return True

    def _after_reasoning(self, piece: ChatPiece) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = _State.BEGIN
        return bool(self._held)

    def _content(self, piece: ChatPiece) -> bool:
        if not self._parse_tools and not self._around:
            piece.text += self._held
            self._held = ""
            return False
        begin, opened = self._marks.find(self._held)
        keep = begin if begin >= 0 else self._marks.half(self._held)
        piece.text += self._held[:keep]
        self._has_text = self._has_text or keep > 0
        self._held = self._held[keep:]
        if begin < 0:
            return False
        if opened in self._around:
            self._held = self._held[len(opened) :]
            return bool(self._held)
        self._open_call(opened)
        return True

    def _after_call(self, piece: ChatPiece) -> bool:
        stripped = self._held.lstrip()
        opened = next((one for one in self._after_calls if stripped.startswith(one)), "")
        if opened in self._around:
            self._held = stripped[len(opened) :]
            return bool(self._held)
        if opened:
            self._held = stripped
            self._open_call(opened)
            return True
        if not stripped or any(one.startswith(stripped) for one in self._after_calls):
            return False
        self._state, self._ends_in_calls = _State.CONTENT, False
        return True

    def _open_call(self, opened: str) -> None:
        self._held = self._held[len(opened) :]
        program = self._format.program
        if program is None:
            self._call = ToolCallReader(self._calls, self._make_id(), self._max_head_chars)
        else:
            is_inline = opened in self._format.inline
            self._call = self._block(program, "" if is_inline else opened, opened if is_inline else "")
        self._state = _State.CALL

    def _block(self, program: Program, opened: str, text: str = "") -> CallBlock:
        return CallBlock(
            program,
            opened,
            text=text,
            first_index=self._calls,
            make_id=self._make_id,
            max_chars=self._max_head_chars,
            schemas=self._schemas,
        )

    def _in_call(self, piece: ChatPiece) -> bool:
        if self._call is None:
            return False
        result = self._call.feed(self._held)
        self._held = ""
        self._take_call(result, piece)
        self._held = result.rest
        return bool(self._held)

    def _take_call(self, result: CallResult, piece: ChatPiece) -> None:
        piece.tool_calls += self._filter.take(result.pieces)
        if not result.closed:
            return
        piece.tool_calls += self._filter.end()
        self._call = None
        self._calls += result.calls
        if result.raw:
            piece.text += result.raw
            self._state, self._ends_in_calls = _State.CONTENT, False
            return
        self._state, self._ends_in_calls = _State.AFTER_CALL, result.complete

    _STEPS: ClassVar[Mapping[_State, Callable[[ChatParser, ChatPiece], bool]]] = {
        _State.START: _start,
        _State.REASONING: _reasoning,
        _State.AFTER_REASONING: _after_reasoning,
        _State.BEGIN: _begin,
        _State.CONTENT: _content,
        _State.AFTER_CALL: _after_call,
        _State.CALL: _in_call,
        _State.DRAFT: _drafted,
    }


class _DraftedCalls:
    """Calls inside a thought; they are real if the answer ends with them."""

    def __init__(self, parser: ChatParser, begin: int, marker: int) -> None:
        """`begin`: place of the first call in the text that is fed, and the number of characters of its marker."""
        self._parser = parser
        self.calls: list[ToolCallPiece] = []
        self.behind_marker = begin + marker
        # Characters read.
        self.read = begin

    @property
    def is_complete(self) -> bool:
        """True when the answer ends in complete calls. Meaningful after `finish`."""
        return self._parser.ends_in_tool_calls

    def feed(self, text: str, end: int) -> bool:
        """Take the text up to `end`. Returns False when it is not calls, or continues after them."""
        piece = self._parser.feed(text[self.read : end])
        self.read = max(self.read, end)
        return self._take(piece)

    def finish(self, text: str, *, is_cut: bool) -> bool:
        """Take all the text. Returns True when it ends in calls; `calls` has them."""
        return self.feed(text, len(text)) and self._take(self._parser.finish(is_cut=is_cut)) and bool(self.calls)

    def _take(self, piece: ChatPiece) -> bool:
        self.calls += piece.tool_calls
        return not piece.text.strip()


class HarmonyParser(ChatParser):
    """Parser of gpt-oss's messages: the channel analysis is reasoning, a recipient means a call, the rest is text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._state = _State.HEADER
        self._is_analysis = False

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.BODY and self._is_analysis

    @property
    def is_plain(self) -> bool:
        return False

    def finish(self, *, is_cut: bool = False, is_stopped: bool = False) -> ChatPiece:
        if self.is_over or self._state not in (_State.HEADER, _State.BODY):
            return super().finish(is_cut=is_cut, is_stopped=is_stopped)
        piece, held = ChatPiece(), self._held
        self._held = ""
        if self._state is _State.BODY:
            self._put(piece, held)
        elif held.strip() and (("to=" in held and not is_cut) or not _may_be_header(held)):
            piece.text, self._ends_in_calls = held, False
        return piece

    def _header(self, piece: ChatPiece) -> bool:
        if not _may_be_header(self._held):
            self._state, self._is_analysis = _State.BODY, False
            return True
        end = self._held.find(_MESSAGE)
        if end < 0:
            if len(self._held) <= self._max_head_chars:
                return False
            self._state, self._is_analysis = _State.BODY, False
            return True
        header, self._held = self._held[:end], self._held[end + len(_MESSAGE) :]
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._parse_tools:
            opened = header + _MESSAGE
            self._call = self._block(harmony(recipient[1].removeprefix("functions.")), opened)
            self._state = _State.CALL
            return True
        self._is_analysis = "<|channel|>analysis" in header
        self._state = _State.BODY
        return True

    def _body(self, piece: ChatPiece) -> bool:
        begin, end = _ENDS.find(self._held)
        keep = begin if begin >= 0 else _ENDS.half(self._held)
        self._put(piece, self._held[:keep])
        self._held = self._held[keep:]
        if begin < 0:
            return False
        # <|start|> begins the next header; the others end this message.
        self._held = self._held[0 if end == _START else len(end) :]
        self._state = _State.HEADER
        return bool(self._held)

    def _put(self, piece: ChatPiece, text: str) -> None:
        if self._is_analysis:
            piece.reasoning += text
        elif text:
            piece.text += text
            self._ends_in_calls = False

    def _take_call(self, result: CallResult, piece: ChatPiece) -> None:
        super()._take_call(result, piece)
        if result.closed:
            self._state, self._is_analysis = _State.HEADER, False

    _STEPS: ClassVar[Mapping[_State, Callable[[Any, ChatPiece], bool]]] = {
        _State.HEADER: _header,
        _State.BODY: _body,
        _State.CALL: ChatParser._in_call,
    }


# Fewest characters that count as a partial marker.
_LEAST_HALF = 2
_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = marks_of("<|end|>", "<|return|>", "<|call|>", _START)
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")


def _may_be_header(text: str) -> bool:
    """True when `text` starts a message's header, or may be the start of one."""
    text = text.lstrip()
    return any(text.startswith(one) or one.startswith(text) for one in (_START, "<|channel|>", "to=", _MESSAGE))


def _is_likely_text(half: str) -> bool:
    """True for the start of a marker that is plain text at the end of an answer: `if a <`, a word."""
    return len(half) < _LEAST_HALF or half.isalpha()
