"""Lexical constraints of constrained beam search, and the progress of a sequence in them.

They follow transformers 4.41.1's PhrasalConstraint, DisjunctiveConstraint and ConstraintListState (Anderson et al.
2017, Post and Vilar 2018): one constraint is in progress at a time, and a token that does not fit resets it to its
beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Token -> trie of the tokens that may follow; an empty one is the end of an alternative.
_Trie = dict[int, "_Trie"]


class Constraint:
    """Alternative token sequences; one of them must occur. A phrase is a constraint with one alternative. Immutable."""

    def __init__(self, alternatives: tuple[tuple[int, ...], ...]) -> None:
        self.height = max(map(len, alternatives))
        self._root: _Trie = {}
        for alternative in alternatives:
            level = self._root
            for token_id in alternative:
                level = level.setdefault(token_id, {})

    def following(self, path: tuple[int, ...]) -> _Trie:
        """Return the trie of tokens that may follow `path`, the beginning of an alternative."""
        level = self._root
        for token_id in path:
            level = level[token_id]
        return level


class _Active(NamedTuple):
    """The constraint in progress, and its tokens so far."""

    number: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one sequence in the constraints."""

    constraints: tuple[Constraint, ...]
    # Indices of constraints that have not begun, in the order of trial.
    pending: tuple[int, ...]
    active: _Active | None = None
    num_complete: int = 0

    @classmethod
    def start(cls, constraints: tuple[Constraint, ...]) -> Progress:
        """Return the progress of an empty sequence."""
        return cls(constraints, tuple(range(len(constraints))))

    @property
    def is_complete(self) -> bool:
        """True when every constraint is met."""
        return not self.pending and self.active is None

    @property
    def bank(self) -> int:
        """Measure of the progress; sequences are compared within their bank."""
        tallest = max(constraint.height for constraint in self.constraints)
        bank = self.num_complete * tallest
        if self.active is not None:
            # As in transformers: a constraint in progress counts in proportion to its missing tokens.
            bank += tallest - (self.constraints[self.active.number].height - len(self.active.path))
        return bank

    def add(self, token_id: int) -> Progress:
        """Return the progress with one more token."""
        if self.active is not None:
            return self._go_on(self.active, token_id)
        for place, index in enumerate(self.pending):
            if token_id in self.constraints[index].following(()):
                pending = self.pending[:place] + self.pending[place + 1 :]
                return self._reach(pending, _Active(index, (token_id,)))
        return self

    @property
    def advancing(self) -> tuple[int, ...]:
        """Tokens that would advance the sequence, each once; none when all constraints are met."""
        return tuple(dict.fromkeys(self._advancing()))

    def advances(self) -> Iterator[tuple[int, Progress]]:
        """Yield each advancing token, and its progress as transformers counts it.

        That is `add` of the token, except in an alternative that branches while it is in progress. There copies of
        transformers' state share their list of tokens, so that a later branch is appended to an earlier one and does
        not count as progress.
        """
        if self.active is None:
            for token_id in self._advancing():
                yield token_id, self.add(token_id)
            return
        active = self.active
        for token_id in self._advancing():
            going = token_id in self.constraints[active.number].following(active.path)
            yield token_id, self._go_on(active, token_id)
            if going:
                active = _Active(active.number, (*active.path, token_id))

    def _advancing(self) -> list[int]:
        if self.active is not None:
            return list(self.constraints[self.active.number].following(self.active.path))
        return [token_id for index in self.pending for token_id in self.constraints[index].following(())]

    def _go_on(self, active: _Active, token_id: int) -> Progress:
        if token_id in self.constraints[active.number].following(active.path):
            return self._reach(self.pending, _Active(active.number, (*active.path, token_id)))
        return Progress(self.constraints, (*self.pending, active.number), None, self.num_complete)

    def _reach(self, pending: tuple[int, ...], active: _Active) -> Progress:
        if self.constraints[active.number].following(active.path):
            return Progress(self.constraints, pending, active, self.num_complete)
        return Progress(self.constraints, pending, None, self.num_complete + 1)
