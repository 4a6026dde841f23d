"""Position of one sequence in its grammar (core.grammar.GrammarState over an llguidance matcher)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from penstock.common.errors import Internal, InvalidArgument, PenstockError
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer, words_of
from penstock.generation.grammar.matching import is_too_complex
from penstock.generation.grammar.short_ends import ShortEnds
from penstock.generation.grammar.token_room import TokenRoom
from penstock.generation.grammar.written_keys import WrittenKeys

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.text.thoughts import Thought


class CompiledGrammar:
    """A grammar at the start of an output (core.grammar.Grammar)."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: GrammarTokenizer,
        field: str,
        *,
        ends_itself: bool = False,
        written: WrittenKeys | None = None,
        ends: ShortEnds | None = None,
        thought: Thought | None = None,
        begins_free: bool = False,
    ) -> None:
        """`matcher` is without error and never advanced. Errors name `field`. `written`: the start of an output that is
        JSON. `ends`: search for short ends; None: a limit of tokens cuts an output in its middle. `thought`: before the
        answer, which alone is ended within such a limit. `begins_free`: such a limit never dictates the first token."""
        self._field = field
        self._ends_itself = ends_itself
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._written = written
        self._ends, self._thought, self._begins_free = ends, thought, begins_free

    def start(self, eos_token_ids: tuple[int, ...], max_tokens: int | None = None) -> MatcherState:
        """Return the state of an output that these ids end; without ids only the grammar ends it.

        An output of at most `max_tokens` ends before them where a short end is known.
        """
        eos = () if self._ends_itself else eos_token_ids
        written = None if self._written is None else self._written.copy()
        room = None
        if self._ends is not None and max_tokens is not None:
            room = TokenRoom(self._ends, max_tokens, None if self._thought is None else self._thought.byte_gate())
            if not self._begins_free:
                room.begin(self._matcher)
        return MatcherState(self._matcher.deep_copy(), self._tokenizer, eos, self._field, written, room)

    def ending_itself(self) -> CompiledGrammar:
        """Return the grammar for a request that ignores end-of-sequence ids: they are plain text, or not allowed."""
        made = CompiledGrammar(self._matcher, self._tokenizer, self._field, ends_itself=True, written=self._written)
        made._ends, made._thought, made._begins_free = self._ends, self._thought, self._begins_free
        return made

    def cut_by_limit(self) -> CompiledGrammar:
        """Return the grammar for a request that its limit of tokens cuts, wherever its output is."""
        return CompiledGrammar(
            self._matcher, self._tokenizer, self._field, ends_itself=self._ends_itself, written=self._written
        )


class MatcherState:
    """GrammarState of one output.

    An end-of-sequence id is allowed where the output is complete and nowhere else, even if the grammar would take its
    text: it ends the sequence.
    """

    __slots__ = ("_eos", "_failure", "_field", "_room", "_tokenizer", "_written", "is_done", "matcher")

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: GrammarTokenizer,
        eos: tuple[int, ...],
        field: str,
        written: WrittenKeys | None = None,
        room: TokenRoom | None = None,
    ) -> None:
        self.matcher = matcher
        self.is_done = matcher.is_stopped()
        self._tokenizer = tokenizer
        self._eos = eos
        self._field = field
        self._written = written
        self._room = room
        self._failure: PenstockError | None = None

    @property
    def is_free(self) -> bool:
        """False: only what the grammar allows may follow."""
        return False

    @property
    def is_cut(self) -> bool:
        """True where the limit of tokens dictated the end."""
        return self._room is not None and self._room.is_cut

    def advance(self, token_id: int) -> bool:
        """Raises the PenstockError that ends the request when the matcher has failed."""
        if self._failure is not None:
            raise self._failure
        if token_id in self._eos:
            return self.matcher.is_accepting()
        if self.is_done or token_id >= self._tokenizer.vocab_size:
            return False
        if self._room is not None:
            self._room.before(token_id, self.matcher)
        taken = self.matcher.try_consume_tokens([token_id]) == 1
        if self.matcher.is_error():
            raise self._fail()
        if taken:
            self.is_done = self.matcher.is_stopped()
            if self._written is not None:
                self._written.feed(self._tokenizer.keys.bytes_of(token_id))
            if self._room is not None:
                self._room.after(token_id, self._tokenizer.keys, self.matcher)
        return taken

    def copy(self) -> MatcherState:
        """Return an independent state that shares the lexer's computed states."""
        written = None if self._written is None else self._written.copy()
        room = None if self._room is None else self._room.copy()
        twin = MatcherState(self.matcher.deep_copy(), self._tokenizer, self._eos, self._field, written, room)
        twin._failure = self._failure
        return twin

    def finish_mask(self, row: npt.NDArray[np.uint32]) -> None:
        """Turn llguidance's mask in place into one bit per id that may follow (id i: bit i % 32 of word i // 32).

        End-of-sequence ids may follow where the output is complete, and nowhere else.

        After a failure every token is allowed: the next `advance` raises, so none of them is ever emitted.
        """
        word, bit = divmod(self._tokenizer.vocab_size, 32)
        complete = False
        if int(row[word]) >> bit & 1:
            # This bit is also set once llguidance has failed.
            if self.matcher.is_error():
                self._fail()
                row.fill(0xFFFFFFFF)
                return
            complete = self.matcher.is_accepting()
            row[word] &= ~(1 << bit) & 0xFFFFFFFF
        for token_id in self._eos:
            word, bit = divmod(token_id, 32)
            if complete:
                row[word] |= 1 << bit
            else:
                row[word] &= ~(1 << bit) & 0xFFFFFFFF
        if self._written is not None:
            self._tokenizer.keys.restrict(row, self._written)
        if self._room is not None and self._room.is_tight:
            self._room.restrict(row, self._eos)
        if (self._eos or complete) and not row.any():
            self._failure = InvalidArgument(
                self._field,
                "leaves no token to go on with: nothing may end the output, or the vocabulary cannot spell it",
                reason="CONSTRAINT_DEAD_END",
            )
            row.fill(0xFFFFFFFF)

    def _fail(self) -> PenstockError:
        if is_too_complex(self.matcher):
            self._failure = InvalidArgument(
                self._field, "became too complex while the output grew", reason="CONSTRAINT_TOO_COMPLEX"
            )
        else:
            self._failure = Internal("the output left its constraint", reason="CONSTRAINT_FAILED")
        return self._failure


class MaskWorkers:
    """Threads that fill rows of a mask array (runner.grammar_masks.MaskFiller). They start with the first call."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        # llguidance's masks include the end of output.
        self.num_words = words_of(vocab_size + 1)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def fill(self, states: Seq[GrammarState], words_RW: npt.NDArray[np.int32]) -> None:
        """Write the mask of state i into row i; `words_RW` has `num_words` columns.

        Releases the GIL while it computes. No two calls may run at once. All states are MatcherStates, or HeldCalls
        within a call.
        """
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        own = cast("Seq[MatcherState]", states)
        rows, width = words_RW.shape
        self._executor.unsafe_compute_mask_ptr(
            [(state.matcher, row) for row, state in enumerate(own)], words_RW.ctypes.data, width * 4, rows
        )
        for state, row_W in zip(own, words_RW.view(np.uint32), strict=False):
            state.finish_mask(row_W)
