"""Search for a short end of a constrained output: tokens that complete it from where it is.

It is a walk that prefers what closes: the ends of texts that the grammar names, quotes and brackets, the shortest
values, and otherwise the longest token. The grammar takes its result, which need not be the shortest end.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SUFFIX = re.compile(rf"\[suffix=({_QUOTED})\]|^TEXT_[0-9]+: .*?\) ({_QUOTED})\) & ", re.MULTILINE)
_START = re.compile(r"^start:(.*)$", re.MULTILINE)
_TOKEN = re.compile(r"<\[([0-9]+)\]>")
_TERM = re.compile(rf"<\[([0-9]+)\]>|({_QUOTED})")
# Start of a group that may be left out.
_FURTHER = re.compile(rf'\((?:<\[[0-9]+\]>|{_QUOTED})((?:{_QUOTED}|[^()"])*\)(?:\{{0,[0-9]*\}}|[*?]))')
_BRACKETS = ("}}}", "}}", "}]", "]}", "}", "]")
# Ends of base64 behind one, two or three characters of a group.
_PADDINGS = ('="', '=="', 'A=="')
_JOINTS = (":", "@", ".", "-", "/")
# A character that begins nothing: it may follow within a text alone.
_FILLER = "~"
# What stands between parts.
_SEPARATOR = ","
# Longest end that is searched for, and most masks for it: the engine's thread searches, too.
_MOST_TOKENS, _MOST_MASKS = 512, 256
# Longest search from the start of an output, by the fastest of some: of a grammar with slower ones no ends are known.
_MOST_SECONDS, _TRIES = 0.05, 3
_VALUES = ("null", "0", '""', "[]", "{}", "true")


class ShortEnds:
    """Search in one grammar. Immutable."""

    def __init__(self, tokenizer: GrammarTokenizer, matcher: LLMatcher, *larks: str) -> None:
        """`matcher`: of an output that has not begun. `larks`: the grammar's text, or its parts."""
        self._tokenizer = tokenizer
        self.plain_W = tokenizer.plain.words_W
        text = "\n".join(larks)
        ends = [json.loads(one or other) for one, other in _SUFFIX.findall(text)]
        # A schema's words are no terms.
        starts = [found[1].partition("%json")[0] for found in _START.finditer(text)]
        # Nor is what begins a further call.
        starts = [_FURTHER.sub(r"(\1", one) for one in starts]
        outer = [int(one) for start in starts for one in reversed(_TOKEN.findall(start))]
        # The last tokens of a rule end what its first ones begin.
        tokens = [*outer, *(int(one) for one in reversed(_TOKEN.findall(text)))]
        spell = tokenizer.native.greedy_tokenize
        self._ends = [spell(one) for one in dict.fromkeys(ends)] + [[one] for one in dict.fromkeys(tokens)]
        self._brackets = [spell(one) for one in _BRACKETS]
        self._quote, self._filler, self._separator = spell('"'), spell(_FILLER), spell(_SEPARATOR)
        # Terms of the whole, the last ones first.
        terms = dict.fromkeys(one for start in starts for one in reversed(_TERM.findall(start)))
        self._outer = [[int(token)] if token else spell(json.loads(literal)) for token, literal in terms]
        self._joints = [spell(one) for one in _JOINTS]
        self._values = [spell(one) for one in _VALUES]
        paddings = [spell(one) for one in _PADDINGS]
        self._outside = [*self._ends, *self._brackets, self._quote, *paddings, *self._values]
        # Tokens of a short output; None: none is known.
        self.shortest: int | None = None
        # The first search computes states of the lexer, and other processes may slow it down.
        for _ in range(_TRIES):
            started = time.thread_time()
            shortest = self.find(matcher, _MOST_TOKENS)
            if shortest is None:
                # Nor would another search find one.
                break
            if time.thread_time() - started <= _MOST_SECONDS:
                self.shortest = len(shortest)
                break

    def find(self, matcher: LLMatcher, most: int) -> tuple[int, ...] | None:
        """Return tokens that complete the output, none where it is complete; None: no end of up to `most` tokens."""
        walk, found, masks = matcher.deep_copy(), list[int](), 0
        last, word = list[int](), list[int]()
        while not walk.is_accepting():
            last = self._step(walk, last)
            if not last and masks < _MOST_MASKS:
                masks += 1
                last = word = self._longest(walk, word)
            if not last or len(found) + len(last) > min(most, _MOST_TOKENS):
                return None
            found += last
        return tuple(found)

    def ends_a_part(self, token_id: int, matcher: LLMatcher) -> bool:
        """True where a token that comes next ends a list or an object to which a further part might be added."""
        if self._tokenizer.keys.bytes_of(token_id).lstrip().startswith(_SEPARATOR.encode()):
            return False
        return bool(
            matcher.validate_tokens(self._separator) == len(self._separator)
            and matcher.validate_tokens(self._filler) < len(self._filler)
        )

    def _step(self, walk: LLMatcher, last: list[int]) -> list[int]:
        """Take tokens that close; none: there are no such."""
        is_text = walk.validate_tokens(self._filler) == len(self._filler)
        # What ends the whole, before its first character is taken alone: other parts may begin with it.
        for tokens in () if is_text else self._outer:
            if walk.validate_tokens(tokens) == len(tokens):
                walk.try_consume_tokens(tokens)
                return tokens
        # Brackets and values are text within a text.
        for tokens in (*self._ends, self._quote) if is_text else self._outside:
            # An end within another text says nothing, nor does a value: neither is taken twice in a row.
            is_new = tokens != last and not (tokens in self._values and last in self._values)
            is_new = is_new or tokens is self._quote or tokens in self._brackets
            if is_new and walk.validate_tokens(tokens) == len(tokens):
                walk.try_consume_tokens(tokens)
                return tokens
        return []

    def _longest(self, walk: LLMatcher, word: list[int]) -> list[int]:
        """Take the allowed token that goes furthest, after `word` what joins words; none where nothing may follow."""
        # llguidance's forced text would do, but asking for it may end in a panic (1.9.1: has_pending_lexeme_bytes).
        best = self._tokenizer.plain.furthest(np.frombuffer(walk.compute_bitmask(), dtype=np.uint32))
        if word == [best]:
            # An address has words and signs in turns.
            for tokens in self._joints:
                if walk.validate_tokens(tokens) == len(tokens):
                    walk.try_consume_tokens(tokens)
                    return tokens
        return [best] if best is not None and walk.try_consume_tokens([best]) == 1 else []
