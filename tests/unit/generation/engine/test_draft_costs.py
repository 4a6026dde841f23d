"""Costs of drafts are those of the engine's own steps."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.generation.core.step import DraftKind
from penstock.generation.engine.draft_costs import DraftCosts
from penstock.generation.engine.stats import EngineStats, StepSample


class Steps:
    """Steps of an engine, as its listener hears of them."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.costs = DraftCosts(self.stats)
        self.costs.measure()
        self._scheduler: Any = None

    def add(
        self, seconds: float, sequences: int = 1, drafts: int = 0, prompt: int = 0, draft_model: float = 0.0
    ) -> None:
        """One step with this number of drafts of all its sequences together, and rows of prompts."""
        if drafts:
            self.stats.count_drafts(DraftKind.PROMPT_LOOKUP, 0, drafts)
        sample = StepSample(sequences, sequences + drafts + prompt, 0.0, seconds, 0.0, draft_model)
        self.costs.stepped(self._scheduler, sample, 100.0, 100.0 + seconds)


def test_costs_become_those_of_the_steps() -> None:
    steps = Steps()
    for turn in range(300):
        steps.add(0.010)
        drafts = 1 + turn % 8
        steps.add(0.010 * (1.2 + 0.05 * drafts), drafts=drafts)
        # The runner has to find its short way again.
        steps.add(0.013)
    # The step after drafts belongs to their costs.
    assert steps.costs.of(1) == pytest.approx(0.25 + 0.3, abs=0.02)
    assert steps.costs.of(8) == pytest.approx(0.6 + 0.3, abs=0.03)


def test_a_draft_in_a_crowd_costs_what_it_takes_from_everyone() -> None:
    steps = Steps()
    for _ in range(300):
        steps.add(0.010, sequences=8)
        steps.add(0.014, sequences=8, drafts=8)
        steps.add(0.010, sequences=8)
    # Each of 8 sequences had one draft.
    assert steps.costs.of(1) == pytest.approx(0.4, abs=0.02)


def test_steps_with_prompts_and_the_draft_models_time_do_not_count() -> None:
    steps = Steps()
    steps.add(0.010)
    before = steps.costs.of(4)
    for _ in range(100):
        steps.add(9.0, prompt=512)
        steps.add(9.0, prompt=512, drafts=4)
        steps.add(5.010, draft_model=5.0)
    assert steps.costs.of(4) == before


def test_a_slow_moment_counts_little() -> None:
    steps = Steps()
    for _ in range(200):
        steps.add(0.010)
        steps.add(0.012, drafts=2)
        steps.add(0.010)
    usual = steps.costs.of(2)
    steps.add(60.0, drafts=2)
    assert steps.costs.of(2) < usual + 0.5
    for _ in range(60):
        steps.add(0.010)
        steps.add(0.012, drafts=2)
        steps.add(0.010)
    assert steps.costs.of(2) == pytest.approx(usual, abs=0.02)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    steps = Steps()
    before = steps.costs.of(3)
    steps.add(0.0)
    steps.add(0.0, drafts=3)
    assert steps.costs.of(3) == before


def test_making_drafts_with_a_head_has_a_cost_of_its_own() -> None:
    steps = Steps()
    assert not steps.costs.is_known
    for _ in range(300):
        steps.add(0.010, sequences=2)
        # Four drafts of each are made after this step, in half the time of a step beside it.
        steps.add(0.015, sequences=2, draft_model=0.005)
        steps.add(0.012, sequences=2, drafts=8)
        steps.add(0.010, sequences=2)
    assert steps.costs.is_known
    assert steps.costs.of_drafting(4) == pytest.approx(0.5, abs=0.02)
