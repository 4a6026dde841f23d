"""Tokens that are left to a constrained output, and the end that must fit in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher

    from penstock.generation.grammar.short_ends import ShortEnds
    from penstock.generation.grammar.written_keys import KeyTokens
    from penstock.text.thoughts import ThoughtGate

# Tokens before the last moment from which no new part begins, or as many as the shortest output has: a further call may
# take these. At most a share of the limit.
_EARLY, _SHARE = 32, 4
# Where no end was found, the next search is behind this share of what is left, down to a few tokens.
_RETRY, _FEWEST = 16, 8
# The last moment: one token is for the end of the sequence.
_LAST = 1


class TokenRoom:
    """Room of one output. A pure function of the tokens so far: drafts and restarts come to the same.

    While there is room enough, a token costs a subtraction. The search for an end runs when half of the room is used,
    then half of the rest, and so on. When little is left, only words and the end's own tokens may follow; at last only
    the end's.
    """

    __slots__ = ("_check_at", "_early", "_ends", "_gate", "_is_lost", "_left", "_path", "_spare", "is_cut")

    def __init__(self, ends: ShortEnds, max_tokens: int, gate: ThoughtGate[bytes] | None = None) -> None:
        """`max_tokens`: of the output. `gate`: reader of the thought before the answer, which is not cut short."""
        self._ends, self._gate = ends, gate
        self._left = max_tokens
        self._early = min(max(_EARLY, ends.shortest or 0), max_tokens // _SHARE)
        self._check_at = max_tokens
        # The end, while little room is left; None: there is enough, or no end fits.
        self._path: tuple[int, ...] | None = None
        # Tokens that stay free behind the end: a token of a text in groups, such as base64, makes the end longer.
        self._spare = _LAST
        self._is_lost = False
        # The limit dictated the end, or that no further part began.
        self.is_cut = False
        self._settle(ends.shortest)

    def copy(self) -> TokenRoom:
        """Return an independent room."""
        twin = TokenRoom.__new__(TokenRoom)
        twin._ends, twin._left, twin._early = self._ends, self._left, self._early
        twin._gate = None if self._gate is None else self._gate.copy()
        twin._check_at, twin._path, twin._is_lost, twin.is_cut = self._check_at, self._path, self._is_lost, self.is_cut
        twin._spare = self._spare
        return twin

    @property
    def is_tight(self) -> bool:
        """True where the mask is narrower than the grammar's."""
        return self._path is not None

    @property
    def _is_last_moment(self) -> bool:
        return bool(self._path) and self._left - len(self._path or ()) <= self._spare

    def begin(self, matcher: LLMatcher) -> None:
        """Search for an end before the first token where there is little room from the start."""
        if self._gate is None and self._left <= self._check_at and not self._is_lost:
            self._look(matcher)

    def before(self, token_id: int, matcher: LLMatcher) -> None:
        """Note the end of a list or an object that has no room for a further part. `matcher` has not taken the token.

        Nobody knows if the model would have begun one: the output counts as shortened.
        """
        path = self._path
        if path and path[0] == token_id and not self.is_cut:
            self.is_cut = self._ends.ends_a_part(token_id, matcher)

    def after(self, token_id: int, keys: KeyTokens, matcher: LLMatcher) -> None:
        """Take a token that the grammar took."""
        self.is_cut = self.is_cut or self._is_last_moment
        self._left -= 1
        if self._gate is not None:
            if self._gate.feed(keys.bytes_of(token_id))[1] is not None:
                self._gate = None
            return
        if self._path is not None:
            if self._path and self._path[0] == token_id:
                self._path = self._path[1:]
            elif not self._path or matcher.validate_tokens(list(self._path)) != len(self._path):
                self._look(matcher)
            if self._path is not None and self._path and len(self._path) > self._left:
                self._look(matcher)
        elif self._left <= self._check_at and not self._is_lost:
            self._look(matcher)

    def _look(self, matcher: LLMatcher) -> None:
        """Search for the end, and settle when to search again."""
        path = self._ends.find(matcher, self._left)
        if path and self._path:
            self._spare = max(self._spare, len(path) - len(self._path) + _LAST)
        self._settle(None if path is None else len(path))
        is_tight = path is not None and self._left - len(path) <= self._early
        self._path = path if is_tight else None

    def _settle(self, length: int | None) -> None:
        """Settle when to search again, by the length of a present end."""
        if length is None or length > self._left:
            # No end is found: from another place one may be. Else the output is cut, as if nobody had looked.
            self._is_lost = self._left < _FEWEST or self._ends.shortest is None or self._ends.shortest > self._left
            self._check_at = self._left - max(1, self._left // _RETRY)
            return
        self._check_at = self._left - max(0, self._left - length - self._early) // 2

    def restrict(self, row_W: npt.NDArray[np.uint32], eos: tuple[int, ...]) -> None:
        """Clear the bits of tokens that begin what may not fit. Where nothing else is left, nothing is cleared."""
        path = self._path
        if path is None:
            return
        kept_W = row_W & self._ends.plain_W
        if self._is_last_moment:
            kept_W[:] = 0
        for token_id in (*path[:1], *(() if path else eos)):
            word, bit = divmod(token_id, 32)
            kept_W[word] |= row_W[word] & (1 << bit)
        if kept_W.any():
            row_W[:] = kept_W
