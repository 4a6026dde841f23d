"""Decoding of a few ids at a time, for any tokenizer: by the decoder's table if it has one (penstock.text.detokenizer),
else by running the decoder again over a short window of ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from penstock.text.detokenizer import REPLACEMENT, DecodeTable, SequenceDetokenizer
from penstock.tokenizer.decoder_plan import piece_of, plan_of

# Ids of a context at the start of a window: enough for the preceding characters, on which later text depends.
_MAX_CONTEXT_IDS = 64
# Ids at the end of a context that together may hold one character.
_MAX_CHARACTER_IDS = 8


class WindowDetokenizer:
    """Detokenizer that decodes a window of ids before and after each step; the difference is the new text."""

    __slots__ = ("_decode", "_emitted", "_ids", "_known", "_limit", "_read", "_settled", "_start")

    def __init__(self, decode: Callable[[list[int]], str], limit: int) -> None:
        self._decode = decode
        self._limit = limit
        self._ids: list[int] = []
        # Text of _ids[_start:_read] was returned; it is decoded again because later text depends on it.
        self._start = 0
        self._read = 0
        self._emitted = ""
        # Set while the window is a context that ends inside a character: its text without that character, and the text
        # that the ids extend if they do not complete it.
        self._settled: str | None = None
        self._known = ""

    def begin(self, context: Sequence[int], *, is_cut: bool = False, with_open_end: bool = False) -> str:
        for index in context:
            if index >= self._limit:
                raise IndexError(index)
        self._ids = list(context[-_MAX_CONTEXT_IDS:])
        self._read = len(self._ids)
        self._emitted = self._decode(self._ids)
        if not self._emitted.endswith(REPLACEMENT):
            return self._decode(list(context))
        for end in range(self._read - 1, max(0, self._read - _MAX_CHARACTER_IDS) - 1, -1):
            settled = self._decode(self._ids[:end])
            if not settled.endswith(REPLACEMENT):
                self._settled, self._known = settled, settled if with_open_end else self._emitted
                return self._decode(list(context[: len(context) - self._read + end]))
        return self._decode(list(context))

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for index in ids:
            if index >= self._limit:
                raise IndexError(index)
            self._ids.append(index)
            after = self._decode(self._ids[self._start :])
            place = self._num_returned(after)
            if len(after) > place and not after.endswith(REPLACEMENT):
                out.append(after[place:])
                self._start, self._read = self._read, len(self._ids)
                if self._settled is not None:
                    self._emitted, self._settled = after[:place], None
        text = "".join(out)
        self._emitted += text
        return text

    def finish(self) -> str:
        whole = self._decode(self._ids)
        if self._settled is None and whole.startswith(self._emitted):
            return whole[len(self._emitted) :]
        after = self._decode(self._ids[self._start :])
        return after[self._num_returned(after) :]

    def _num_returned(self, after: str) -> int:
        """Number of characters of the window's text that were returned before, or belong to the context."""
        if self._settled is None:
            return len(self._decode(self._ids[self._start : self._read]))
        return len(self._known if after.startswith(self._known) else self._settled)


