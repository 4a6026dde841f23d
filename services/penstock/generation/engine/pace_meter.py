"""Measurement of the engine's pace: throughput while requests wait, time of a step, length of answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.common.pace import FIRST_GUESS_TOKENS, NUM_BUDGETS, Pace, bucket_of
from penstock.generation.engine.expected_time import ExpectedTime, ForecastErrors, RunningAges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.common.pace import Demand
    from penstock.generation.engine.config import EngineConfig

# Seconds of the short and the long average of throughput, and seconds in which the least step time is forgotten.
_LATELY_SECONDS, _THROUGHPUT_SECONDS, _LEAST_SECONDS = 2.0, 10.0, 600.0
# Weight of one more step in its short and its long average, and of one more answer and wait in theirs.
_LATELY_WEIGHT, _STEP_WEIGHT, _ANSWER_WEIGHT, _WAIT_WEIGHT = 1 / 4, 1 / 16, 1 / 32, 1 / 64
# Bounds of the correction of forecast waits.
_LEAST_ERROR, _MOST_ERROR = 1.0, 4.0


class PaceMeter:
    """Averages of the engine's pace. A few numbers are changed in a step, none for a token. Engine thread only.

    A shared machine becomes slower from one step to the next. So each average has a short one beside it, and the slower
    of both counts: slowness is believed at once, and recovery only after some time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._batch_tokens = config.max_batch_tokens
        self._headroom = config.deadline_headroom
        # Tokens and seconds of steps with waiting requests, fading.
        self._tokens = self._seconds = self._tokens_lately = self._seconds_lately = 0.0
        self._step_seconds = self._step_seconds_lately = self._full_seconds = self._since_full = 0.0
        self._last_seconds = math.inf
        # Time of a step that draws, by the short average; and the least such time, lately and before.
        self.step_seconds = self.surest_step_seconds = 0.0
        # Time of a step that draws when there is little to do; 0: not known.
        self.least_step_seconds = 0.0
        self._output_tokens = float(FIRST_GUESS_TOKENS)
        self._output_shares = [0.0] * NUM_BUDGETS
        # Waits as they were, over waits as they were forecast.
        self._wait_error = 1.0
        self._errors = ForecastErrors(config.wait_headroom)
        self._ages = RunningAges()

    def stepped(self, seconds: float, tokens: int, *, something_waited: bool, drew: bool, is_light: bool) -> None:
        """Take a step's time, until the next one could begin, and its tokens of prompts and outputs.

        `is_light`: a tenant rested in it.
        """
        if something_waited:
            keep = math.exp(-seconds / _THROUGHPUT_SECONDS)
            self._tokens = self._tokens * keep + tokens
            self._seconds = self._seconds * keep + seconds
            keep = math.exp(-seconds / _LATELY_SECONDS)
            self._tokens_lately = self._tokens_lately * keep + tokens
            self._seconds_lately = self._seconds_lately * keep + seconds
        if drew:
            long, lately = self._step_seconds, self._step_seconds_lately
            # A single slow step, such as one with a long prompt, says nothing about the next ones.
            of_late = seconds if seconds < self._last_seconds else self._last_seconds
            long = long + _STEP_WEIGHT * (seconds - long) if long else seconds
            lately = lately + _LATELY_WEIGHT * (of_late - lately) if lately else of_late
            self._step_seconds, self._step_seconds_lately, self._last_seconds = long, lately, seconds
            self.step_seconds, self.surest_step_seconds = (long, lately) if long > lately else (lately, long)
            self._note_least(seconds)
        self._since_full += seconds
        if drew and not is_light:
            weight = _STEP_WEIGHT if self._full_seconds else 1.0
            self._full_seconds += weight * (self._since_full - self._full_seconds)
        if not is_light:
            self._since_full = 0.0

    def answered(self, tokens: float, budget: int, *, is_whole: bool) -> None:
        """Take the length of a sequence of at most `budget` tokens.

        A sequence that was cut off would have been at least this long.
        """
        if is_whole or tokens > self._output_tokens:
            self._output_tokens += _ANSWER_WEIGHT * (tokens - self._output_tokens)
        known, share = self._output_shares[bucket_of(budget)], tokens / max(budget, 1)
        # 0 means that nothing is known.
        if is_whole or 0.0 < known < share:
            known += (_ANSWER_WEIGHT if known else 1.0) * (share - known)
            self._output_shares[bucket_of(budget)] = max(known, 1e-9)

    def expect(self, demand: Demand, pace: Pace) -> ExpectedTime:
        """Return the time that a request arriving now will take, by the present figures."""
        wait = pace.wait_seconds(demand)
        prompt_steps = pace.prompt_steps(demand)
        step_seconds = pace.step_seconds_of(demand)
        return ExpectedTime(wait, wait / self._wait_error, step_seconds, prompt_steps, pace.output(demand))

    def started(self, expected: ExpectedTime, arrival: float, now: float, *, was_paused: bool = False) -> None:
        """Take a request's first step; it is now. `was_paused`: its wait says nothing about those of others."""
        self._ages.began(expected, now)
        forecast = expected.raw_wait_seconds
        if not was_paused and forecast > 4 * self._step_seconds:
            error = self._wait_error + _WAIT_WEIGHT * ((now - arrival) / forecast - self._wait_error)
            self._wait_error = min(max(error, _LEAST_ERROR), _MOST_ERROR)

    def ended(
        self,
        expected: ExpectedTime,
        arrival: float,
        started: float | None,
        now: float,
        generated: float,
        *,
        was_paused: bool = False,
    ) -> None:
        """Take a request's end: its first step, if it had one, and the tokens that it generated for each sequence.

        `was_paused` as in `started`.
        """
        if started is not None:
            self._ages.ended(expected, started)
        if expected.wait_seconds and not was_paused:
            # By its true length: a long answer is not an error of the pace.
            forecast = expected.wait_seconds if started is None else expected.seconds(generated)
            self._errors.note(now - arrival, forecast * self._headroom, now)

    def pace(self, waiting: Mapping[str, float], now: float, free_places: int, *, is_idle: bool) -> Pace:
        """Return the figures at `now`. `waiting`: waiting tokens, by tenant. `is_idle`: nothing runs or waits.

        `free_places`: sequences that would begin in the next step; 0: a newcomer waits for others.

        The next steps of an idle engine are taken to be the fastest known. If the last, perhaps slowest, steps counted
        instead, every request could be refused and the pace would never be measured again.
        """
        throughput = 0.0
        if self._seconds:
            throughput = min(self._tokens / self._seconds, self._tokens_lately / self._seconds_lately)
        # By position: it is made in every step.
        return Pace(
            throughput / self._wait_error,
            self.least_step_seconds if is_idle else self.step_seconds,
            self.least_step_seconds,
            self._full_seconds,
            self._output_tokens,
            self._output_shares,
            self._batch_tokens,
            self._headroom,
            self._errors.headroom,
            not free_places,
            waiting,
            self._ages.uneven_seconds(now, self.step_seconds),
            free_places,
        )

    def _note_least(self, seconds: float) -> None:
        least, step = self.least_step_seconds, self._step_seconds
        if not least or step < least:
            self.least_step_seconds = step
        else:
            self.least_step_seconds += (step - least) * min(seconds / _LEAST_SECONDS, 1.0)
