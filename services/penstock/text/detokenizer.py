"""Decoding by a table, a few ids at a time: `push` and `finish` together return the text of decoding all at once.

Two families of tokenizers decode token by token from a table: byte-level BPE (GPT-2, Llama 3, Qwen), and pieces with
byte fallback (Llama 2, Mistral, Gemma).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal, Protocol, cast

from penstock.text.decode_table import Table

REPLACEMENT = "\ufffd"
TableKind = Literal["byte_level", "byte_fallback"]


class Detokenizer(Protocol):
    """Decoding state of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """Take ids and return the text that is certain. Raises IndexError for an id at or above the table's limit."""

    def finish(self) -> str:
        """Return the text that was held back; incomplete characters are U+FFFD, as in the one-shot decode."""


class ByteLevelDetokenizer:
    """Detokenizer that joins the bytes of ids as UTF-8; invalid bytes become U+FFFD as in Rust's from_utf8_lossy."""

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
    """Detokenizer for pieces of text and runs of single bytes.

    tokenizers decodes a run of bytes as a whole: one invalid byte turns every byte of the run into U+FFFD. So a run is
    held back until a piece ends it: text that was sent could not be taken back.
    """

    __slots__ = ("_raw", "_run", "_strip", "_strip_left", "_text")

    def __init__(self, table: Table, strip: str = "", strip_count: int = 0) -> None:
        """Make it. Up to `strip_count` of `strip` are dropped from the beginning of the whole text."""
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


class DecodeTable:
    """Whole decoder of a tokenizer."""

    def __init__(
        self, kind: TableKind, table: Table, special_ids: Sequence[int], strip: str = "", strip_count: int = 0
    ) -> None:
        """Make it. `special_ids` contribute nothing where they are skipped.

        Byte fallback: up to `strip_count` of `strip` are dropped from the beginning of the text. Raises IndexError for
        special ids that are not in the table.
        """
        self.kind = kind
        self.table = table
        self.special_ids = special_ids
        self.strip = strip
        self.strip_count = strip_count
        self._skipping = table.without(special_ids)

    def make(self, skip_special_tokens: bool) -> Detokenizer:
        """Make a detokenizer for one sequence."""
        table = self._skipping if skip_special_tokens else self.table
        if self.kind == "byte_level":
            return ByteLevelDetokenizer(table)
        return ByteFallbackDetokenizer(table, self.strip, self.strip_count)
