"""What the engine needs of a grammar (structured output): states that tokens advance. No torch, no library names."""

from __future__ import annotations

from typing import Protocol


class GrammarError(Exception):
    """A token was appended that the grammar does not allow: an output is never silently unconstrained."""


class GrammarState(Protocol):
    """Where one sequence stands in its grammar. Advanced on the engine thread, read by the sampler's mask workers
    while the engine thread waits for the step; never both at once."""

    @property
    def is_done(self) -> bool:
        """The output is complete and no token may follow: the sequence ends CONSTRAINT_DONE."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take one output token; False when the grammar does not allow it (the state is then unchanged).

        An end-of-sequence id where the output is complete is allowed and changes nothing. Raises the PenstockError
        that the request ends with when the state has failed (it outgrew its limits, or no token can follow).
        """
        ...

    def copy(self) -> GrammarState:
        """For a sequence that goes on from the same tokens."""
        ...


class Grammar(Protocol):
    """A compiled grammar: immutable, shared by requests."""

    def start(self, eos_token_ids: tuple[int, ...]) -> GrammarState:
        """The state before the first output token of a request whose end-of-sequence ids are these."""
        ...
