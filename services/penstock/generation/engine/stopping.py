"""Stopping criteria of sequences. Text is matched as bytes, token by token: a stop string may lie across tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.generation.core.plugins import plugin_failed
from penstock.generation.core.request import FinishReason
from penstock.text.thoughts import Thought, ThoughtGate
from penstock.text.token_bytes import TextCursor, TokenBytes

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence


class StopStringAutomaton:
    """Aho-Corasick automaton over the UTF-8 of the stop strings. Immutable. A state is an int, 0 at the start.

    A scan costs O(bytes) amortised, for any number and length of the strings.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._goto: list[dict[int, int]] = [{}]
        self._fail = [0]
        # State -> index of the longest string that ends in it, -1: none.
        self._match = [-1]
        for index, text in enumerate(strings):
            self._insert(index, text.encode())
        self._link()

    def scan(self, state: int, data: bytes) -> tuple[int, int]:
        """Feed bytes. Return the new state and the string that ended first (of several the longest), or -1."""
        for byte in data:
            while state and byte not in self._goto[state]:
                state = self._fail[state]
            state = self._goto[state].get(byte, 0)
            if self._match[state] >= 0:
                return state, self._match[state]
        return state, -1

    def _insert(self, index: int, data: bytes) -> None:
        state = 0
        for byte in data:
            following = self._goto[state].get(byte)
            if following is None:
                following = len(self._goto)
                self._goto[state][byte] = following
                self._goto.append({})
                self._fail.append(0)
                self._match.append(-1)
            state = following
        if self._match[state] < 0:
            self._match[state] = index

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for byte, child in self._goto[state].items():
                fail = self._fail[state]
                while fail and byte not in self._goto[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._goto[fail].get(byte, 0)
                if self._match[child] < 0:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)


@dataclass(frozen=True, slots=True)
class Stop:
    """End of a sequence with its last token: the reason, and the id or string that caused it."""

    reason: FinishReason
    token_id: int | None = None
    string: str | None = None


@dataclass(slots=True)
class StopState:
    """State of the criteria for one sequence's text; a fork takes a copy."""

    cursor: TextCursor | None
    state: int = 0
    # True before the answer: no text stops it there.
    before: ThoughtState | None = None

    def copy(self) -> StopState:
        """Return an independent state for a sequence that continues the same text."""
        cursor = self.cursor.copy() if self.cursor is not None else None
        return StopState(cursor, self.state, self.before.copy() if self.before is not None else None)


@dataclass(slots=True)
class ThoughtState:
    """State of a sequence that may still be before its answer."""

    gate: ThoughtGate[bytes]
    # Over all tokens: markers may be tokens without text.
    cursor: TextCursor
    # Text that counts if no thought comes.
    held: bytes = b""

    def copy(self) -> ThoughtState:
        """Return an independent state for a sequence that continues the same text."""
        return ThoughtState(self.gate.copy(), self.cursor.copy(), self.held)

    def feed(self, token_id: int, text: bytes) -> bytes | None:
        """Take a token and the text that it adds. Return the text that begins the answer; None: it has not begun."""
        _, answer = self.gate.feed(self.cursor.feed(token_id))
        if answer is None:
            self.held = b"" if self.gate.has_thought else self.held + text
            return None
        return text[max(0, len(text) - len(answer)) :] if self.gate.has_thought else self.held + text


_LENGTH = Stop(FinishReason.LENGTH)
_DONE = Stop(FinishReason.CONSTRAINT_DONE)
_CRITERIA = Stop(FinishReason.STOP_CRITERIA)


def _is_cut(stop: Stop, grammar: GrammarState | None) -> bool:
    """True where the model ends an output that its limit of tokens has closed."""
    return stop.reason is FinishReason.STOP_EOS and grammar is not None and grammar.is_cut


