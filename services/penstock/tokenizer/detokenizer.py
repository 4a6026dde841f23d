"""Decoding a few ids at a time, for any tokenizer: by the decoder's table if it has one (penstock.text.detokenizer),
else by running the decoder again over a short window of ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from penstock.text.detokenizer import REPLACEMENT, DecodeTable, Detokenizer
from penstock.tokenizer.decoder_plan import plan_of


class WindowDetokenizer:
    """Detokenizer that decodes a window of ids before and after each step; the difference is the new text."""

    __slots__ = ("_decode", "_emitted", "_ids", "_limit", "_read", "_start")

    def __init__(self, decode: Callable[[list[int]], str], limit: int) -> None:
        self._decode = decode
        self._limit = limit
        self._ids: list[int] = []
        # Text of _ids[_start:_read] was returned; it is decoded again because later text depends on it.
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
    """Detokenizer with transformers' clean-up of spaces before punctuation, on text that comes in portions.

    Every space that it removes opens one of its patterns, and only " ' " ends in one. So text can be cut for the
    clean-up before any space that follows neither a space nor an apostrophe.
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
    """Maker of the detokenizers of one tokenizer; tables are built once."""

    def __init__(
        self, tokenizer: Tokenizer, *, id_limit: int, special_ids: Sequence[int], clean_up: Callable[[str], str] | None
    ) -> None:
        """Make it. `clean_up` is applied to decoded text where transformers would apply it."""
        self._tokenizer = tokenizer
        self._id_limit = id_limit
        self._clean_up = clean_up
        plan = plan_of(json.loads(tokenizer.to_str())["decoder"])
        self._table = None if plan is None else plan.table(tokenizer, id_limit, special_ids)

    @property
    def kind(self) -> str:
        """Kind of decoding: "byte_level", "byte_fallback" or "window"."""
        return "window" if self._table is None else self._table.kind

    @property
    def table(self) -> DecodeTable | None:
        """Table of the whole decoder; None when it is no table."""
        return self._table if self._clean_up is None else None

    def make(self, skip_special_tokens: bool) -> Detokenizer:
        """Make a detokenizer for one sequence."""
        plain = self._make_plain(skip_special_tokens)
        return plain if self._clean_up is None else CleanedUpDetokenizer(plain, self._clean_up)

    def _make_plain(self, skip_special_tokens: bool) -> Detokenizer:
        if self._table is not None:
            return self._table.make(skip_special_tokens)
        tokenizer = self._tokenizer
        return WindowDetokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), self._id_limit
        )
