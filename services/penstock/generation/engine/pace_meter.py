"""Measurement of the engine's pace: throughput while requests wait, time of a step, length of answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.common.pace import FIRST_GUESS_TOKENS, NUM_BUDGETS, Pace, bucket_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.generation.engine.config import EngineConfig

# Seconds over which throughput is averaged, and in which the least step time is forgotten.
_THROUGHPUT_SECONDS, _LEAST_SECONDS = 10.0, 600.0
# Weight of one more step, answer and wait in their averages.
_STEP_WEIGHT, _ANSWER_WEIGHT, _WAIT_WEIGHT = 1 / 16, 1 / 32, 1 / 64
# Bounds of the correction of forecast waits.
_LEAST_ERROR, _MOST_ERROR = 0.5, 4.0


class PaceMeter:
    """Averages of the engine's pace. A few numbers are changed in a step, none for a token. Engine thread only."""

    def __init__(self, config: EngineConfig) -> None:
        self._batch_tokens = config.max_batch_tokens
        self._headroom = config.deadline_headroom
        # Tokens and seconds of steps during which something waited, fading.
        self._tokens = self._seconds = 0.0
        self._step_seconds = self._full_seconds = self._since_full = 0.0
        # Time of a step that draws when there is little to do; 0: not known.
        self.least_step_seconds = 0.0
        self._output_tokens = float(FIRST_GUESS_TOKENS)
        self._output_shares = [0.0] * NUM_BUDGETS
        # Waits as they were, over waits as they were forecast.
        self._wait_error = 1.0

    def stepped(self, seconds: float, tokens: int, *, something_waited: bool, drew: bool, is_light: bool) -> None:
        """Take a step's time, until the next one could begin, and its tokens of prompts and outputs.

        `is_light`: a tenant rested in it.
        """
        if something_waited:
            keep = math.exp(-seconds / _THROUGHPUT_SECONDS)
            self._tokens = self._tokens * keep + tokens
            self._seconds = self._seconds * keep + seconds
        if drew:
            self._step_seconds += (_STEP_WEIGHT if self._step_seconds else 1.0) * (seconds - self._step_seconds)
            self._note_least(seconds)
        self._since_full += seconds
        if drew and not is_light:
            weight = _STEP_WEIGHT if self._full_seconds else 1.0
            self._full_seconds += weight * (self._since_full - self._full_seconds)
        if not is_light:
            self._since_full = 0.0

    def answered(self, tokens: float, budget: int, *, is_whole: bool) -> None:
        """Take the length of a sequence, of at most `budget` tokens.

        One that is not whole was ended before its time: it is no shorter than this.
        """
        if is_whole or tokens > self._output_tokens:
            self._output_tokens += _ANSWER_WEIGHT * (tokens - self._output_tokens)
        known, share = self._output_shares[bucket_of(budget)], tokens / max(budget, 1)
        # 0 means that nothing is known.
        if is_whole or 0.0 < known < share:
            known += (_ANSWER_WEIGHT if known else 1.0) * (share - known)
            self._output_shares[bucket_of(budget)] = max(known, 1e-9)

    def forecast(self, wait_seconds: float) -> float:
        """Return a forecast wait without the correction by which `pace` made it: what `started` compares."""
        return wait_seconds / self._wait_error

    def started(self, waited: float, forecast: float) -> None:
        """Take a request's wait, and the `forecast` of it when it came. Seconds."""
        if forecast > 4 * self._step_seconds:
            error = self._wait_error + _WAIT_WEIGHT * (waited / forecast - self._wait_error)
            self._wait_error = min(max(error, _LEAST_ERROR), _MOST_ERROR)

    def pace(self, waiting: Mapping[str, float], *, is_busy: bool, is_idle: bool) -> Pace:
        """Return the present figures. `waiting`: tokens that wait, by tenant. `is_idle`: nothing runs or waits.

        Steps of an idle engine will be the least ones. Taken for the last ones, which may have been the slowest, they
        would keep everything out, and never be measured again.
        """
        # By position: it is made in every step.
        return Pace(
            self._tokens / self._seconds / self._wait_error if self._seconds else 0.0,
            self.least_step_seconds if is_idle else self._step_seconds,
            self.least_step_seconds,
            self._full_seconds,
            self._output_tokens,
            self._output_shares,
            self._batch_tokens,
            self._headroom,
            is_busy,
            waiting,
        )

    def _note_least(self, seconds: float) -> None:
        least, step = self.least_step_seconds, self._step_seconds
        if not least or step < least:
            self.least_step_seconds = step
        else:
            self.least_step_seconds += (step - least) * min(seconds / _LEAST_SECONDS, 1.0)