class CleanedUpDetokenizer:
    """Detokenizer with transformers' clean-up of spaces before punctuation, on text that comes in portions.

    Every space that it removes begins one of its patterns, and only " ' " ends with one. So text can be cut for the
    clean-up before any space that follows neither a space nor an apostrophe.
    """

    __slots__ = ("_clean_up", "_inner", "_known", "_text")

    def __init__(self, inner: SequenceDetokenizer, clean_up: Callable[[str], str]) -> None:
        self._inner = inner
        self._clean_up = clean_up
        self._text = ""
        # Characters of `_text` that belong to the context.
        self._known = 0

    def begin(self, context: Sequence[int], *, is_cut: bool = False, with_open_end: bool = False) -> str:
        text = self._inner.begin(context, is_cut=is_cut, with_open_end=with_open_end)
        self._text = text[_last_cut(text) :]
        self._known = len(self._text)
        return self._clean_up(text)

    def push(self, ids: Sequence[int]) -> str:
        text = self._text + self._inner.push(ids)
        place = _last_cut(text)
        self._text = text[place:]
        return self._cleaned(text[:place])

    def finish(self) -> str:
        text, self._text = self._text + self._inner.finish(), ""
        return self._cleaned(text)

    def _cleaned(self, text: str) -> str:
        """Clean up, and leave out the context's part. The clean-up removes only spaces."""
        cleaned = self._clean_up(text)
        if not self._known or not text:
            return cleaned
        known, self._known = self._clean_up(text[: self._known]), 0
        spaces, place = len(known) - len(known.rstrip(" ")), 0
        for _ in range(len(known) - known.count(" ")):
            while cleaned[place] == " ":
                place += 1
            place += 1
        while spaces and cleaned[place : place + 1] == " ":
            place, spaces = place + 1, spaces - 1
        return cleaned[place:]


def _last_cut(text: str) -> int:
    """Find the last place where `text` can be cut for the clean-up; 0 without one."""
    place = text.rfind(" ")
    while place > 0 and text[place - 1] in " '":
        place = text.rfind(" ", 0, place)
    return max(place, 0)


class DetokenizerFactory:
    """Maker of the detokenizers of one tokenizer; tables are built once."""

    def __init__(
        self, tokenizer: Tokenizer, *, id_limit: int, special_ids: Sequence[int], clean_up: Callable[[str], str] | None
    ) -> None:
        """Make it. `clean_up` is applied to decoded text wherever transformers would apply it."""
        self._tokenizer = tokenizer
        self._id_limit = id_limit
        self._clean_up = clean_up
        self._special_ids = special_ids
        # Only the decoder's state: the whole tokenizer's is megabytes of JSON to write and to read.
        decoder = tokenizer.decoder
        self._decoder = None if decoder is None else json.loads(decoder.__getstate__())
        plan = plan_of(self._decoder)
        self._table = None if plan is None else plan.table(tokenizer, id_limit, special_ids)
        # The tokenizer makes new objects for all of them on each request.
        self._added = frozenset(tokenizer.get_added_tokens_decoder()) if plan is None else frozenset()

    @property
    def kind(self) -> str:
        """Kind of decoding: "byte_level", "byte_fallback" or "window"."""
        return "window" if self._table is None else self._table.kind

    @property
    def table(self) -> DecodeTable | None:
        """Table of the whole decoder; None if it has none."""
        return self._table if self._clean_up is None else None

    def piece(self, index: int) -> bytes:
        """Bytes that an id contributes inside a text, special ones spelled out. Raises IndexError for an unknown id."""
        if self._table is not None:
            return self._table.table.piece(index)
        if index >= self._id_limit:
            raise IndexError(index)
        return piece_of(self._tokenizer, self._decoder, self._added, index)

    def make(self, skip_special_tokens: bool, kept: Sequence[str] = ()) -> SequenceDetokenizer:
        """Make a detokenizer for one sequence. `kept`: special tokens that are not skipped."""
        plain = self._make_plain(skip_special_tokens, kept)
        return plain if self._clean_up is None else CleanedUpDetokenizer(plain, self._clean_up)

    def _make_plain(self, skip_special_tokens: bool, kept: Sequence[str]) -> SequenceDetokenizer:
        if self._table is not None:
            return self._table.make(skip_special_tokens, kept)
        tokenizer = self._tokenizer
        keeps = {self._tokenizer.token_to_id(token) for token in kept}.intersection(self._special_ids)
        if skip_special_tokens and keeps:
            skipped = frozenset(self._special_ids) - keeps
            return WindowDetokenizer(
                lambda ids: tokenizer.decode([one for one in ids if one not in skipped], skip_special_tokens=False),
                self._id_limit,
            )
        return WindowDetokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), self._id_limit
        )
