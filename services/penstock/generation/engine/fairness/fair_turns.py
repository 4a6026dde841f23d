"""Turns of tenants in the engine's steps: a crowd of one tenant's sequences must not make every step of others slow."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.generation.engine.fairness.shares import CROWD

# Weights of a shorter and of a longer light step in their mean: steps with a prompt do not show the time of decoding.
_SHORTER_WEIGHT, _LONGER_WEIGHT = 1 / 4, 1 / 32
# Most steps in a row in which crowds rest: then they go on, even if their steps are slow.
_MOST_LIGHT_STEPS = 64


class FairTurns:
    """Chooser of the tenants that rest in a step. Engine thread only.

    After each full step come some light ones, without the crowd: enough that an average step takes at most `slowdown`
    times as long as a light one.
    """

    def __init__(self, slowdown: float) -> None:
        """`slowdown` 0: nobody ever rests."""
        self._slowdown = slowdown
        # Mean time of light steps, with more weight on the shorter ones; 0: there was none.
        self._light_seconds = 0.0
        self._light_steps_left = 0
        # The last full step's time, and the least one then; None: counted. Most engines have one tenant: nobody asks.
        self._full: tuple[float, float] | None = None

    def choose(self, widths: Mapping[str, int]) -> frozenset[str]:
        """Return the tenants that rest in the next step. `widths`: running sequences of each that has a request."""
        if self._full is not None:
            self._plan_light(*self._full)
            self._full = None
        if not self._light_steps_left or len(widths) < 2:
            return frozenset()
        total, others = sum(widths.values()), len(widths) - 1
        crowds = frozenset(tenant for tenant, width in widths.items() if width > CROWD * (total - width) / others)
        if crowds:
            self._light_steps_left -= 1
        return crowds

    def stepped(self, seconds: float, least_step_seconds: float, *, is_light: bool) -> None:
        """Take the time of a step; `is_light`: a crowd did rest in it.

        `least_step_seconds` stands for a light step's time before there was one.
        """
        if is_light:
            known = self._light_seconds or least_step_seconds or seconds
            weight = _SHORTER_WEIGHT if seconds < known else _LONGER_WEIGHT
            self._light_seconds = known + weight * (seconds - known)
            return
        self._full = seconds, least_step_seconds

    def _plan_light(self, seconds: float, least_step_seconds: float) -> None:
        light = self._light_seconds or least_step_seconds
        if self._slowdown and light:
            # (full + n light) / (n + 1) is the slowdown times light.
            needed = (seconds / light - self._slowdown) / (self._slowdown - 1.0)
            self._light_steps_left = min(max(math.ceil(needed), 0), _MOST_LIGHT_STEPS)