class StopCriteria:
    """The criteria of one request, over generated tokens only: the prompt never takes part in a match.

    The text is the addition of the tokens to the prompt's text: a space at its beginning counts, and so does a
    character that they complete.

    In order: end-of-sequence id, stop ids, stop strings, a complete grammar, owners' criteria, length; the first that
    holds is the reason. As in transformers, `min_new_tokens` only keeps the sampler from drawing an end-of-sequence id.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_output_tokens: int,
        table: TokenBytes | None,
        context: SequenceOf[int] = (),
        thought: Thought | None = None,
    ) -> None:
        """The text continues that of `context`; stop strings do not count in a `thought` before it.

        Raises ValueError for stop strings without a `table`.
        """
        if params.stop_strings and table is None:
            raise ValueError("stop strings need a table of the tokens' bytes")
        self._eos = frozenset(params.ending_ids)
        self._max_output_tokens = max_output_tokens
        self._by_last_id: dict[int, list[tuple[int, ...]]] = {}
        for ids in params.stop_token_ids:
            self._by_last_id.setdefault(ids[-1], []).append(ids)
        self._strings = params.stop_strings
        self._automaton = StopStringAutomaton(params.stop_strings) if params.stop_strings else None
        self._start = StopState(None)
        if self._automaton is not None and table is not None:
            cursor = TextCursor(table, skip_special=params.skip_special_tokens)
            # A character that the prompt begins and the output completes belongs to the output.
            state, _ = self._automaton.scan(0, cursor.begin(context))
            self._start = StopState(cursor, state)
            if thought is not None:
                self._start.before = ThoughtState(thought.byte_gate(), TextCursor(table, skip_special=False))

    def new_state(self) -> StopState:
        """Return the state of a sequence with no output yet."""
        return self._start.copy()

    @property
    def max_output_tokens(self) -> int:
        """Most output tokens of a sequence that `max_new_tokens` and the context allow."""
        return self._max_output_tokens

    @property
    def num_eos(self) -> int:
        """Number of ids that end a sequence by themselves."""
        return len(self._eos)

    def check(self, sequence: Sequence, state: StopState) -> Stop | None:
        """Check the last token. Call it once after each appended output token. O(length of the token)."""
        token_ids = sequence.token_ids
        stop = self._by_ids(sequence, len(token_ids) - 1, token_ids[-1])
        if stop is not None:
            return _LENGTH if _is_cut(stop, sequence.grammar) else stop
        if self._automaton is not None and state.cursor is not None:
            stop = self._by_text(self._automaton, state.cursor, token_ids[-1], state)
            if stop is not None:
                return stop
        if sequence.grammar is not None and sequence.grammar.is_done:
            return _LENGTH if sequence.grammar.is_cut else _DONE
        if sequence.num_output_tokens >= self._max_output_tokens:
            return _LENGTH
        return None

    def check_candidate(self, sequence: Sequence, token_id: int, state: StopState) -> Stop | None:
        """Return what `check` would return if `token_id` came next. Changes neither the sequence nor its states."""
        stop = self._by_ids(sequence, len(sequence.token_ids), token_id)
        if stop is not None:
            return _LENGTH if _is_cut(stop, sequence.grammar) else stop
        if self._automaton is not None and state.cursor is not None:
            stop = self._by_text(self._automaton, state.cursor.copy(), token_id, state.copy())
            if stop is not None:
                return stop
        if sequence.grammar is not None:
            grammar = sequence.grammar.copy()
            if grammar.advance(token_id) and grammar.is_done:
                return _LENGTH if grammar.is_cut else _DONE
        if sequence.num_output_tokens + 1 >= self._max_output_tokens:
            return _LENGTH
        return None

    def _by_ids(self, sequence: Sequence, end: int, token_id: int) -> Stop | None:
        """Return the end that the id `token_id` causes after the first `end` tokens, if any."""
        if token_id in self._eos:
            return Stop(FinishReason.STOP_EOS, token_id=token_id)
        for ids in self._by_last_id.get(token_id, ()):
            first = end + 1 - len(ids)
            if first >= sequence.num_prompt_tokens and tuple(sequence.token_ids[first:end]) == ids[:-1]:
                return Stop(FinishReason.STOP_TOKEN, token_id=token_id)
        return None

    def _by_text(
        self, automaton: StopStringAutomaton, cursor: TextCursor, token_id: int, state: StopState
    ) -> Stop | None:
        text = cursor.feed(token_id)
        if state.before is not None:
            answer = state.before.feed(token_id, text)
            if answer is None:
                return None
            text, state.before = answer, None
        state.state, matched = automaton.scan(state.state, text)
        return None if matched < 0 else Stop(FinishReason.STOP_STRING, string=self._strings[matched])


class PluginStopCriteria(StopCriteria):
    """Criteria of a request with plugins of the server's owner."""

    def __init__(
        self,
        params: SamplingParams,
        max_output_tokens: int,
        table: TokenBytes | None,
        context: SequenceOf[int] = (),
        thought: Thought | None = None,
    ) -> None:
        super().__init__(params, max_output_tokens, table, context, thought)
        self._plugins = () if params.plugins is None else params.plugins.criteria

    @override
    def check(self, sequence: Sequence, state: StopState) -> Stop | None:
        """Raises Internal when a criterion of the owner fails."""
        return self._with_plugins(super().check(sequence, state), sequence.known_token_ids)

    @override
    def check_candidate(self, sequence: Sequence, token_id: int, state: StopState) -> Stop | None:
        """Raises Internal when a criterion of the owner fails."""
        stop = super().check_candidate(sequence, token_id, state)
        return self._with_plugins(stop, [*sequence.known_token_ids, token_id])

    def _with_plugins(self, stop: Stop | None, token_ids: list[int]) -> Stop | None:
        if stop is not None and stop is not _LENGTH:
            return stop
        for name, call in self._plugins:
            try:
                is_met = call(token_ids, None)
            except (Exception, SystemExit) as error:
                raise plugin_failed("config.stopping_criteria", name, error) from error
            if is_met:
                return _CRITERIA
        return stop


def stop_criteria(
    params: SamplingParams,
    max_output_tokens: int,
    table: TokenBytes | None,
    context: SequenceOf[int] = (),
    thought: Thought | None = None,
) -> StopCriteria:
    """Return a request's criteria from StopCriteria's arguments; the owner's are included only if it names some."""
    has_plugins = params.plugins is not None and bool(params.plugins.criteria)
    return (PluginStopCriteria if has_plugins else StopCriteria)(params, max_output_tokens, table, context, thought)
