"""Interface of a grammar (structured output) to the engine: states that tokens advance. No torch, no library names."""

from __future__ import annotations

from typing import Protocol


class GrammarError(Exception):
    """Error for an appended token that the grammar does not allow: no output is silently unconstrained."""


class GrammarState(Protocol):
    """Position of one sequence in its grammar.

    The engine thread advances it. The sampler's mask workers read it while the engine thread waits for the step, so
    the two never touch it at once.
    """

    @property
    def is_done(self) -> bool:
        """The output is complete and no token may follow: the sequence ends CONSTRAINT_DONE."""
        ...

    @property
    def is_free(self) -> bool:
        """Any token may follow: no mask is needed."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take one output token; False when the grammar does not allow it (the state is then unchanged).

        An end-of-sequence id is allowed where the output is complete, and changes nothing. Raises the PenstockError
        that ends the request when the state has failed (it outgrew its limits, or no token can follow).
        """
        ...

    @property
    def is_cut(self) -> bool:
        """The limit of tokens dictated the end of the output, which is whole: it counts as LENGTH."""
        ...

    def copy(self) -> GrammarState:
        """Return an independent state for a sequence that continues the same tokens."""
        ...


class Grammar(Protocol):
    """A compiled grammar: immutable, shared by requests."""

    def start(self, eos_token_ids: tuple[int, ...], max_tokens: int | None = None) -> GrammarState:
        """Return the state before the first output token of a request with these end-of-sequence ids, and with at most
        `max_tokens`."""
        ...
