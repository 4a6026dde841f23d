"""Account of one sequence's drafts: they go on only as long as they pay for their verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.core.request import VerificationCosts

# Steps that a sequence may lose at its beginning, and for each token of its output: a hundredth, so that a long answer
# without any right draft takes 1 % longer. Beyond the credit only drafts that were right pay for further ones.
_FIRST_CREDIT, _CREDIT_PER_TOKEN = 0.48, 0.01
# Steps that are kept of what drafts have gained, beside the gain of the last verification: a text that stops repeating
# itself soon stops drafting, too.
_MOST_CREDIT = 1.0
_FIRST_DRAFTS = 4


class DraftAccount:
    """Account in steps without drafts. An accepted draft saves one; a verification costs what it adds to one.

    While drafts are right there are more at a time, up to the request's number; after a wrong one there are as many as
    were right. So a text without repetitions is asked by single, cheap drafts, each time after a longer pause.
    """

    __slots__ = ("_costs", "_credit", "_drafts", "_paid_tokens")

    def __init__(self, costs: VerificationCosts) -> None:
        self._costs = costs
        self._credit = _FIRST_CREDIT
        self._drafts = _FIRST_DRAFTS
        # Output tokens that have given their credit.
        self._paid_tokens = 0

    def affordable(self, most: int, num_output_tokens: int) -> int:
        """Return the number of drafts to verify now, at most `most`; 0: drafting pauses."""
        new, self._paid_tokens = num_output_tokens - self._paid_tokens, num_output_tokens
        self._credit = min(self._credit + _CREDIT_PER_TOKEN * new, max(_MOST_CREDIT, self._credit))
        number = min(self._drafts, most)
        if self._costs.of(number) <= self._credit:
            return number
        base = self._costs.of(0)
        each = self._costs.of(1) - base
        return max(int((self._credit - base) / each), 0) if each > 0.0 else 0

    def note(self, num_drafts: int, accepted: int) -> None:
        """Take a verification."""
        self._credit = min(self._credit + accepted - self._costs.of(num_drafts), max(_MOST_CREDIT, accepted))
        self._drafts = 2 * max(num_drafts, self._drafts) if accepted == num_drafts else max(accepted, 1)
