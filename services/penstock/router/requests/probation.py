"""Probation: a request that may be to blame for a backend's crash runs on, apart from others that may be.

A stream passes by tokens, a call with a single answer by that. One that passed is cleared of the crashes that it was
on probation for as soon as it matters, when it is lost again: unless it was alone on its backend, since a process may
crash in company only, or has just come as far as it was when it was lost before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from penstock.router.requests.request_state import RequestState
from penstock.router.requests.suspect import Suspect

# Tokens that may have been on their way when a backend crashed: so exactly is it known how far an attempt had come.
_ON_THEIR_WAY = 3


class Probation(ABC):
    """Probation of a suspect with its next attempt. Implements SuspectProbation."""

    # True where nobody need be beside it for its pass to clear it.
    clears_alone: ClassVar[bool] = False

    def __init__(self, suspect: Suspect, begun_at: float) -> None:
        """Begin it. `begun_at` is a time of time.monotonic()."""
        self.suspect = suspect
        # Those that it is on probation for: what comes after it passed is another matter.
        self.crashes = tuple(suspect.crashes)
        self.begun_at = begun_at
        # True once others were seen beside it on its backend.
        self.had_company = False
        suspect.probation = self

    @property
    @abstractmethod
    def has_passed(self) -> bool:
        """True once it has gone on for long enough, or to its end."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True once it has passed, was given up, or was lost again."""

    @property
    @abstractmethod
    def clears(self) -> bool:
        """True when it has passed, and what it did since is no reason to suspect it of its crashes."""


class StreamProbation(Probation):
    """Probation of a stream, which passes by tokens."""

    def __init__(self, state: RequestState, most_tokens: int, begun_at: float) -> None:
        """Begin it. It is passed by a token more than its longest attempt had, or by `most_tokens` where that was much
        longer."""
        super().__init__(state.suspect, begun_at)
        self._state = state
        self._attempt = state.attempts
        self._lost_after = state.suspect.longest_attempt
        self._begin = state.num_tokens
        # One that is near to where it was lost goes past it: else its pass would prove nothing.
        is_near = self._lost_after <= most_tokens + 2 * _ON_THEIR_WAY
        self._needed = self._lost_after + 1 if is_near else most_tokens

    @property
    def has_passed(self) -> bool:
        return self._made >= self._needed or self._state.finished is not None

    @property
    def is_over(self) -> bool:
        state = self._state
        is_lost = state.attempts > self._attempt and state.attempt is None
        return self.has_passed or state.closed or is_lost or state.attempts > self._attempt + 1

    @property
    def clears(self) -> bool:
        is_at_its_point = self._lost_after - _ON_THEIR_WAY <= self._made <= self._lost_after
        return self.has_passed and self.had_company and not is_at_its_point

    @property
    def _made(self) -> int:
        return self._state.num_tokens - self._begin


class CallProbation(Probation):
    """Probation of a call with a single answer, which passes by that."""

    clears_alone = True

    def __init__(self, suspect: Suspect, begun_at: float) -> None:
        """Begin it. Whoever makes the call notes what becomes of it."""
        super().__init__(suspect, begun_at)
        self._is_over = self._has_passed = False

    def end(self, *, has_passed: bool) -> None:
        """Note the call's end."""
        self._is_over, self._has_passed = True, has_passed

    @property
    def has_passed(self) -> bool:
        return self._has_passed

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def clears(self) -> bool:
        return self._has_passed
