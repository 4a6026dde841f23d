"""Number of drafts that a draft head makes for one sequence: as many as pay, by their acceptance and their costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.core.request import VerificationCosts

# Drafts that were right, and that were looked at, before there was any; and what is left of both numbers after each
# further verification, so that the last ten or so count.
_FIRST_RIGHT, _FIRST_LOOKED_AT, _KEPT = 3.0, 4.0, 0.9
# No estimate is so sure that it never ends.
_MOST_ACCEPTANCE = 0.97
# Opportunities of the first and of the longest pause while no draft pays; then a single one is tried.
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128
# Opportunities to leave out while the time of a step without drafts is unknown, and verifications after which two are
# left out, to measure it again: the context has grown. The first step after drafts counts for them.
_MOST_MEASURED, _MEASURED_EVERY, _MEASURED_STEPS = 3, 128, 2


class DraftLength:
    """Length of one sequence's chains of drafts.

    A chain of n drafts gives 1 + a + ... + a^n tokens where each is right with probability a if all before it were, and
    takes the time of a step, of n drafts and of their verification. The length is the one with the most tokens in a
    time. In a large batch rows are dear, and chains short.

    While drafts would not pay even if all were right, the head `rests`: it reads none of the sequence's rows. When it
    begins again it knows no earlier ones.
    """

    __slots__ = (
        "_costs",
        "_is_trial",
        "_left_out",
        "_looked_at",
        "_num_measured",
        "_num_verified",
        "_pause",
        "_right",
        "rests",
    )

    def __init__(self, costs: VerificationCosts, most: int) -> None:
        """`most`: drafts that a chain ever has."""
        self._costs = costs
        self._right, self._looked_at = _FIRST_RIGHT, _FIRST_LOOKED_AT
        # Opportunities still to leave out, and the length of the last pause.
        self._left_out = self._pause = 0
        self._num_measured = self._num_verified = 0
        self.rests = costs.is_known and not self._best(most, _MOST_ACCEPTANCE)
        # The head reads again, for one draft.
        self._is_trial = False

    def affordable(self, most: int) -> int:
        """Return the number of drafts to make now, at most `most`; 0: none. Call it once per opportunity."""
        if self._left_out:
            self._left_out -= 1
            return 0
        if not self._costs.is_known and self._num_measured < _MOST_MEASURED:
            self._num_measured += 1
            return 0
        if self._is_trial:
            self._is_trial, self.rests, self._left_out = False, True, _FIRST_PAUSE
            return min(most, 1)
        number = self._best(most, min(self._right / self._looked_at, _MOST_ACCEPTANCE))
        if number:
            self._pause, self.rests = 0, False
            return number
        if not self._best(most, _MOST_ACCEPTANCE):
            # Drafts that are right would not pay either: no sequence need find that out for itself.
            self._is_trial = self._costs.retries()
            self.rests = not self._is_trial
            self._left_out = _FIRST_PAUSE if self.rests else 0
            return 0
        self.rests = False
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) or _FIRST_PAUSE
        self._left_out = self._pause
        return min(most, 1)

    def note(self, num_drafts: int, accepted: int) -> None:
        """Take a verification."""
        self._right = _KEPT * self._right + accepted
        self._looked_at = _KEPT * self._looked_at + accepted + (accepted < num_drafts)
        self._num_verified += 1
        if self._num_verified % _MEASURED_EVERY == 0:
            self._left_out = max(self._left_out, _MEASURED_STEPS)

    def _best(self, most: int, acceptance: float) -> int:
        """Return the number of drafts with the most tokens in a time; 0: a step without drafts has as many."""
        best, best_pace, tokens, share = 0, 1.0, 1.0, 1.0
        for number in range(1, most + 1):
            share *= acceptance
            tokens += share
            pace = tokens / (1.0 + self._costs.of(number) + self._costs.of_drafting(number))
            if pace > best_pace:
                best, best_pace = number, pace
        return best
