"""Ids to text, a few at a time. What `push` and `finish` return, put together, is the one-shot decode of all ids.

Two families of tokenizers decode token by token from a table: byte-level BPE (GPT-2, Llama 3, Qwen), and pieces with
byte fallback (Llama 2, Mistral, Gemma). Any other decoder is run again over a short window of ids.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from tokenizers import Tokenizer

from penstock.tokenizer.decoder_plan import Table, plan_of

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """State of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain. Raises IndexError for an id at or above the table's limit."""

    def finish(self) -> str:
        """What was held back; incomplete characters are U+FFFD, as in the one-shot decode."""


class ByteLevelDetokenizer:
    """Bytes of consecutive ids are one UTF-8 text; invalid bytes become U+FFFD as Rust's from_utf8_lossy does it."""

    __slots__ = ("_pending", "_raw", "_text")

    def __init__(self, table: Table) -> None:
        self._text = table.text
        self._raw = table.raw
        self._pending = b""

    def push(self, ids: Sequence[int]) -> str:
        texts, pending = self._text, self._pending
        if not pending:
            if len(ids) == 1:  # the common step
                text = texts[ids[0]]
                if text is not None:
                    return text
            else:
                whole = [texts[index] for index in ids]
                if None not in whole:
                    return "".join(cast("list[str]", whole))
        out: list[str] = []
        for index in ids:
            text = texts[index]
            if text is not None and not pending:
                out.append(text)
                continue
            pending += self._raw[index] if text is None else text.encode()
            text, used = codecs.utf_8_decode(pending, "replace", False)
            pending = pending[used:]
            out.append(text)
        self._pending = pending
        return "".join(out)

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class ByteFallbackDetokenizer:
    """Pieces of text, and runs of single bytes.

    tokenizers decodes a run of bytes as a whole: one invalid byte turns every byte of the run into U+FFFD. So a run is
    held back until a piece ends it, or its text could be taken back.
    """

    __slots__ = ("_raw", "_run", "_strip", "_strip_left", "_text")

    def __init__(self, table: Table, strip: str = "", strip_count: int = 0) -> None:
        """Up to `strip_count` of `strip` are dropped from the beginning of the whole text."""
        self._text = table.text
        self._raw = table.raw
        self._run = b""
        self._strip = strip
        self._strip_left = strip_count

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for index in ids:
            text = self._text[index]
            if text is None:
                self._run += self._raw[index]
            elif text:
                if self._run:
                    out.append(self._take_run())
                out.append(text)
        joined = "".join(out)
        return self._stripped(joined) if self._strip_left and joined else joined

    def finish(self) -> str:
        return self._stripped(self._take_run())

    def _take_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDetokenizer:
    """Decodes a window of ids before and after each step, and returns the difference. For decoders with no table."""

    __slots__ = ("_decode", "_emitted", "_ids", "_limit", "_read", "_start")

    def __init__(self, decode: Callable[[list[int]], str], limit: int) -> None:
        self._decode = decode
        self._limit = limit
        self._ids: list[int] = []
        # Text of _ids[_start:_read] has been returned; it is decoded again because it shapes what follows.
        self._start = 0
        self._read = 0
        self._emitted = ""

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for index in ids:
            if index >= self._limit:
                raise IndexError(index)
            self._ids.append(index)
            before = self._decode(self._ids[self._start : self._read])
            after = self._decode(self._ids[self._start :])
            if len(after) > len(before) and not after.endswith(REPLACEMENT):
                out.append(after[len(before) :])
                self._start, self._read = self._read, len(self._ids)
        text = "".join(out)
        self._emitted += text
        return text

    def finish(self) -> str:
        whole = self._decode(self._ids)
        if whole.startswith(self._emitted):
            return whole[len(self._emitted) :]
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]


class CleanedUpDetokenizer:
    """transformers' clean-up of spaces before punctuation, on text that comes in portions.

    Every space it removes opens one of its patterns, and only " ' " ends in one. So text can be cleaned up apart from
    what follows wherever a space comes after something that is neither a space nor an apostrophe.
    """

    __slots__ = ("_clean_up", "_inner", "_text")

    def __init__(self, inner: Detokenizer, clean_up: Callable[[str], str]) -> None:
        self._inner = inner
        self._clean_up = clean_up
        self._text = ""

    def push(self, ids: Sequence[int]) -> str:
        text = self._text + self._inner.push(ids)
        place = text.rfind(" ")
        while place > 0 and text[place - 1] in " '":
            place = text.rfind(" ", 0, place)
        place = max(place, 0)
        self._text = text[place:]
        return self._clean_up(text[:place])

    def finish(self) -> str:
        text, self._text = self._text + self._inner.finish(), ""
        return self._clean_up(text)


class DetokenizerFactory:
    """Makes the detokenizer that fits a tokenizer; tables are built once."""

    def __init__(
        self, tokenizer: Tokenizer, *, id_limit: int, special_ids: Sequence[int], clean_up: Callable[[str], str] | None
    ) -> None:
        """`clean_up` is applied to decoded text where transformers would."""
        self._tokenizer = tokenizer
        self._id_limit = id_limit
        self._clean_up = clean_up
        self._plan = plan_of(json.loads(tokenizer.to_str())["decoder"])
        self._tables: dict[bool, Table] = {}
        if self._plan is not None:
            table = self._plan.table(tokenizer, id_limit)
            self._tables = {False: table, True: table.without(special_ids)}

    @property
    def kind(self) -> str:
        """ "byte_level", "byte_fallback" or "window"."""
        return "window" if self._plan is None else self._plan.kind

    def make(self, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for one sequence."""
        plain = self._make_plain(skip_special_tokens)
        return plain if self._clean_up is None else CleanedUpDetokenizer(plain, self._clean_up)

    def _make_plain(self, skip_special_tokens: bool) -> Detokenizer:
        if self._plan is None:
            tokenizer = self._tokenizer
            return WindowDetokenizer(
                lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), self._id_limit
            )
        table = self._tables[skip_special_tokens]
        if self._plan.kind == "byte_level":
            return ByteLevelDetokenizer(table)
        return ByteFallbackDetokenizer(table, self._plan.strip, self._plan.strip_count)
