"""Grammar of tool calls within an answer that is free otherwise (core.grammar.Grammar): it holds from a marker on.

Before a marker nothing is masked: a token costs one look into a set. Calls in a thought are drafts, and stay free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from penstock.common.errors import PenstockError
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer
from penstock.generation.grammar.matcher_state import CompiledGrammar, MatcherState

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLMatcher

    from penstock.text.thoughts import Thought, ThoughtGate


class CallMarkers:
    """Search for markers in the tokens of an output. Immutable."""

    def __init__(self, opens: Seq[str], tokenizer: GrammarTokenizer) -> None:
        """O(vocabulary)."""
        self.tokenizer = tokenizer
        self._opens = tuple(one.encode() for one in opens)
        # A token that ends a marker has its last byte. The latest tokens hold the others: each has a byte at least.
        self.watched = frozenset(tokenizer.keys.ids_with(sorted({one[-1] for one in self._opens})))
        self.longest = max(map(len, self._opens))

    def begun(self, tokens: Seq[int]) -> list[int] | None:
        """Return the tokens of a marker that the last one of `tokens` ends, and of what it has behind it; None: it ends
        none. Other tokens may spell the same bytes where a token has text before the marker."""
        texts: list[bytes] = []
        length = 0
        # The last token may have bytes before and behind the marker's last one: the marker begins in one of these.
        for token_id in reversed(tokens):
            texts.append(self.tokenizer.keys.bytes_of(token_id))
            length += len(texts[-1])
            if length - len(texts[0]) >= self.longest:
                break
        texts.reverse()
        tokens = tokens[len(tokens) - len(texts) :]
        data, before = b"".join(texts), length - len(texts[-1])
        places = (data.find(one, max(0, before - len(one) + 1)) for one in self._opens)
        found = [place for place in places if place >= 0]
        if not found:
            return None
        place = min(found)
        for number, text in enumerate(texts):
            if place == 0:
                return list(tokens[number:])
            if place < len(text):
                break
            place -= len(text)
        try:
            rest = b"".join([text[place:], *texts[number + 1 :]]).decode()
        except UnicodeDecodeError:
            return None
        return list(self.tokenizer.native.greedy_tokenize(rest))


class CallHolder:
    """A compiled grammar of calls (core.grammar.Grammar), for all answers of a request."""

    def __init__(
        self, compiled: CompiledGrammar, markers: CallMarkers, thought: Thought | None, *, ends_itself: bool = False
    ) -> None:
        self._compiled, self._markers, self._thought = compiled, markers, thought
        self._ends_itself = ends_itself

    def start(self, eos_token_ids: tuple[int, ...], max_tokens: int | None = None) -> HeldCalls:
        """Return the state of an output that has not begun."""
        gate = None if self._thought is None else self._thought.byte_gate()
        eos = () if self._ends_itself else eos_token_ids
        return HeldCalls(self._compiled, self._markers, eos, gate, max_tokens)

    def ending_itself(self) -> CallHolder:
        """Return the grammar for a request that ignores end-of-sequence ids."""
        return CallHolder(self._compiled, self._markers, self._thought, ends_itself=True)


class HeldCalls:
    """State of one output (core.grammar.GrammarState)."""

    __slots__ = ("_call", "_compiled", "_eos", "_gate", "_latest", "_left", "_markers", "is_cut")

    def __init__(
        self,
        compiled: CompiledGrammar,
        markers: CallMarkers,
        eos: tuple[int, ...],
        gate: ThoughtGate[bytes] | None,
        max_tokens: int | None = None,
        latest: deque[int] | None = None,
        call: MatcherState | None = None,
    ) -> None:
        self._compiled, self._markers, self._eos, self._gate = compiled, markers, eos, gate
        self._latest: deque[int] = deque(maxlen=markers.longest) if latest is None else latest
        # The call that is being written.
        self._call = call
        # Tokens left to the output; None: any number.
        self._left = max_tokens
        # The limit of tokens dictated the end of a call.
        self.is_cut = False

    @property
    def is_free(self) -> bool:
        """True outside calls: any token may follow."""
        return self._call is None

    @property
    def is_done(self) -> bool:
        """False: text may follow each call."""
        return False

    @property
    def matcher(self) -> LLMatcher:
        """Matcher of the call that is being written."""
        assert self._call is not None
        return self._call.matcher

    def finish_mask(self, row: npt.NDArray[np.uint32]) -> None:
        """As MatcherState's."""
        assert self._call is not None
        self._call.finish_mask(row)

    def copy(self) -> HeldCalls:
        """Return an independent state."""
        gate = None if self._gate is None else self._gate.copy()
        call = None if self._call is None else self._call.copy()
        twin = HeldCalls(self._compiled, self._markers, self._eos, gate, self._left, self._latest.copy(), call)
        twin.is_cut = self.is_cut
        return twin

    def advance(self, token_id: int) -> bool:
        """The call goes on as free text where the grammar fails: the caller loses no answer."""
        if self._call is not None:
            is_taken = self._advance_call(self._call, token_id)
            self._count(is_taken)
            return is_taken
        self._count()
        if self._gate is not None:
            self._in_thought(self._gate, token_id)
            return True
        self._latest.append(token_id)
        self._look(token_id)
        return True

    def _count(self, is_taken: bool = True) -> None:
        if self._left is not None and is_taken:
            self._left -= 1

    def _advance_call(self, call: MatcherState, token_id: int) -> bool:
        try:
            if not call.advance(token_id):
                return False
        except PenstockError:
            self._call = None
            return True
        self.is_cut = self.is_cut or call.is_cut
        if call.is_done or token_id in self._eos:
            self._call = None
        return True

    def _in_thought(self, gate: ThoughtGate[bytes], token_id: int) -> None:
        _, answer = gate.feed(self._markers.tokenizer.keys.bytes_of(token_id))
        if gate.has_thought:
            self._latest.clear()
        else:
            # A marker may begin as a thought does.
            self._latest.append(token_id)
        if answer is None:
            return
        self._gate = None
        if not gate.has_thought:
            self._look(token_id)

    def _look(self, token_id: int) -> None:
        """Begin a call where the latest token ends a marker."""
        if token_id in self._markers.watched and token_id not in self._eos:
            tokens = self._markers.begun(tuple(self._latest))
            if tokens is not None:
                self._begin(tokens)

    def _begin(self, tokens: list[int]) -> None:
        call = self._compiled.start(self._eos, None if self._left is None else self._left + len(tokens))
        self._latest.clear()
        if all(call.advance(token_id) for token_id in tokens) and not call.is_done:
            self._call = call
