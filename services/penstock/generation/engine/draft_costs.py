"""Costs of drafts on this machine, measured in the engine's own steps: of verifying them, and of a head's drafting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.engine.engine_listener import EngineListener

if TYPE_CHECKING:
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats, StepSample

# Shares of a plain step that drafts add to it, and each of them, before any was measured: between those of a small
# model with AVX2 and with AVX-512.
_FIRST_BASE, _FIRST_EACH = 0.15, 0.08
# The same of making one with a draft head.
_FIRST_DRAFTING = 0.1
# Weight of one more step once several were measured, and the most of a plain step by which it differs from what is
# expected: it may be slow for another reason. With both sides cut alike the averages are near to medians.
_WEIGHT, _MOST_ERROR = 1 / 8, 0.5
# Drafts are counted in fours, so that both shares are learnt at the same pace.
_DRAFTS_UNIT = 4.0
# One call in this many of `retries` is true: with the steps before and behind it a trial takes some ten plain steps.
_RETRIED_EVERY = 256
# Numbers of sequences are told apart by their number of bits.
_SIZES = 33


class DraftCosts(EngineListener):
    """VerificationCosts as averages of steps that only decode, by their number of sequences: the seconds without
    drafts, and the share that drafts add, as a line over their number (least mean squares). A few numbers are changed
    in a step, none for a token and none before `measure`. Engine thread only."""

    def __init__(self, stats: EngineStats) -> None:
        """`stats` count verified drafts before this listener hears of a step."""
        self._stats = stats
        self._is_measured = False
        self._num_verified = 0
        # Seconds of a step without drafts; 0: there was none.
        self._plain = [0.0] * _SIZES
        # Shares of such a step that drafts of all its sequences add to it: at all, and for each four of a sequence.
        self._base = [_FIRST_BASE] * _SIZES
        self._more = [_FIRST_EACH * _DRAFTS_UNIT] * _SIZES
        self._num_learnt = [0] * _SIZES
        # The share that making one draft of every sequence adds.
        self._drafting = [_FIRST_DRAFTING] * _SIZES
        self._size = 1
        # Drafts of each sequence of the last step, and the share that they added; 0 drafts: it had none.
        self._last_drafts, self._last_share = 0.0, 0.0
        # Seconds of making the drafts that the next step verifies.
        self._draft_seconds = 0.0
        self._num_asked = 0

    @property
    def is_known(self) -> bool:
        return self._plain[self._size] > 0.0

    def measure(self) -> None:
        """Measure steps from now on: a request drafts that asks for costs."""
        if not self._is_measured:
            self._is_measured = True
            self._num_verified = self._stats.accepted_draft_tokens + self._stats.rejected_draft_tokens

    def stepped(self, scheduler: Scheduler, sample: StepSample, started: float, ended: float) -> None:
        """Take the step's time, once somebody asks."""
        if not self._is_measured:
            return
        stats, before = self._stats, self._num_verified
        self._num_verified = stats.accepted_draft_tokens + stats.rejected_draft_tokens
        num_drafts = self._num_verified - before
        size = self._size = sample.num_sequences.bit_length()
        last_drafts, self._last_drafts = self._last_drafts, 0.0
        draft_seconds, self._draft_seconds = self._draft_seconds, sample.draft_seconds
        if sample.num_tokens - sample.num_sequences != num_drafts:
            # It has rows of prompts.
            return
        seconds, plain = ended - started - sample.draft_seconds, self._plain[size]
        more = seconds / plain - 1.0 if plain > 0.0 else 0.0
        if last_drafts:
            # A step after drafts takes longer, too: the runner has to find its short way again.
            self._learn(size, last_drafts, self._last_share + (0.0 if num_drafts else max(more, 0.0)))
        if num_drafts:
            if plain > 0.0:
                self._last_drafts, self._last_share = num_drafts / sample.num_sequences, more
                if draft_seconds:
                    each = draft_seconds / plain / self._last_drafts
                    self._drafting[size] += _WEIGHT * _cut(each - self._drafting[size])
        elif not last_drafts:
            self._plain[size] = plain * (1.0 + _WEIGHT * _cut(more)) if plain > 0.0 else seconds

    def of(self, num_drafts: int) -> float:
        """Return how much longer a step like the last one takes with `num_drafts` drafts of each of its sequences, over
        its time without."""
        return self._base[self._size] + self._more[self._size] * num_drafts / _DRAFTS_UNIT

    def of_drafting(self, num_drafts: int) -> float:
        """Return how much longer it takes to make them before, by a draft head."""
        return self._drafting[self._size] * num_drafts

    def retries(self) -> bool:
        """Counts for all sequences of the engine together."""
        self._num_asked += 1
        return self._num_asked % _RETRIED_EVERY == 0

    def _learn(self, size: int, num_drafts: float, share: float) -> None:
        """Move the line towards the share that this number of drafts of each sequence has added."""
        at = num_drafts / _DRAFTS_UNIT
        error = _cut(share - self._base[size] - self._more[size] * at)
        self._num_learnt[size] += 1
        step = max(_WEIGHT, 1.0 / (1.0 + self._num_learnt[size])) * error / (1.0 + at * at)
        self._base[size] = max(self._base[size] + step, 0.0)
        self._more[size] = max(self._more[size] + step * at, 0.0)


def _cut(error: float) -> float:
    return min(max(error, -_MOST_ERROR), _MOST_ERROR)
