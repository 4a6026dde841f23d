"""Decoding by a table, a few ids at a time: `push` and `finish` together return the text of decoding all at once.

Two families of tokenizers decode token by token from a table: byte-level BPE (GPT-2, Llama 3, Qwen), and pieces with
byte fallback (Llama 2, Mistral, Gemma).

After `begin` the text is the ids' addition to the text of a context, such as a prompt: with p the decoded context and w
the decoded context and ids, the rest of w after p. If w does not begin with p, the ids changed the context's end:

* They complete its last character, which p could only show as U+FFFD: the text begins with that character.
* They make its last run of bytes invalid, which byte fallback decodes as a whole: the context's characters stay
  unchanged, and each byte of the ids is U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal, Protocol, cast

from penstock.text.decode_table import Table

REPLACEMENT = "\ufffd"
# A model has one or two chat formats; each table takes as much memory as the vocabulary.
_MAX_KEPT_TABLES = 4
TableKind = Literal["byte_level", "byte_fallback"]


class SequenceDetokenizer(Protocol):
    """Decoding state of one sequence."""

    def begin(self, context: Sequence[int], *, is_cut: bool = False, with_open_end: bool = False) -> str:
        """Continue after `context`, before any other call. Return its text, without a character that it does not
        complete.

        `is_cut`: it is the end of a longer context. `with_open_end`: that character is part of the text to come, even
        if it is never completed. Raises IndexError as `push`.
        """

    def push(self, ids: Sequence[int]) -> str:
        """Take ids and return the certain text. Raises IndexError for an id at or above the table's limit."""

    def finish(self) -> str:
        """Return the text that was held back; incomplete characters are U+FFFD, as in the one-shot decode."""


class ByteLevelDetokenizer:
    """Detokenizer that joins the bytes of ids as UTF-8; invalid bytes become U+FFFD as in Rust's from_utf8_lossy."""

    __slots__ = ("_is_known", "_pending", "_raw", "_text")

    def __init__(self, table: Table) -> None:
        self._text = table.text
        self._raw = table.raw
        self._pending = b""
        # True while `_pending` begins in the context: if it stays incomplete, its U+FFFD is the context's.
        self._is_known = False

    def begin(self, context: Sequence[int], *, is_cut: bool = False, with_open_end: bool = False) -> str:
        text = self.push(context)
        self._is_known = bool(self._pending) and not with_open_end
        return text

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
        return self._without_known("".join(out)) if self._is_known else "".join(out)

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return self._without_known(text) if self._is_known else text

    def _without_known(self, text: str) -> str:
        self._is_known = not text
        return text.removeprefix(REPLACEMENT)


class ByteFallbackDetokenizer:
    """Detokenizer for pieces of text and runs of single bytes.

    tokenizers decodes a run of bytes as a whole: one invalid byte turns every byte of the run into U+FFFD. So a run is
    held back until a piece ends it, since sent text cannot be taken back.
    """

    __slots__ = ("_known", "_raw", "_run", "_strip", "_strip_left", "_text", "_whole")

    def __init__(self, table: Table, strip: str = "", strip_count: int = 0) -> None:
        """Make it. Up to `strip_count` of `strip` are dropped from the start of the whole text."""
        self._text = table.text
        self._raw = table.raw
        self._run = b""
        # Bytes of `_run` from the context, and those of them in whole characters.
        self._known = self._whole = 0
        self._strip = strip
        self._strip_left = strip_count

    def begin(self, context: Sequence[int], *, is_cut: bool = False, with_open_end: bool = False) -> str:
        if is_cut:
            self._strip_left = 0
        text = self.push(context)
        if is_cut and not text:
            # All of it is one run, which may begin inside a character.
            self._run = self._run[_num_continuing(self._run[:3]) :]
        self._known = len(self._run)
        try:
            whole, self._whole = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            # In any case, every byte of this run is U+FFFD.
            return text + self._stripped(REPLACEMENT * self._known)
        text += self._stripped(whole)
        if self._whole < self._known:
            # The text continues with a character or U+FFFD; neither is stripped.
            self._strip_left = 0
            if with_open_end:
                self._known = self._whole
        return text

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
        if self._known:
            return self._without_known(run)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _without_known(self, run: bytes) -> str:
        known, whole = self._known, self._whole
        self._known = self._whole = 0
        try:
            return run[whole:].decode()
        except UnicodeDecodeError:
            return REPLACEMENT * (len(run) - known)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def _num_continuing(data: bytes) -> int:
    """Count the bytes at the start of `data` that continue a UTF-8 character."""
    return next((place for place, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))


class DecodeTable:
    """Whole decoder of a tokenizer."""

    def __init__(
        self, kind: TableKind, table: Table, special_ids: Sequence[int], strip: str = "", strip_count: int = 0
    ) -> None:
        """Make it. `special_ids` contribute nothing when they are skipped.

        Byte fallback: up to `strip_count` of `strip` are dropped from the beginning of the text. Raises IndexError for
        special ids that are not in the table.
        """
        self.kind = kind
        self.table = table
        self.special_ids = special_ids
        self.strip = strip
        self.strip_count = strip_count
        self._skipping = table.without(special_ids)
        # Tables that keep some special tokens, by their texts.
        self._keeping: dict[tuple[str, ...], Table] = {}

    def context(self, ids: Sequence[int], skip_special_tokens: bool) -> Sequence[int]:
        """Return the end of `ids`, on which a decoder's state depends: from its last id of whole characters on."""
        text = (self._skipping if skip_special_tokens else self.table).text
        begin = len(ids)
        while begin:
            begin -= 1
            # An id outside the table is left in, for the decoder to refuse.
            if ids[begin] >= len(text) or text[ids[begin]]:
                break
        return ids[begin:]

    def make(self, skip_special_tokens: bool, kept: Sequence[str] = ()) -> SequenceDetokenizer:
        """Make a detokenizer for one sequence. `kept`: special tokens that are not skipped."""
        table = self._skipping if skip_special_tokens else self.table
        if kept and skip_special_tokens:
            table = self._keep(tuple(kept))
        if self.kind == "byte_level":
            return ByteLevelDetokenizer(table)
        return ByteFallbackDetokenizer(table, self.strip, self.strip_count)

    def _keep(self, kept: tuple[str, ...]) -> Table:
        """Return the table that keeps the special tokens `kept`; a model's few tables are made once."""
        known = tuple(sorted({text for index in self.special_ids if (text := self.table.text[index]) in kept if text}))
        if not known:
            return self._skipping
        found = self._keeping.get(known)
        if found is None:
            if len(self._keeping) >= _MAX_KEPT_TABLES:
                self._keeping.clear()
            skipped = [index for index in self.special_ids if self.table.text[index] not in known]
            found = self._keeping[known] = self.table.without(skipped)
        return found
